"""Keep responses in a database of your own: a `Database`, five methods that write and read rows by SQL.

This one keeps them in an SQLite file, and logs what takes long. Another would speak to a database that penstock does
not know. The SQL is common to PostgreSQL and SQLite; what differs between them are the constants of
`penstock.services.store.database`.

```sh
penstock serve openai/gpt-oss-20b --store a_store_of_your_own.py:store
```

A package offers its database under a scheme of its own, by an entry point that takes the URL. Where it is installed,
`--store slow://data/responses` uses it:

```toml
[project.entry-points."penstock.stores"]
slow = "slow_store:SlowStore"
```

`await check_database(store())` of `penstock.testing` checks the rules that a store relies on. A database without
full-text search breaks the rule `search`: it has to find the rows of `vector_store_chunks` with a term (`with_term` in
`database.py`), or its vector stores find nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from penstock.services.store.database import Database, Row, Unit, Value
from penstock.services.store.sqlite import SqliteDatabase

SLOW_SECONDS = 0.1

logger = logging.getLogger(__name__)


class TimedDatabase:
    """A database that logs what takes long in another one."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def open(self) -> None:
        await self._database.open()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        with timed(f"{len(units)} writes"):
            return await self._database.write(units)

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        with timed(sql):
            return await self._database.read(sql, *arguments)

    async def size(self) -> int:
        return await self._database.size()

    async def close(self) -> None:
        await self._database.close()


@contextmanager
def timed(what: str) -> Generator[None, None, None]:
    began = time.monotonic()
    yield
    if (seconds := time.monotonic() - began) > SLOW_SECONDS:
        logger.warning("The store took %.1f s for %s", seconds, what)


def store() -> Database:
    return TimedDatabase(SqliteDatabase("responses.sqlite3"))
