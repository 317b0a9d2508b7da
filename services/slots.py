"""At most N at once: slots that are shared fairly among the owners of responses (API keys)."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Hashable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import NamedTuple, TypeAlias

Weigh = Callable[[str], float]
"""Gives the weight of an owner: one with twice the weight gets twice the slots while all are in use."""


def _equal(_: str) -> float:
    return 1.0


LINES = "*lines"
"""The owner of the slots that lines of batches hold: they give them back when others need them."""


class Load(NamedTuple):
    """The use of slots, as far as it is known, those of other processes included."""

    others: int
    """Slots that others than lines hold, or wait for."""
    lines_elsewhere: int
    """Slots that lines hold in other processes."""


def _unnoticed() -> None:
    pass


class Slots:
    """At most ``limit`` slots, of which one owner may hold ``per_owner``.

    Clients without a key are one owner, the empty one, who may hold all.

    A free slot goes to the waiting owner that holds the fewest for its weight; among equals, to the one that has
    received the fewest for its weight so far.  Each owner's own requests wait in their order.
    """

    def __init__(self, limit: int, per_owner: int | None = None, weigh: Weigh = _equal) -> None:
        self.limit = limit
        self._per_owner = per_owner
        self._weigh = weigh
        self.held: Counter[str] = Counter()
        self._received: dict[str, float] = {}
        """Slots that an owner has received, by its weight; kept while it holds or waits for one."""
        self._level = 0.0
        """The least of these numbers at the last grant: an owner that comes back begins there."""
        self._waiting: dict[str, dict[Hashable, Callable[[], None]]] = {}
        self.when_changed: Callable[[], None] = _unnoticed
        """Called when a slot is wanted or given back."""

    def part(self, total: int) -> int:
        """Return the part of this process in a total: here, all."""
        return total

    @property
    def load(self) -> Load:
        """The use of the slots."""
        return Load(self.in_use - self.held[LINES] + self.waiting, 0)

    @property
    def available(self) -> int:
        """The number of slots that may be held at the moment."""
        return self.limit

    @property
    def in_use(self) -> int:
        """The number of slots that are held."""
        return self.held.total()

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    def waiting_of(self, owner: str) -> int:
        """Return the number of requests of an owner that wait."""
        return len(self._waiting.get(owner, ()))

    @asynccontextmanager
    async def slot(self, owner: str) -> AsyncGenerator[None, None]:
        """Hold a slot for the length of a block, after waiting for one."""
        await self.acquire(owner)
        try:
            yield
        finally:
            self.release(owner)

    async def acquire(self, owner: str) -> None:
        """Wait for a slot, and hold it until `release`."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.request(owner, granted, partial(_resolve, granted))
        try:
            await granted
        except asyncio.CancelledError:
            if not self.withdraw(owner, granted):  # the slot was granted just before the cancellation
                self.release(owner)
            raise

    def acquire_now(self, owner: str) -> bool:
        """Hold a slot until `release`; return False, and hold none, if the owner would have to wait for it."""
        key = object()
        self.request(owner, key, lambda: None)
        return not self.withdraw(owner, key)

    def release(self, owner: str) -> None:
        """Give a slot back."""
        self.held[owner] -= 1
        self._leave(owner)
        self.grant()

    def request(self, owner: str, key: Hashable, begin: Callable[[], None]) -> None:
        """Call ``begin`` once the owner holds a slot for it, at once or later, unless ``key`` is withdrawn before."""
        self._waiting.setdefault(owner, {})[key] = begin
        self._received.setdefault(owner, self._level)
        self.grant()

    def withdraw(self, owner: str, key: Hashable) -> bool:
        """Take back a request that waits; return False if it does not wait."""
        if (requests := self._waiting.get(owner)) is None or key not in requests:
            return False
        del requests[key]
        if not requests:
            del self._waiting[owner]
        self._leave(owner)
        return True

    def grant(self) -> None:
        """Give the free slots to those that wait."""
        while self.in_use < self.available and (
            able := [owner for owner in self._waiting if self._may_have_one(owner)]
        ):
            owner = min(able, key=self._precedence)
            key, begin = next(iter(self._waiting[owner].items()))
            self._level = max(self._level, self._received[owner])
            self._received[owner] += 1 / self._weigh(owner)
            self.held[owner] += 1
            self.withdraw(owner, key)
            begin()
        self.when_changed()

    def _precedence(self, owner: str) -> tuple[float, float]:
        return self.held[owner] / self._weigh(owner), self._received[owner]

    def _may_have_one(self, owner: str) -> bool:
        return not owner or self._per_owner is None or self.held[owner] < self._per_owner

    def _leave(self, owner: str) -> None:
        """Forget an owner that neither holds nor waits for a slot."""
        if not self.held[owner]:
            del self.held[owner]
            if owner not in self._waiting:
                self._received.pop(owner, None)


def _resolve(granted: asyncio.Future[None]) -> None:
    if not granted.cancelled():  # a cancelled task withdraws its request only when it runs next
        granted.set_result(None)


Limit: TypeAlias = Callable[[str], AbstractAsyncContextManager[None]]
"""A function that returns a context in which an owner may have one more sandbox, as soon as its limits allow it."""


def unlimited(_: str) -> AbstractAsyncContextManager[None]:
    """Limit nothing."""
    return nullcontext()


def sandbox_slots(servers: int = 1) -> Slots:
    """Return the slots for sandboxes of one of ``servers`` processes here: more at work would delay the servers.

    One API key may hold half of them, so that it cannot lock out all others.
    """
    limit = max(2, min(32, 8 * len(os.sched_getaffinity(0))) // servers)
    return Slots(limit, per_owner=-(-limit // 2))
