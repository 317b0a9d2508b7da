"""The store of a simulation: what its servers share, what breaks in it, and what another process reads of it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

from tests.simulation.loop import Process


class SimulatedStore(Protocol):
    """A store at a ``url``."""

    url: str

    def full(self) -> Exception:
        """Return the error of a disk without space."""
        ...

    def lost(self) -> Exception:
        """Return the error of a change of which it is unknown if it was made."""
        ...

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query, as another process reads them."""
        ...

    def kill(self, process: Process, database: Any, /) -> None:
        """Close what a process that has died had open; ``database`` is its database, if it had started."""


class SimulatedSqlite:
    """A real file in a folder, whose threads are simulated."""

    def __init__(self, folder: Path) -> None:
        self.url = str(folder / "store.sqlite3")

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(f"file:{self.url}?mode=ro", uri=True)) as connection:
            return connection.execute(sql).fetchall()

    def kill(self, _: Process, database: Any) -> None:
        if database:
            database._connections.close()

    def full(self) -> Exception:
        return sqlite3.OperationalError("database or disk is full")

    def lost(self) -> Exception:
        return sqlite3.OperationalError("the connection is lost")
