"""What penstock asks of a response store; each backend is one module beside this one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pipeline.protocol.items import Item
from stages.persist.stored import History, Orphan, Report, Server, StoredConversation, StoredResponse

__all__ = [
    "History",
    "NoStore",
    "Orphan",
    "Report",
    "ResponseStore",
    "Server",
    "StoredConversation",
    "StoredResponse",
]


class ResponseStore(Protocol):
    """Keeps responses by id.  Whatever it cannot do raises `StoreFailed`, also anything after `close`."""

    async def put(self, stored: StoredResponse) -> None:
        """Keep a response, in place of one with the same id; it is durable once this returns.

        A put whose caller is cancelled is carried out all the same.
        """

    async def get(self, response_id: str) -> StoredResponse | None:
        """The response of that id, if there is one; every put that has returned is seen."""

    async def chain(self, response_id: str) -> tuple[StoredResponse, ...]:
        """The response and all that it continues through ``previous_response_id``, oldest first.

        The chain begins behind the first ancestor that is missing, and is empty if the response itself is.
        """
        ...

    async def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """The items of those ids, by id, whether they were input or output; those that nobody stored are left out.

        Of several items with one id it is the one that was stored last.
        """
        ...

    async def delete(self, response_id: str) -> bool:
        """Forget the response and its items, durably; False if there is none of that id.

        What continued it stays: its chain then begins behind the gap.
        """
        ...

    async def close(self) -> None:
        """Finish the puts that wait, then let go of everything.  Closing twice is harmless."""


class NoStore:
    """A `ResponseStore` that forgets: for flows that nobody asks about afterwards."""

    async def put(self, stored: StoredResponse) -> None:
        """Forget the response."""

    async def get(self, response_id: str) -> StoredResponse | None:
        """Know none."""
        return None

    async def chain(self, response_id: str) -> tuple[StoredResponse, ...]:
        """Know none."""
        return ()

    async def items(self, ids: Sequence[str]) -> dict[str, Item]:
        """Know none."""
        return {}

    async def delete(self, response_id: str) -> bool:
        """Know none."""
        return False

    async def close(self) -> None:
        """Hold nothing."""
