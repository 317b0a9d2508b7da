"""The page: a single HTML file that makes no network requests.

Recorded data is embedded as JSON, and the script only ever displays it as text.  A content security policy, enforced by
the browser, allows no style or script but the two in the file.
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
"""The parts of the script, in order: first the data, then drawing, then interaction."""


def page_of(layout: Mapping[str, Any]) -> str:
    """Return the HTML of the page."""
    style, script = _part("page.css"), "\n".join(map(_part, SCRIPTS))
    places = {
        "{{policy}}": escape(POLICY.format(style=_hash(style), script=_hash(script))),
        "{{title}}": escape(str(layout["name"])),
        "{{style}}": style,
        # recorded text must not close the script element that the JSON is in
        "{{layout}}": msgspec.json.encode(layout).decode().replace("<", "\\u003c"),
        "{{script}}": script,
    }
    page = ""
    rest = _part("page.html")
    for place, content in places.items():  # in order of appearance, so that placeholders inside inserted content stay
        before, _, rest = rest.partition(place)
        page += before + content
    return page + rest


def _part(name: str) -> str:
    return files("penstock.api.cli.page").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return b64encode(sha256(text.encode()).digest()).decode()
