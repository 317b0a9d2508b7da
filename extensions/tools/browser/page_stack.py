"""The stack of pages that a response has seen; a cursor is an index into it.

Only results and matches are always kept.  Web pages are kept while there is room, and fetched again if a cursor needs
them later.  A response that continues another one rebuilds the stack from the headings that the model has read: they
hold everything needed to get the pages again.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.pages import FIND_SUFFIX, SOURCE_PREFIX, Page
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.items import Item, Message, WebSearchCall
from penstock.services.tools import Source

_KEPT = 8
"""Number of web pages to keep; each may take a megabyte."""
_HEADING = re.compile(r"\[([0-9]{1,6})\] ([^\n]*)")
_TITLE_AND_URL = re.compile(r"(.*) \(((?:view-source:)?https?://\S+)\)")
_MATCHES = re.compile(r"Find results for text: `.*` in `(.*)`")


@dataclass(frozen=True)
class Visit:
    """One entry of the stack: its ``page`` if that is kept, or how to get it again.

    To get it again, search for ``query``; or open ``url`` and, if there is a ``pattern``, find it there.
    """

    title: str
    url: str = ""
    query: str = ""
    pattern: str = ""
    page: Page | None = None

    def source(self) -> Source | None:
        """Return the source for citations of this entry; None for search results that are not kept."""
        if self.page:
            return self.page.source()
        return Source(self.title, self.url.removeprefix(SOURCE_PREFIX)) if self.url else None


class PageStack:
    """The stack of one response."""

    def __init__(self, request: ResolvedRequest) -> None:
        self._stack = dict(_restored(request))
        self._pages: OrderedDict[str, Page] = OrderedDict()

    @property
    def latest(self) -> int:
        """The cursor of the latest page; -1 if there is none."""
        return max(self._stack, default=-1)

    def push(self, visit: Visit) -> int:
        """Put an entry on top and return its cursor."""
        cursor = self.latest + 1
        self._stack[cursor] = visit
        return cursor

    def at(self, cursor: int) -> Visit:
        """Return the entry at a cursor, the latest one for -1; raises `CallFailed` if there is none."""
        if not self._stack:
            raise CallFailed("No pages to access!")
        visit = self._stack.get(self.latest if cursor == -1 else cursor)
        if visit is None:
            raise CallFailed(f"Cursor `{cursor}` is out of range. Available cursor indices: [0 - {self.latest}].")
        return visit

    def source(self, cursor: int) -> Source | None:
        visit = self._stack.get(cursor)
        return visit.source() if visit else None

    def kept(self, url: str) -> Page | None:
        """Return the web page that was opened by this URL, if it is still kept."""
        if url in self._pages:
            self._pages.move_to_end(url)
        return self._pages.get(url)

    def keep(self, url: str, page: Page) -> None:
        """Keep a web page, and drop the least recently used ones if there are too many."""
        self._pages[url] = page
        self._pages.move_to_end(url)
        while len(self._pages) > _KEPT:
            self._pages.popitem(last=False)


def _restored(request: ResolvedRequest) -> Iterator[tuple[int, Visit]]:
    for call in _recent(request.items):
        if match := _HEADING.match(request.results.get(call.id, "")):
            yield int(match[1]), _visit(call.action or {}, match[2])


def _recent(items: tuple[Item, ...]) -> Iterable[WebSearchCall]:
    """Return the calls after the last final answer: the ones whose results the model still sees."""
    calls: list[WebSearchCall] = []
    for item in items:
        if isinstance(item, WebSearchCall):
            calls.append(item)
        elif isinstance(item, Message) and item.role == "assistant" and item.phase == "final_answer":
            calls = []
    return calls


def _visit(action: Mapping[str, Any], heading: str) -> Visit:
    shown = _TITLE_AND_URL.fullmatch(heading)
    if shown is None or action.get("type") == "search":
        return Visit(heading, query=str(action.get("query") or heading))
    title, url = shown.groups()
    if matched := _MATCHES.fullmatch(title):
        place, _, pattern = url.rpartition(FIND_SUFFIX)
        return Visit(matched[1], place, pattern=unquote(pattern))
    return Visit(title, url)
