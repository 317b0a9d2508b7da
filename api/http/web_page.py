"""Web pages of a single file: a content security policy, enforced by the browser, allows no other style or script."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files


def part_of(package: str, name: str) -> str:
    """Return the text of a file that lies in a package."""
    return files(package).joinpath(name).read_text("utf-8")


PALETTE = part_of("penstock.api", "palette.css")
"""The colours and fonts of all pages, in light and in dark."""


def policy_of(style: str, script: str, *directives: str) -> str:
    """Return the policy of a page with one style and one script; ``directives`` are added to it."""
    own = (
        "default-src 'none'",
        "img-src data:",
        f"style-src '{_digest(style)}'",
        f"script-src '{_digest(script)}'",
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return "; ".join((*own, *directives))


def filled(template: str, contents: Mapping[str, str]) -> str:
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
