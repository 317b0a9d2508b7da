"""Pages as the model sees them: lines of at most 80 characters, numbered, shown a view at a time.

The format is the one of gpt-oss's reference browser tool, on which the model was trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.html import LONGEST_TEXT, clean, link_mark
from penstock.extensions.tools.browser.search_engines import Hit
from penstock.pipeline.urls import host_of
from penstock.services.tools import Listed, Source

WIDTH = 80
"""Characters of a line."""
VIEW_TOKENS: Mapping[str, int] = {"low": 512, "medium": 1_024, "high": 2_048}
"""The most tokens of a view, by the ``search_context_size`` of the request; the model was trained with ``medium``."""
_LONGEST_VIEW = 8
"""The factor by which a view may be longer if the model chose the number of lines."""
_MOST_MATCHES = 50
"""Matches of a pattern that are shown."""
_MATCH_LINES = 4
"""Lines that are shown of each match."""
_SNIPPET = 1_000
"""Characters of a snippet."""

_LINE = re.compile(rf"(.{{1,{WIDTH}}})(?: |$)|(.{{{WIDTH}}})")
_LINK = re.compile(r"【\d+†([^†】]+)(†[^†】]+)?】")
SOURCE_PREFIX = "view-source:"
FIND_SUFFIX = "/find?pattern="
"""Parts of the URLs shown for pages that do not exist on the web: a page's source, and the matches in a page."""


@dataclass(frozen=True)
class Page:
    """A page that the model can view; ``links`` are URLs by number.

    Results and matches have no URL of their own: ``url`` is empty for search results, and the URL of the searched page
    for matches.  ``places`` are the line of each result or match.
    """

    kind: Literal["page", "results", "matches"]
    title: str
    url: str
    lines: tuple[str, ...]
    links: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    address: str = ""
    """The URL to show, if it is not ``url``."""
    cited_as: str = ""
    """The title for citations, if it is not ``title``."""

    def source(self) -> Source:
        if self.kind != "results":
            return Source(self.cited_as or self.title, self.url.removeprefix(SOURCE_PREFIX))
        sources = tuple(Source(self._name(at), url) for at, url in enumerate(self.links))
        return Listed(self.title, "", self.places, sources)

    def _name(self, at: int) -> str:
        link = _LINK.search(" ".join(self.lines[self.places[at] :][:8]))
        return link[1] if link else self.title


def opened(url: str, title: str, text: str, links: Iterable[str]) -> Page:
    """Make the page of a URL from its converted text."""
    lines = wrapped(f"\nURL: {url}\n{text[:LONGEST_TEXT]}")
    return Page("page", title=_title(title) or host_of(url) or url, url=url, lines=lines, links=tuple(links))


def results(query: str, hits: Iterable[Hit]) -> Page:
    """Make a page of search results; each URL is listed once."""
    lines = ["", "URL: ", "# Search Results", ""]
    places: dict[str, int] = {}
    for hit in hits:
        if hit.url not in places:
            mark = link_mark(len(places), _title(hit.title) or hit.url, host_of(hit.url) or "")
            places[hit.url] = len(lines)
            lines += wrapped(f"  * {mark} {_one_line(hit.snippet[:_SNIPPET])}".rstrip())
    return Page(
        "results", title=_title(query), url="", lines=tuple(lines), links=tuple(places), places=tuple(places.values())
    )


def matches(page: Page, pattern: str) -> Page:
    """Make a page of the matches of ``pattern`` in a page, ignoring case.

    Raises `CallFailed` for pages of results or matches, as the reference tool does.
    """
    if page.kind != "page":
        raise CallFailed("Cannot run `find` on search results page or find results page")
    lines = _LINK.sub(_words, "\n".join(page.lines)).split("\n")
    places = list(_places(lines, pattern.lower()))
    chunks = [
        "\n".join((f"# 【{number}†match at L{place}】", *lines[place : place + _MATCH_LINES]))
        for number, place in enumerate(places)
    ]
    text = "\n\n".join(chunks) or f"No `find` results for pattern: `{clean(pattern)}`"
    return Page(
        "matches",
        title=f"Find results for text: `{_title(pattern)}` in `{page.title}`",
        url=page.url,
        lines=wrapped(text),
        links=(page.url,) * len(places),
        places=tuple(places),
        address=f"{page.url}{FIND_SUFFIX}{quote(pattern, safe='')}",
        cited_as=page.title,
    )


def _places(lines: list[str], pattern: str) -> Iterable[int]:
    """Yield the first line of each match; the lines shown for matches do not overlap."""
    at = count = 0
    while at < len(lines) and count < _MOST_MATCHES:
        if pattern in lines[at].lower():
            yield at
            count += 1
            at += _MATCH_LINES
        else:
            at += 1


def _words(link: re.Match[str]) -> str:
    """Return the text of a link, with the line breaks of its mark, so that line numbers stay right."""
    return link[1] + "\n" * (link[2] or "").count("\n")


def _title(text: str) -> str:
    return _one_line(text)[:300]


def _one_line(text: str) -> str:
    return clean(" ".join(text.split()))


def wrapped(text: str) -> tuple[str, ...]:
    """Split a text into lines of at most `WIDTH` characters."""
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= WIDTH:
            lines.append(line)
        else:
            lines += (words or cut for words, cut in _LINE.findall(line))
    return tuple(lines)


def view(page: Page, cursor: int, loc: int = 0, num_lines: int = -1, tokens: int = VIEW_TOKENS["medium"]) -> str:
    """Return the view of a page from line ``loc`` on, cut at ``tokens``.

    Raises `CallFailed` if there is no such line.
    """
    if loc >= len(page.lines):
        raise CallFailed(f"Invalid location parameter: `{loc}`. Cannot exceed page maximum of {len(page.lines) - 1}.")
    shown = list(_shown(page.lines, loc, num_lines, tokens))
    address = page.address or page.url
    head = f"[{cursor}] {page.title}{f' ({address})' if address else ''}"
    return "\n".join((head, f"**viewing lines [{loc} - {loc + len(shown) - 1}] of {len(page.lines) - 1}**", "", *shown))


def _shown(lines: tuple[str, ...], loc: int, num_lines: int, tokens: int) -> Iterable[str]:
    budget = _LONGEST_VIEW * tokens if num_lines > 0 else tokens
    end = min(len(lines), loc + num_lines) if num_lines > 0 else len(lines)
    for at in range(loc, end):
        line = f"L{at}: {lines[at]}"
        yield line
        budget -= len(line.encode()) // 4 + 1  # an estimate of its tokens, close in most languages
        if budget <= 0:
            return
