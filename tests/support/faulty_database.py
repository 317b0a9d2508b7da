"""A database that can be made to fail, or to be gone for good, as when its server or this process has died."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from stages.persist.database import Database, Row, Unavailable, Unit, Value


@dataclass
class Faulty:
    """The database ``inner``, as long as nothing is wrong with it."""

    inner: Database
    is_down: bool = False
    stalls: asyncio.Event = field(default_factory=asyncio.Event)
    """Cleared, nothing that is written comes back."""

    def __post_init__(self) -> None:
        self.stalls.set()

    async def open(self) -> None:
        await self.inner.open()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        await self.stalls.wait()
        self._check()
        return await self.inner.write(units)

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        self._check()
        return await self.inner.read(sql, *arguments)

    async def size(self) -> int:
        return await self.inner.size()

    async def close(self) -> None:
        await self.inner.close()

    def _check(self) -> None:
        if self.is_down:
            raise Unavailable("The database is down.")
