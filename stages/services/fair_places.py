"""Places for a limited number of users at once, shared fairly among the owners of responses (API keys)."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TypeAlias

Weigh = Callable[[str], float]
"""Gives the weight of an owner: one with twice the weight gets twice the places while all are in use."""


def _equal(_: str) -> float:
    return 1.0


class FairPlaces:
    """At most ``most`` places, of which one owner may hold ``share``.

    Clients without a key are one owner, the empty one, who may hold all.

    A free place goes to the waiting owner that holds the fewest for its weight; among equals, to the one that has
    received the fewest for its weight so far.  Each owner's own requests wait in their order.
    """

    def __init__(self, most: int, share: int | None = None, weigh: Weigh = _equal) -> None:
        self.most = most
        self._share = most if share is None else share
        self._weigh = weigh
        self._held: Counter[str] = Counter()
        self._received: dict[str, float] = {}
        """Places that an owner has received, by its weight; kept while it holds or waits for one."""
        self._level = 0.0
        """The least of these numbers at the last grant: an owner that comes back begins there."""
        self._waiting: dict[str, dict[asyncio.Future[None], None]] = {}

    @property
    def bound(self) -> int:
        """The number of places that may be held at the moment."""
        return self.most

    @property
    def in_use(self) -> int:
        """The number of places that are held."""
        return self._held.total()

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncGenerator[None, None]:
        """Hold a place for the length of a block, after waiting for one."""
        await self.take(owner)
        try:
            yield
        finally:
            self.give_back(owner)

    async def take(self, owner: str) -> None:
        """Wait for a place."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, {})[turn] = None
        self._received.setdefault(owner, self._level)
        self._grant()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(owner)
            else:
                self._forget(owner, turn)
            raise

    def give_back(self, owner: str) -> None:
        """Give a place back."""
        self._held[owner] -= 1
        self._leave(owner)
        self._grant()

    def _grant(self) -> None:
        while self.in_use < self.bound and (able := [owner for owner in self._waiting if self._may_have_one(owner)]):
            owner = min(able, key=self._precedence)
            turn = next(iter(self._waiting[owner]))
            if not turn.cancelled():
                self._level = max(self._level, self._received[owner])
                self._received[owner] += 1 / self._weigh(owner)
                self._held[owner] += 1
                turn.set_result(None)
            self._forget(owner, turn)

    def _precedence(self, owner: str) -> tuple[float, float]:
        return self._held[owner] / self._weigh(owner), self._received[owner]

    def _may_have_one(self, owner: str) -> bool:
        return not owner or self._held[owner] < self._share

    def _forget(self, owner: str, turn: asyncio.Future[None]) -> None:
        if turn in (waiting := self._waiting.get(owner, {})):
            del waiting[turn]
            if not waiting:
                del self._waiting[owner]
            self._leave(owner)

    def _leave(self, owner: str) -> None:
        """Forget an owner that neither holds nor waits for a place."""
        if not self._held[owner]:
            del self._held[owner]
            if owner not in self._waiting:
                self._received.pop(owner, None)


Limit: TypeAlias = Callable[[str], AbstractAsyncContextManager[None]]
"""A function that returns a context in which an owner may have one more sandbox, as soon as its limits allow it."""


def unlimited(_: str) -> AbstractAsyncContextManager[None]:
    """Limit nothing."""
    return nullcontext()


def places_here(servers: int = 1) -> FairPlaces:
    """Return the places of one of ``servers`` processes here: more sandboxes at work would delay the servers.

    One API key may hold half of them, so that it cannot lock out all others.
    """
    most = max(2, min(32, 8 * len(os.sched_getaffinity(0))) // servers)
    return FairPlaces(most, share=-(-most // 2))
