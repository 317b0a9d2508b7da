"""Lists of items, page by page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web

from penstock.api.http.bodies import Items
from penstock.api.http.query import AnyText, Choice, Number, Several
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import Item
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.stages.normalize.parameters import INCLUDABLE

INCLUDE = Several("include", INCLUDABLE, meaning="What items are to have besides; all that is kept is always there.")
LIMIT = Number("limit", default=20, least=1, most=100, meaning="The most entries of a page.")
ORDER = Choice("order", ("desc", "asc"), meaning="`desc` begins with the newest entry, `asc` with the oldest.")
AFTER = AnyText("after", meaning="The id of the entry after which the page begins.")

PAGE = (LIMIT, ORDER, AFTER, INCLUDE)
"""The query parameters of a page of items."""


@dataclass(frozen=True)
class PageRequest:
    """The page that a request asks for: at most ``limit`` items, which follow the item with the id ``after``."""

    limit: int
    order: str
    after: str | None

    @classmethod
    def read(cls, request: web.Request) -> Self:
        """Read the query; raise `InvalidRequest` for a value that is not allowed."""
        INCLUDE.read(request)
        return cls(LIMIT.read(request), ORDER.read(request), AFTER.read(request))

    def of(self, items: Sequence[Item]) -> Items:
        """Return the page of ``items``, given oldest first; raise `InvalidRequest` if none has the id ``after``."""
        rest = self._following(items if self.order == "asc" else items[::-1])
        return page(rest[: self.limit], has_more=len(rest) > self.limit)

    def _following(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return the items after the last one with the id ``after``.

        Ids may repeat, and pages would go in circles if the first one counted.
        """
        if self.after is None:
            return items
        for position in range(len(items), 0, -1):
            if items[position - 1].id == self.after:
                return items[position:]
        raise InvalidRequest(f"There is no item {shortened(self.after)!r} in this list.", param="after")


def page(items: Sequence[Item], *, has_more: bool = False) -> Items:
    """Return these items as one page."""
    return Items(tuple(items), *ends(items), has_more)


def ends(listed: Sequence[Any]) -> tuple[str | None, str | None]:
    """Return the ids of the first and the last object of a page."""
    return (listed[0].id, listed[-1].id) if listed else (None, None)
