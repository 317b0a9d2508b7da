"""The stack of pages that a response has seen: what a cursor points at.

Only results and matches are kept as they are; pages of the web are kept as long as there is room, and are fetched again
when a cursor needs them later.  So a response that continues another one starts from the headings that the model has
read: they tell all that is needed.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from penstock.pipeline.frames import Conversation
from penstock.pipeline.protocol.items import Item, Message, WebSearchCall
from penstock.stages.services.browser.failure import Failure
from penstock.stages.services.browser.pages import FIND_SUFFIX, SOURCE_PREFIX, Page
from penstock.stages.services.tools import Source

_KEPT = 8
"""Pages of the web, each of which may take a megabyte."""
_HEADING = re.compile(r"\[([0-9]{1,6})\] ([^\n]*)")
_TITLE_AND_URL = re.compile(r"(.*) \(((?:view-source:)?https?://\S+)\)")
_MATCHES = re.compile(r"Find results for text: `.*` in `(.*)`")


@dataclass(frozen=True)
class Visit:
    """One entry: ``page`` where it is kept, or else what to do to have it again.

    That is to search for ``query``, or to open ``url``, and there to find ``pattern``.
    """

    title: str
    url: str = ""
    query: str = ""
    pattern: str = ""
    page: Page | None = None

    def source(self) -> Source | None:
        """What is cited by naming it."""
        if self.page:
            return self.page.source()
        return Source(self.title, self.url.removeprefix(SOURCE_PREFIX)) if self.url else None


class Visits:
    """The stack of one response."""

    def __init__(self, conversation: Conversation) -> None:
        self._visits = dict(_restored(conversation))
        self._pages: OrderedDict[str, Page] = OrderedDict()

    @property
    def latest(self) -> int:
        """The cursor of the latest page, -1 where there is none."""
        return max(self._visits, default=-1)

    def push(self, visit: Visit) -> int:
        """Put another entry on top, and tell its cursor."""
        cursor = self.latest + 1
        self._visits[cursor] = visit
        return cursor

    def at(self, cursor: int) -> Visit:
        """The entry at a cursor, the latest one at -1; raises `Failure`."""
        if not self._visits:
            raise Failure("No pages to access!")
        visit = self._visits.get(self.latest if cursor == -1 else cursor)
        if visit is None:
            raise Failure(f"Cursor `{cursor}` is out of range. Available cursor indices: [0 - {self.latest}].")
        return visit

    def source(self, cursor: int) -> Source | None:
        """What is cited by naming a cursor."""
        visit = self._visits.get(cursor)
        return visit.source() if visit else None

    def kept(self, url: str) -> Page | None:
        """The page of the web that was opened by this URL, if it is still there."""
        if url in self._pages:
            self._pages.move_to_end(url)
        return self._pages.get(url)

    def keep(self, url: str, page: Page) -> None:
        """Keep a page of the web, and let go of those that were not needed for the longest time."""
        self._pages[url] = page
        self._pages.move_to_end(url)
        while len(self._pages) > _KEPT:
            self._pages.popitem(last=False)


def _restored(conversation: Conversation) -> Iterator[tuple[int, Visit]]:
    for call in _recent((*conversation.history, *conversation.input)):
        if found := _HEADING.match(conversation.results.get(call.id, "")):
            yield int(found[1]), _visit(call.action, found[2])


def _recent(items: tuple[Item, ...]) -> Iterable[WebSearchCall]:
    """The calls behind the last answer: what the model still sees."""
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
