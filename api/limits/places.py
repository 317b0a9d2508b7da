"""Places of one kind that an API key may use at once, counted over all servers of the store.

A server holds a place in the store before it uses it, so that the servers together never use more than there are.  It
keeps a place for `KEEP` seconds after its use: under a steady load the next response needs no database.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Protocol

from penstock.pipeline.errors import StoreFailed

logger = logging.getLogger(__name__)

KEEP = 0.1
"""Seconds for which a server keeps a place that it does not use."""

PATIENCE = 0.4
"""Seconds for which a request waits for a place, as one that was given back elsewhere may not be free yet."""

RETRY = 0.05
"""Seconds between two attempts to get a place, of all requests of a key together."""


class Holds(Protocol):
    """The places that servers hold; see `StoredPlaces`."""

    async def hold(self, owner: str, kind: str, count: int, most: int) -> bool:
        """Hold ``count`` places, if all servers then hold at most ``most``; return True if this one does."""
        ...

    async def lower(self, owner: str, kind: str, count: int) -> None:
        """Hold only ``count`` places."""


class OwnHolds:
    """The places of a server without a store, which has all."""

    async def hold(self, owner: str, kind: str, count: int, most: int) -> bool:
        """Return True if there are ``count`` places."""
        return count <= most

    async def lower(self, owner: str, kind: str, count: int) -> None:
        """Do nothing, as nothing is held elsewhere."""


@dataclass(eq=False)
class Places:
    """The places of one ``kind`` that an ``owner`` uses at this server."""

    holds: Holds
    owner: str
    kind: str
    most: int = 0
    """The number of places at the latest entry that was limited."""
    used: int = 0
    held: int = 0
    """The places that this server holds in the store; those of a kind without a limit are not held."""
    _peak: int = 0
    """The most places that were in use since the last look at those that are not."""
    _next_try: float = 0.0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _giving_back: asyncio.Task[None] | None = None

    async def enter(self, most: int | None, patience: float = PATIENCE) -> bool:
        """Use a place, of at most ``most``; return False if there has been none for ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while not await self._entered(most):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(RETRY)
        return True

    async def _entered(self, most: int | None) -> bool:
        if most is not None:
            self.most = most
            if not self.used < min(self.held, most):
                entering = asyncio.create_task(self._entered_in_turn(most))
                try:
                    return await asyncio.shield(entering)
                except asyncio.CancelledError:  # the store may hold the place already
                    entering.add_done_callback(self._leave_if_entered)
                    raise
        self._use()
        return True

    async def _entered_in_turn(self, most: int) -> bool:
        async with self._turn:
            if self.used >= most or (self.used >= self.held and not await self._hold(most)):
                return False
            self._use()
            return True

    def _leave_if_entered(self, entering: asyncio.Task[bool]) -> None:
        if not entering.cancelled() and not entering.exception() and entering.result():
            self.leave()

    def _use(self) -> None:
        self.used += 1
        self._peak = max(self._peak, self.used)

    def close(self) -> None:
        """Give nothing back any more."""
        if self._giving_back is not None:
            self._giving_back.cancel()

    async def _hold(self, most: int) -> bool:
        """Hold one place more than are used.  If the store cannot be reached, this server counts alone."""
        if time.monotonic() < self._next_try:
            return False
        count = self.used + 1
        try:
            if await self.holds.hold(self.owner, self.kind, count, most):
                self.held = count
                return True
        except StoreFailed:
            logger.warning("The %s of a key are counted for this server alone, as the store failed", self.kind)
            self.held = count  # perhaps, and then it has to be given back
            return True
        self._next_try = time.monotonic() + RETRY
        return False

    def leave(self) -> None:
        """Give a place back."""
        self.used -= 1
        self._next_try = 0.0
        if self.held > self.used and self._giving_back is None:
            self._giving_back = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        """Give back the places in the store that were not used for `KEEP` seconds, until all that are left are used."""
        try:
            while self.held > self.used:
                self._peak = self.used
                await asyncio.sleep(KEEP)
                async with self._turn:
                    if self._peak < self.held:
                        await self._lower(self._peak)
        finally:
            self._giving_back = None

    async def _lower(self, count: int) -> None:
        before, self.held = self.held, count  # at once: what is given back is not used from here on
        try:
            await self.holds.lower(self.owner, self.kind, count)
        except StoreFailed:
            self.held = before
