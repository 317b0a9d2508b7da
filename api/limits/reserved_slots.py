"""Slots of one kind that an API key may use at once, counted over all servers of the store.

A server reserves a slot in the store before it uses it, so that the servers together never use more than there are.  It
keeps a slot for `KEEP` seconds after its use: under a steady load the next response needs no database.
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
"""Seconds for which a server keeps a slot that it does not use."""

PATIENCE = 0.4
"""Seconds for which a request waits for a slot, as one that was given back elsewhere may not be free yet."""

RETRY = 0.05
"""Seconds between two attempts to get a slot, of all requests of a key together."""


class Reservations(Protocol):
    """The slots that servers have reserved; see `StoredReservations`."""

    async def reserve(self, owner: str, kind: str, count: int, most: int) -> bool:
        """Reserve ``count`` slots, if all servers then have at most ``most``; return True if this one does."""
        ...

    async def lower(self, owner: str, kind: str, count: int) -> None:
        """Reserve only ``count`` slots."""


class LocalReservations:
    """The slots of a server without a store, which has all."""

    async def reserve(self, owner: str, kind: str, count: int, most: int) -> bool:
        """Return True if there are ``count`` slots."""
        return count <= most

    async def lower(self, owner: str, kind: str, count: int) -> None:
        """Do nothing, as nothing is reserved elsewhere."""


@dataclass(eq=False)
class ReservedSlots:
    """The slots of one ``kind`` that an ``owner`` uses at this server."""

    reservations: Reservations
    owner: str
    kind: str
    most: int = 0
    """The number of slots at the latest entry that was limited."""
    used: int = 0
    reserved: int = 0
    """The slots that this server has reserved in the store; those of a kind without a limit are not reserved."""
    _peak: int = 0
    """The most slots that were in use since the last look at those that are not."""
    _next_try: float = 0.0
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    giving_back: asyncio.Task[None] | None = None

    async def enter(self, most: int | None, patience: float = PATIENCE) -> bool:
        """Use a slot, of at most ``most``; return False if there has been none for ``patience`` seconds."""
        deadline = time.monotonic() + patience
        while not await self._entered(most):
            if time.monotonic() >= deadline:
                return False
            await asyncio.sleep(RETRY)
        return True

    async def _entered(self, most: int | None) -> bool:
        if most is not None:
            self.most = most
            if not self.used < min(self.reserved, most):
                entering = asyncio.create_task(self._entered_in_turn(most))
                try:
                    return await asyncio.shield(entering)
                except asyncio.CancelledError:  # the store may have reserved the slot already
                    entering.add_done_callback(self._leave_if_entered)
                    raise
        self._use()
        return True

    async def _entered_in_turn(self, most: int) -> bool:
        async with self._turn:
            if self.used >= most or (self.used >= self.reserved and not await self._reserve(most)):
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
        if self.giving_back is not None:
            self.giving_back.cancel()

    async def _reserve(self, most: int) -> bool:
        """Reserve one slot more than are used.  If the store cannot be reached, this server counts alone."""
        if time.monotonic() < self._next_try:
            return False
        count = self.used + 1
        try:
            if await self.reservations.reserve(self.owner, self.kind, count, most):
                self.reserved = count
                return True
        except StoreFailed:
            logger.warning("The %s of a key are counted for this server alone, as the store failed", self.kind)
            self.reserved = count  # perhaps, and then it has to be given back
            return True
        self._next_try = time.monotonic() + RETRY
        return False

    def leave(self) -> None:
        """Give a slot back."""
        self.used -= 1
        self._next_try = 0.0
        if self.reserved > self.used and self.giving_back is None:
            self.giving_back = asyncio.create_task(self._give_back())

    async def _give_back(self) -> None:
        """Give back the slots in the store that were not used for `KEEP` seconds, until all that are left are used."""
        try:
            while self.reserved > self.used:
                self._peak = self.used
                await asyncio.sleep(KEEP)
                async with self._turn:
                    if self._peak < self.reserved:
                        await self._lower(self._peak)
        finally:
            self.giving_back = None

    async def _lower(self, count: int) -> None:
        before, self.reserved = self.reserved, count  # at once: what is given back is not used from here on
        try:
            await self.reservations.lower(self.owner, self.kind, count)
        except StoreFailed:
            self.reserved = before
