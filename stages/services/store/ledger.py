"""The context, shared by the parts of the store: the database, its write queue and this server's id."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from penstock.pipeline.errors import StoreFailed
from penstock.stages.services.store.database import Database, DatabaseRefused, DatabaseUnavailable, Row, Value
from penstock.stages.services.store.writer import Writer


class StoreContext:
    """One server's access to the database.  A server without a heartbeat for ``stale`` seconds is dead."""

    def __init__(self, database: Database, stale: float) -> None:
        self.database = database
        self.writer = Writer(database)
        self.server_id = secrets.token_hex(8)
        self.stale = stale

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """Return the rows of a query; raises `StoreFailed` if the database cannot be read."""
        self.writer.check_open()
        try:
            return await self.database.read(sql, *arguments)
        except (DatabaseUnavailable, DatabaseRefused) as exc:
            raise StoreFailed("The store cannot be read.") from exc

    async def size(self) -> int:
        """Return the size on disk in bytes; raises `StoreFailed` if the database cannot be read."""
        try:
            return await self.database.size()
        except (DatabaseUnavailable, DatabaseRefused) as exc:
            raise StoreFailed("The store cannot be read.") from exc
