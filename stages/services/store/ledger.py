"""The ledger: what the parts of the store share, the database with the queue before it and the server's own name."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from penstock.pipeline.errors import StoreFailed
from penstock.stages.services.store.database import Database, Refused, Row, Unavailable, Value
from penstock.stages.services.store.writer import Writer


class Ledger:
    """One server's access to the database; a server that has not beaten for ``stale`` seconds is dead."""

    def __init__(self, database: Database, stale: float) -> None:
        self.database = database
        self.writer = Writer(database)
        self.server_id = secrets.token_hex(8)
        self.stale = stale

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """The rows of a query; `StoreFailed` where it cannot be asked."""
        self.writer.check_open()
        try:
            return await self.database.read(sql, *arguments)
        except (Unavailable, Refused) as exc:
            raise StoreFailed("The store cannot be read.") from exc

    async def size(self) -> int:
        """Bytes on disk."""
        try:
            return await self.database.size()
        except (Unavailable, Refused) as exc:
            raise StoreFailed("The store cannot be read.") from exc
