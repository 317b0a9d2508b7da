"""The check of a database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from penstock.pipeline.lifecycle.rules import InvariantBroken, rule
from penstock.pipeline.members import missing_members
from penstock.services.store.database import (
    NOW,
    OCTETS,
    Database,
    DatabaseRefused,
    DatabaseUnavailable,
    Statement,
    Unit,
    Value,
    with_term,
)
from penstock.testing.rules import closing_broken, keep_all


async def check_database(database: Database, *, seconds: float = 30.0) -> None:
    """Check that a database keeps the rules of `Database` that a `Store` relies on; open and close it.

    It may hold rows already: what the check writes stays in it, under an owner of its own.  Raises `BrokenRule` at the
    first rule that it breaks, or if a rule takes more than ``seconds``.
    """
    async with closing_broken(database):
        await keep_all(_RULES, database, seconds)


_ADD = "insert into secrets (name, value) values ($1, $2) on conflict do nothing"
_FIND = "select value from secrets where name = $1"
_REMOVE = "delete from secrets where name = $1"

_CHUNK = -1
"""The number of a chunk that no file has."""

_CLOCK_SECONDS = 3600.0
"""Seconds by which the clock of a database may differ from that of this machine."""


def _named(name: str) -> str:
    return f"check_database {name}"


def _unit(sql: str, *arguments: Value) -> Unit:
    return Unit((Statement(sql, arguments),), counted=True)


async def _check_members(database: Database) -> None:
    problems = missing_members(database, Database)
    rule(not problems, "; ".join(problems))


async def _check_opening(database: Database) -> None:
    await database.open()
    rule(list(await database.read("select 1")) != [], "a database that is open reads")


async def _check_values(database: Database) -> None:
    for name, value in (("bytes", bytes(range(256))), ("nothing", b""), ("text é👩 \u2028", b"x" * 2**20)):
        await database.write([_unit(_REMOVE, _named(name)), _unit(_ADD, _named(name), value)])
        rows = await database.read(_FIND, _named(name))
        rule([bytes(row[0]) for row in rows] == [value], "what was written is read unchanged")
    ((number, text, size, now),) = await database.read(
        f"select cast($1 as double precision), $2, {OCTETS}('é'), {NOW}", 0.5, "é"
    )
    rule(
        (float(number), str(text), int(size)) == (0.5, "é", 2),
        "arguments and expressions have the values of their types",
    )
    rule(abs(float(now) - time.time()) < _CLOCK_SECONDS, "the clock is that of this time")


async def _check_errors(database: Database) -> None:
    try:
        await database.read("select value from check_database_of_no_table")
    except (DatabaseRefused, DatabaseUnavailable):
        return
    raise InvariantBroken("a query of a table that does not exist raises DatabaseRefused")


async def _check_counts(database: Database) -> None:
    name = _named("counts")
    await database.write([_unit(_REMOVE, name)])
    counts = await database.write([_unit(_ADD, name, b"1"), _unit(_ADD, name, b"2"), _unit(_REMOVE, name)])
    rule(
        counts == [(1,), (0,), (1,)],
        "write returns the numbers of rows that each statement of counted units has changed",
    )
    other = _named("fenced")
    fenced = Unit((Statement(_REMOVE, (name,)), Statement(_ADD, (other, b"1"))), counted=True, fenced=True)
    has_ended = await database.write([fenced]) == [(0,)] and not await database.read(_FIND, other)
    rule(has_ended, "a fenced unit ends if its first statement changes nothing")


async def _check_transactions(database: Database) -> None:
    name = _named("transactions")
    await database.write([_unit(_REMOVE, name)])
    try:
        await database.write([_unit(_ADD, name, b"1"), _unit("insert into secrets (name) values ($1)", name)])
    except DatabaseRefused:
        pass
    else:
        raise InvariantBroken("a row that breaks a rule of its table raises DatabaseRefused")
    rule(not await database.read(_FIND, name), "units are executed together or not at all")


async def _check_reading(database: Database) -> None:
    names = [_named(f"many {number}") for number in range(50)]
    writing = database.write([_unit(_ADD, name, b"1") for name in names])
    await asyncio.gather(writing, *(database.read(_FIND, name) for name in names))
    found = await asyncio.gather(*(database.read(_FIND, name) for name in names))
    rule(all(map(len, found)), "many reads, and one write, may run at the same time")
    rule(await database.size() >= 0, "size is the size on disk in bytes")
    await database.write([_unit(_REMOVE, name) for name in names])


async def _check_search(database: Database) -> None:
    await database.write([_unit("delete from vector_store_chunks where number = $1", _CHUNK)])
    terms = '0aé 0a"quoted" 0a*'
    add = "insert into vector_store_chunks (number, text, fresh, terms) values ($1, $2, 0, $3)"
    await database.write([_unit(add, _CHUNK, "text", terms)])
    for term, expected in [*((term, str(_CHUNK)) for term in terms.split()), ("0a", None), ("0aé 0a*", None)]:
        ((found,),) = await database.read(f"select string_agg(cast(number as text), ',') {with_term('$1')}", term)
        ((count,),) = await database.read(f"select count(*) {with_term('$1')}", term)
        rule((found, count) == (expected, int(expected is not None)), "a search finds the chunks with a whole term")
    await database.write([_unit("delete from vector_store_chunks where number = $1", _CHUNK)])
    ((count,),) = await database.read(f"select count(*) {with_term('$1')}", "0aé")
    rule(count == 0, "a search finds no deleted chunk")


async def _check_closing(database: Database) -> None:
    await database.close()
    await database.close()


_RULES: dict[str, Callable[[Database], Awaitable[None]]] = {
    "members": _check_members,
    "open": _check_opening,
    "values": _check_values,
    "errors": _check_errors,
    "counts": _check_counts,
    "transactions": _check_transactions,
    "concurrency": _check_reading,
    "search": _check_search,
    "close": _check_closing,
}
