"""Pages as the model sees them: lines of at most 80 characters, numbered, shown a view at a time.

The forms are those that gpt-oss was trained on: the reference tool's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote, urlsplit

from penstock.stages.services.browser.backends import Hit
from penstock.stages.services.browser.failure import Failure
from penstock.stages.services.browser.html import LONGEST_TEXT, clean, link_mark
from penstock.stages.services.tools import Listed, Source

WIDTH = 80
VIEW_TOKENS = 1_024
_LONGEST_VIEW = 8 * VIEW_TOKENS
"""Of a view whose number of lines the model chose."""
_MOST_MATCHES = 50
_MATCH_LINES = 4
_SNIPPET = 1_000

_LINE = re.compile(rf"(.{{1,{WIDTH}}})(?: |$)|(.{{{WIDTH}}})")
_LINK = re.compile(r"【\d+†([^†】]+)(†[^†】]+)?】")
SOURCE_PREFIX = "view-source:"
FIND_SUFFIX = "/find?pattern="
"""How the model is told of pages that are not there: the text of one, and what was found in one."""


@dataclass(frozen=True)
class Page:
    """Something to be viewed; ``links`` are URLs by their number.

    A page of results or matches has no place of its own: ``url`` is empty for results, and for matches that of the
    page that was searched.  ``places`` are the lines where each result begins, or where each match was found.
    """

    kind: Literal["page", "results", "matches"]
    title: str
    url: str
    lines: tuple[str, ...]
    links: tuple[str, ...] = ()
    places: tuple[int, ...] = ()
    address: str = ""
    """What is shown as the URL, where it is not ``url``."""
    cited_as: str = ""
    """The title of what is cited, where it is not ``title``."""

    def source(self) -> Source:
        """What is cited by naming this page."""
        if self.kind != "results":
            return Source(self.cited_as or self.title, self.url.removeprefix(SOURCE_PREFIX))
        found = tuple(Source(self._name(at), url) for at, url in enumerate(self.links))
        return Listed(self.title, "", self.places, found)

    def _name(self, at: int) -> str:
        link = _LINK.search(" ".join(self.lines[self.places[at] :][:8]))
        return link[1] if link else self.title


def opened(url: str, title: str, text: str, links: Iterable[str]) -> Page:
    """A page of the web."""
    lines = wrapped(f"\nURL: {url}\n{text[:LONGEST_TEXT]}")
    return Page("page", _title(title) or urlsplit(url).netloc, url, lines, tuple(links))


def results(query: str, hits: Iterable[Hit]) -> Page:
    """What a search found."""
    lines = ["", "URL: ", "# Search Results", ""]
    places: dict[str, int] = {}
    for hit in hits:
        if hit.url not in places:
            mark = link_mark(len(places), _title(hit.title) or hit.url, urlsplit(hit.url).netloc)
            places[hit.url] = len(lines)
            lines += wrapped(f"  * {mark} {_one_line(hit.snippet[:_SNIPPET])}".rstrip())
    return Page("results", _title(query), "", tuple(lines), tuple(places), tuple(places.values()))


def matches(page: Page, pattern: str) -> Page:
    """Where a page has the pattern, upper and lower case alike."""
    if page.kind != "page":
        raise Failure("Cannot run `find` on search results page or find results page")
    lines = _LINK.sub(_words, "\n".join(page.lines)).split("\n")
    places = list(_places(lines, pattern.lower()))
    chunks = [
        "\n".join((f"# 【{number}†match at L{place}】", *lines[place : place + _MATCH_LINES]))
        for number, place in enumerate(places)
    ]
    text = "\n\n".join(chunks) or f"No `find` results for pattern: `{clean(pattern)}`"
    return Page(
        "matches",
        f"Find results for text: `{_title(pattern)}` in `{page.title}`",
        page.url,
        wrapped(text),
        (page.url,) * len(places),
        tuple(places),
        f"{page.url}{FIND_SUFFIX}{quote(pattern, safe='')}",
        page.title,
    )


def _places(lines: list[str], pattern: str) -> Iterable[int]:
    """The first lines of matches, which do not overlap."""
    at = found = 0
    while at < len(lines) and found < _MOST_MATCHES:
        if pattern in lines[at].lower():
            yield at
            found += 1
            at += _MATCH_LINES
        else:
            at += 1


def _words(link: re.Match[str]) -> str:
    """The text of a link, with as many line breaks as it had."""
    return link[1] + "\n" * (link[2] or "").count("\n")


def _title(text: str) -> str:
    return _one_line(text)[:300]


def _one_line(text: str) -> str:
    return clean(" ".join(text.split()))


def wrapped(text: str) -> tuple[str, ...]:
    """The lines of a text, none longer than `WIDTH`."""
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= WIDTH:
            lines.append(line)
        else:
            lines += (words or cut for words, cut in _LINE.findall(line))
    return tuple(lines)


def view(page: Page, cursor: int, loc: int = 0, num_lines: int = -1) -> str:
    """What the model sees of a page, from line ``loc`` on; raises `Failure` where there is no such line."""
    if loc >= len(page.lines):
        raise Failure(f"Invalid location parameter: `{loc}`. Cannot exceed page maximum of {len(page.lines) - 1}.")
    shown = list(_shown(page.lines, loc, num_lines))
    address = page.address or page.url
    head = f"[{cursor}] {page.title}{f' ({address})' if address else ''}"
    return "\n".join((head, f"**viewing lines [{loc} - {loc + len(shown) - 1}] of {len(page.lines) - 1}**", "", *shown))


def _shown(lines: tuple[str, ...], loc: int, num_lines: int) -> Iterable[str]:
    budget = _LONGEST_VIEW if num_lines > 0 else VIEW_TOKENS
    end = min(len(lines), loc + num_lines) if num_lines > 0 else len(lines)
    for at in range(loc, end):
        line = f"L{at}: {lines[at]}"
        yield line
        budget -= len(line.encode()) // 4 + 1  # about as many tokens, in most languages
        if budget <= 0:
            return
