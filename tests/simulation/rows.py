"""The store of a simulation, as another process reads it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.simulation.world import World


def rows(world: World, sql: str) -> list[tuple[Any, ...]]:
    """Return the rows of a query."""
    with closing(sqlite3.connect(f"file:{world.folder}/store.sqlite3?mode=ro", uri=True)) as connection:
        return connection.execute(sql).fetchall()
