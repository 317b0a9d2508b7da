"""The store's interface to a database: write changes in groups, and read rows.

SQL is written once, in the dialect common to PostgreSQL and SQLite, with ``$1`` for the first argument.  Expressions
that SQLite lacks are constants in this module, and the SQLite backend replaces them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec

Value: TypeAlias = str | int | float | bytes | None
Row: TypeAlias = Sequence[Any]
_T = TypeVar("_T")

NOW = "cast(extract(epoch from clock_timestamp()) as double precision)"
"""The database's clock, in seconds since 1970.  It is the same for all servers."""

OCTETS = "octet_length"
"""The function that gives the length of a text in bytes."""

SHARED = "for share"
"""Locks the selected rows against changes until the transaction is over."""


def with_term(place: str) -> str:
    """Return the part of a query that reads the chunks with a term, of which only the ``number`` can be read.

    ``place`` is the placeholder of the term.  This is full-text search, of which the databases have no common form.
    """
    return f"from vector_store_chunks where {_HAS_TERM}cast({place} as text)]"


_HAS_TERM = "string_to_array(terms, ' ') @> array["


def is_search(sql: str) -> bool:
    """Return True for a query for terms, which may take long."""
    return _HAS_TERM in sql


LONG = "/* long */"
"""The mark of a query that may read very many rows: no other query waits for it."""


def takes_long(sql: str) -> bool:
    """Return True for a query that may take long."""
    return is_search(sql) or LONG in sql


KEPT_BYTES = 16 * 2**20
"""Limit on the columns of all rows that one cache keeps decoded; they must not change while their ids are found."""

_SIZED = (str, bytes)

BATCH = 500
"""Maximum number of rows that one statement names or changes."""


class Statement(msgspec.Struct, frozen=True):
    """An SQL statement and its arguments."""

    sql: str
    arguments: tuple[Value, ...]


class Unit(msgspec.Struct, frozen=True):
    """Statements that are executed together or not at all.

    If ``counted``, the database returns the number of rows changed by each statement.  Units that are not counted may
    be merged: each statement is executed once, for all units that contain it, in the order of `bulks`.

    A counted unit may be ``fenced``: if its first statement changes no row, the others are not executed.
    """

    statements: tuple[Statement, ...]
    counted: bool = False
    fenced: bool = False


class DatabaseUnavailable(Exception):
    """The database cannot be reached or has no space; the same operation may succeed later."""


class DatabaseRefused(Exception):
    """The database will never accept this operation."""


class Database(Protocol):
    """The storage of rows.  Reads and writes fail with `DatabaseUnavailable` or `DatabaseRefused` only.

    A store has one write at a time, and any number of reads beside it.  `check_database` of `penstock.testing` checks
    the rules.
    """

    async def open(self) -> None:
        """Connect, and bring the schema up to date; raises `StoreFailed` with a one-line message."""

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        """Execute the units in one transaction.

        Return a tuple for each unit: the row counts of its statements, or an empty tuple if it is not counted.
        """
        ...

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """Return the rows of a query."""
        ...

    async def size(self) -> int:
        """Return the size on disk in bytes."""
        ...

    async def close(self) -> None:
        """Close all connections.  Closing twice is harmless."""


@runtime_checkable
class HasRoom(Protocol):
    """A database that knows the room on its disk."""

    async def room(self) -> int:
        """Return the bytes that may still be stored."""
        ...


def size_of(values: Iterable[Value]) -> int:
    """Return about how many bytes the values take."""
    return sum([len(value) if isinstance(value, _SIZED) else 8 for value in values])


class NullDatabase:
    """A `Database` that stores nothing, for pipelines whose responses are never read back."""

    async def open(self) -> None:
        """Do nothing."""

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        return [(0,) * len(unit.statements) if unit.counted else () for unit in units]

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        return ()

    async def size(self) -> int:
        return 0

    async def close(self) -> None:
        """Do nothing, as no connection is open."""


def batches(values: Iterable[_T]) -> Iterator[tuple[_T, ...]]:
    """Yield the values in tuples of at most `BATCH`: a statement with too many arguments is refused."""
    left = iter(values)
    while some := tuple(islice(left, BATCH)):
        yield some


def placeholders(count: int, first: int = 1) -> str:
    """Return ``count`` consecutive placeholders, from number ``first`` on, for the parentheses of ``in ()``."""
    return ", ".join(f"${number}" for number in range(first, first + count))
