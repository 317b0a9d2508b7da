"""Web pages of a single file: a content security policy, enforced by the browser, allows no other style or script.

All pages have one head, one style for what they share, and one script for it: those of ``api/http/page``.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import msgspec

SHARED = "penstock.api.http.page"

HEADERS = {
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The headers of each page that a server sends, besides its policy."""

Part = tuple[str, str]
"""A package, and the name of a file in it."""


@dataclass(frozen=True)
class WebPage:
    """A page of these parts, after what all pages share; ``directives`` are added to its policy."""

    body: Part
    styles: Sequence[Part]
    scripts: Sequence[Part]
    directives: Sequence[str] = ()

    @cached_property
    def style(self) -> str:
        """The style of the page."""
        return "\n".join(part_of(*part) for part in ((SHARED, "page.css"), *self.styles))

    @cached_property
    def script(self) -> str:
        """The script of the page."""
        return "\n".join(part_of(*part) for part in ((SHARED, "page.js"), *self.scripts))

    @cached_property
    def policy(self) -> str:
        """The policy of the page: one style, one script, and nothing from elsewhere."""
        own = (
            "default-src 'none'",
            "img-src data:",
            f"style-src '{_digest(self.style)}'",
            f"script-src '{_digest(self.script)}'",
            "base-uri 'none'",
            "form-action 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
        return "; ".join((*own, *self.directives))

    @property
    def headers(self) -> dict[str, str]:
        """The headers with which a server sends the page."""
        return {"Content-Security-Policy": self.policy, **HEADERS}

    def html(self, title: str, *, carries_policy: bool = False, **contents: str) -> str:
        """Return the HTML of the page: as a file, it carries its policy.

        ``contents`` are put into the places of the body, which are in order of appearance.
        """
        policy = f'<meta http-equiv="Content-Security-Policy" content="{escape(self.policy)}">\n'
        head = {"policy": policy if carries_policy else "", "title": escape(title), "style": self.style}
        return _filled(part_of(SHARED, "head.html"), head) + _filled(
            part_of(*self.body), contents | {"script": self.script}
        )

    def html_of(self, layout: Any, title: str) -> str:
        """Return the HTML of the page as a file with its data, which its script draws."""
        # recorded text must not close the script element that the JSON is in
        data = msgspec.json.encode(layout).decode().replace("<", "\\u003c")
        return self.html(f"{title} · penstock", carries_policy=True, layout=data)


def part_of(package: str, name: str) -> str:
    """Return the text of a file that lies in a package."""
    return files(package).joinpath(name).read_text("utf-8")


def _filled(template: str, contents: dict[str, str]) -> str:
    """Return a template with the contents of its places, which are in order of appearance.

    A place that is named inside a content stays as it is.
    """
    page = ""
    for name, content in contents.items():
        before, _, template = template.partition(f"{{{{{name}}}}}")
        page += before + content
    return page + template


def _digest(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"
