"""The bytes that an API key has stored, as the store has them from time to time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from math import inf

from penstock.pipeline.errors import StoreFailed
from penstock.stages.services.store.store import Store

FRESH, FRESH_IF_FULL = 10.0, 1.0
"""Seconds after which the bytes are read again; sooner for a key that has reached its limit, and may have deleted."""


@dataclass(eq=False)
class StoredBytes:
    """The bytes of an ``owner``, or of all if None."""

    owner: str | None
    _bytes: int = 0
    _read_at: float = -inf
    _is_full: bool = False
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def is_idle(self) -> bool:
        """True if the bytes would be read again, and were below the limit: an owner that has reached it stays known."""
        return not self._is_full and time.monotonic() - self._read_at > FRESH and not self._turn.locked()

    async def read(self, store: Store, most: int) -> int:
        """Return the bytes of some seconds ago, or of the time before an outage of the store."""
        async with self._turn:
            self._is_full = self._bytes >= most
            fresh = FRESH_IF_FULL if self._is_full else FRESH
            if time.monotonic() - self._read_at > fresh:
                try:
                    self._bytes = await store.bytes_of(self.owner)
                except StoreFailed:  # it is counted and logged where it happens
                    return self._bytes
                self._read_at, self._is_full = time.monotonic(), self._bytes >= most
            return self._bytes
