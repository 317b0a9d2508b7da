"""The links of the built site: each leads to a file, and to an element of it.  No page requests anything elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from selectolax.lexbor import LexborHTMLParser

_REQUESTS = (("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("use", "href"))
"""Elements and their attributes whose addresses a browser requests by itself."""


@cache
def _parsed(page: Path) -> LexborHTMLParser:
    return LexborHTMLParser(page.read_text())


@cache
def _ids(page: Path) -> frozenset[str]:
    tree = _parsed(page)
    named = [node.attributes.get("name") for node in tree.css("a[name]")]
    return frozenset(value for value in (*(node.attributes.get("id") for node in tree.css("[id]")), *named) if value)


def mistakes(site: Path) -> list[str]:
    """Return what is wrong with the links of a site, a line for each."""
    return [
        f"{page.relative_to(site)}: {wrong}" for page in sorted(site.rglob("*.html")) for wrong in _wrong(page, site)
    ]


def _wrong(page: Path, site: Path) -> Iterator[str]:
    tree = _parsed(page)
    for element, attribute in _REQUESTS:
        for node in tree.css(f"{element}[{attribute}]"):
            address = node.attributes.get(attribute) or ""
            if urlsplit(address).netloc:
                yield f"<{element}> requests {address}"
    if page.name == "404.html":  # its links begin at the root of the site
        return
    for node in tree.css("a[href], link[href], img[src], source[srcset], script[src]"):
        given = node.attributes
        address = given.get("href") or given.get("src") or given.get("srcset") or ""
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
        if target.is_dir():
            target /= "index.html"
        if not target.is_relative_to(site.resolve()) or not target.exists():
            yield f"{address} leads nowhere"
        elif parts.fragment and target.suffix == ".html" and unquote(parts.fragment) not in _ids(target):
            yield f"{address} leads to no heading"
