"""What the store asks of a database: to write changes in groups, and to read rows.

SQL is written once, in the words that PostgreSQL and SQLite share, with ``$1`` for the first argument.  Where
PostgreSQL needs words that SQLite has not, they are named here, and the SQLite backend puts its own in their place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

Value: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = Sequence[Any]

NOW = "cast(extract(epoch from clock_timestamp()) as double precision)"
"""The database's own clock, in seconds since 1970: one for all servers."""

SHARED = "for share"
"""Keeps others from changing the rows that are read until the transaction is over."""

BATCH = 500
"""How many rows one statement names, or changes, at most."""


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement and its arguments."""

    sql: str
    arguments: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Statements that are carried out together or not at all.

    The rows that each one changed are ``counted`` where somebody waits for that.  Units that are not counted may be
    carried out side by side: all that have the same statement at once, in the order of `STATEMENTS`.
    """

    statements: tuple[Statement, ...]
    counted: bool = False


class Unavailable(Exception):
    """The database cannot be reached, or has no room: the same may succeed later."""


class Refused(Exception):
    """The database will never take this."""


class Database(Protocol):
    """Where rows are kept.  Whatever goes wrong is `Unavailable` or `Refused`."""

    async def open(self) -> None:
        """Connect, and bring the schema up to date; raises `StoreFailed` with one clear line."""

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        """Carry out the units in one transaction; how many rows each counted statement changed."""
        ...

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """The rows of a query."""
        ...

    async def size(self) -> int:
        """Bytes on disk."""
        ...

    async def close(self) -> None:
        """Let go of everything.  Closing twice is harmless."""


class Nowhere:
    """A `Database` that keeps nothing: for flows that nobody asks about afterwards."""

    async def open(self) -> None:
        """Need nothing."""

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        """Forget the units."""
        return [(0,) * len(unit.statements) if unit.counted else () for unit in units]

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """Know nothing."""
        return ()

    async def size(self) -> int:
        """Take no room."""
        return 0

    async def close(self) -> None:
        """Hold nothing."""


def placeholders(count: int, first: int = 1) -> str:
    """``count`` arguments in a row, from the number ``first`` on: what stands between the brackets of ``in ()``."""
    return ", ".join(f"${number}" for number in range(first, first + count))
