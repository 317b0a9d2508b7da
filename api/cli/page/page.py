"""The page: one file of HTML that asks nothing of any network.

Whatever was recorded is data in it, which its script only ever writes as text.  Its policy, which browsers enforce,
lets nothing run or load but the style and the script that stand in it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

POLICY = (
    "default-src 'none'; img-src data:; style-src 'sha256-{style}'; script-src 'sha256-{script}'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)

SCRIPTS = ("layout.js", "rows.js", "timeline.js", "chosen.js", "keys.js", "page.js")
"""The parts of the one script, in order: what is known, how it is drawn, and what can be done with it."""


def page_of(layout: Mapping[str, Any]) -> str:
    """The page that shows what was laid out."""
    style, script = _part("page.css"), "\n".join(map(_part, SCRIPTS))
    places = {
        "{{policy}}": escape(POLICY.format(style=_hash(style), script=_hash(script))),
        "{{title}}": escape(str(layout["name"])),
        "{{style}}": style,
        "{{layout}}": msgspec.json.encode(layout).decode().replace("<", "\\u003c"),
        "{{script}}": script,
    }
    page = ""
    rest = _part("page.html")
    for place, content in places.items():  # in their order, so that none is looked for in what was written
        before, _, rest = rest.partition(place)
        page += before + content
    return page + rest


def _part(name: str) -> str:
    return files("penstock.api.cli.page").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    """How a policy names what may run."""
    return b64encode(sha256(text.encode()).digest()).decode()
