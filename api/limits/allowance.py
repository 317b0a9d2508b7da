"""An amount of one API key that refills with time, and the part of it that this server has taken in advance."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.tasks import shielded

logger = logging.getLogger(__name__)

MINUTE = 60.0

IN_ADVANCE = 0.05
"""The fraction of an allowance that a server takes at once, so that most requests need no database."""


class Allowances(Protocol):
    """The amounts that are left; see `StoredAllowances`."""

    async def take(self, owner: str, kind: str, amount: float, most: float, seconds: float) -> tuple[bool, float]:
        """Take an amount, if there is so much; return True if it was taken, and the amount that is left."""
        ...


class OwnAllowances:
    """The amounts that are left at a server without a store."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}
        """Each amount and the time when it was left, the latest last; one that has refilled since is forgotten."""

    async def take(self, owner: str, kind: str, amount: float, most: float, seconds: float) -> tuple[bool, float]:
        """Take an amount, if there is so much; return True if it was taken, and the amount that is left."""
        now = self._clock()
        self._forget(now - seconds)
        level, at = self._levels.pop((owner, kind), (most, now))
        level = min(most, level + (now - at) * most / seconds)
        taken = level >= amount
        level -= amount if taken else 0.0
        self._levels[owner, kind] = level, now
        return taken, level

    def _forget(self, before: float) -> None:
        while (oldest := next(iter(self._levels), None)) and self._levels[oldest][1] <= before:
            del self._levels[oldest]


@dataclass
class Allowance:
    """The ``kind`` of amount of an ``owner``: at most ``most`` at once, which refill within a minute."""

    allowances: Allowances
    owner: str
    kind: str
    most: float
    clock: Callable[[], float] = time.monotonic
    _taken: float = 0.0
    """The rest of the amount that was taken in advance; negative if more was spent."""
    _level: float = field(init=False)
    _at: float = field(init=False)
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    _counting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held until the store has answered, as `_turn` is free again once a client has left."""

    def __post_init__(self) -> None:
        self._level, self._at = self.most, self.clock()

    @property
    def remaining(self) -> float:
        """The amount that is left, as far as this server knows; negative if more was spent than there was."""
        return min(self.most, self._level_now + self._taken)

    @property
    def _level_now(self) -> float:
        return min(self.most, self._level + (self.clock() - self._at) * self.most / MINUTE)

    @property
    def is_idle(self) -> bool:
        """True if all is left, and no request is taking any."""
        return self._level_now >= self.most and self._taken >= 0 and not self._turn.locked()

    def refills_in(self, amount: float) -> float:
        """Return the seconds until so much is left."""
        return max(0.0, amount - self.remaining) * MINUTE / self.most

    def spend(self, amount: float) -> None:
        """Spend an amount, whether or not so much is left."""
        self._taken -= amount

    async def take(self, amount: float) -> bool:
        """Spend an amount if so much is left, or if anything is left for an amount of 0; return True if so.

        If the store cannot be reached, all is left.
        """
        needed = amount or 1.0
        async with self._turn:
            self._taken = min(self._taken, self.most - self._level_now)  # what has refilled was not taken in advance
            if self._taken < needed and not await self._take(needed - self._taken):
                return False
            self._taken -= amount
            return True

    async def _take(self, missing: float) -> bool:
        """Take what is missing, and more in advance if there is more; if there is less, pay off a part of a debt."""
        in_advance = max(1.0, IN_ADVANCE * self.most)
        try:
            if await self._take_shared(missing + in_advance) or await self._take_shared(missing):
                return True
            if self._taken < 0 and self._level > 0:
                await self._take_shared(self._level)
        except StoreFailed:
            logger.warning("The %s of a key are not counted, as the store cannot be reached", self.kind)
            self._taken += missing  # no debt that would refuse requests after the outage
            return True
        return False

    async def _take_shared(self, amount: float) -> bool:
        """Take an amount if there is so much; return True if it was taken."""
        return await shielded(self._count(amount))  # a client that leaves loses nothing of what others share

    async def _count(self, amount: float) -> bool:
        async with (
            self._counting
        ):  # else an earlier answer could come after a later one, and its level be taken for new
            is_taken, self._level = await self.allowances.take(self.owner, self.kind, amount, self.most, MINUTE)
            self._at = self.clock()
            if is_taken:
                self._taken += amount
        return is_taken
