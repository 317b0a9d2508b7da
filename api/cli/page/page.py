"""The page: a single HTML file that makes no network requests.

Recorded data is embedded as JSON, and the script only ever displays it as text.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import msgspec

from penstock.api.web_page import PALETTE, filled, part_of, policy_of

SCRIPTS = ("layout.js", "rows.js", "timeline.js", "chosen.js", "keys.js", "page.js")
"""The parts of the script, in order: first the data, then drawing, then interaction."""


def page_of(layout: Mapping[str, Any]) -> str:
    """Return the HTML of the page."""
    style, script = PALETTE + _part("page.css"), "\n".join(map(_part, SCRIPTS))
    contents = {
        "policy": escape(policy_of(style, script)),
        "title": escape(str(layout["name"])),
        "style": style,
        # recorded text must not close the script element that the JSON is in
        "layout": msgspec.json.encode(layout).decode().replace("<", "\\u003c"),
        "script": script,
    }
    return filled(_part("page.html"), contents)


def _part(name: str) -> str:
    return part_of("penstock.api.cli.page", name)
