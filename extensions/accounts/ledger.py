"""Ledger: what each answer has used, exactly once, and the sums of that by hour, which are kept for long.

A row is written in one transaction with the end of its response.  Once its hour is over, the sweep marks it, and then
adds it to the sums and deletes it, in one transaction as well.  Hours are by the clock of the server that writes a row.

A commit of unknown outcome is repeated, so a row must not come back after its deletion.  The row of a stored response
is fenced as its end is.  The other rows have the server that writes them.  A server that lives adds up its own rows
alone: it marks them with a change that waits behind all that may be repeated.  Any server adds up those of a server
that has left.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from math import inf
from typing import Any, Final, Protocol

import msgspec
from msgspec.structs import replace

from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.store.database import LONG, SHARED, Row, Statement, Value, placeholders
from penstock.services.store.parts import StorePart
from penstock.services.store.rows import model_column
from penstock.services.use import SUMMED, Use

HOUR = 3_600
"""Seconds of an hour, the shortest time whose sums are kept."""

DAY = 24 * HOUR
"""Seconds of a day."""

AT_ONCE = 2_000
"""Rows that one transaction adds to the sums."""

_COUNTS = dict.fromkeys(SUMMED, "bigint") | {"tool_seconds": "double precision"}
_TEXTS = ("team", "owner", "key_name", "model", "api")
_OF_ALL = (*_TEXTS, "is_line")
"""The columns that tell one sum of an hour from the others, beside the hour."""

_SHARED_COLUMNS = f"""
    hour bigint not null,
    {" text not null, ".join(_TEXTS)} text not null,
    is_line bigint not null,
    {", ".join(f"{name} {kind} not null" for name, kind in _COUNTS.items())},
    cost double precision
"""

_TABLES = (
    f"create table ledger (id text primary key, server_id text not null, sweep text, {_SHARED_COLUMNS})",
    f"""
    create table ledger_hours (
        {_SHARED_COLUMNS},
        requests bigint not null,
        primary key (hour, {", ".join(_OF_ALL)})
    )
    """,
)
"""The rows of the answers, which name the ``sweep`` that adds them up, and the sums of hours that are over.

An hour counts from 1970.  A cost is null if no price was known.
"""

_COLUMNS = ("id", "server_id", "hour", *_OF_ALL, *SUMMED, "cost")

_KINDS = {"hour": "bigint", "is_line": "bigint", **_COUNTS, "requests": "bigint", "cost": "double precision"}

_VALUES = ", ".join(f"cast(${number} as {_KINDS.get(name, 'text')})" for number, name in enumerate(_COLUMNS, 1))

_NOTE = f"insert into ledger ({', '.join(_COLUMNS)}) values ({_VALUES}) on conflict (id) do nothing"

_NOTE_STORED = f"""
    insert into ledger ({", ".join(_COLUMNS)})
    select {_VALUES} from responses where id = ${len(_COLUMNS) + 1} and server_id = $2 {SHARED}
    on conflict (id) do nothing
"""

_TAKE = f"""
    update ledger set sweep = $1 where id in (
        select id from ledger
        where hour < cast($2 as bigint) and (
            server_id = $3 or not exists (select 1 from servers where servers.id = ledger.server_id)
        )
        limit {AT_ONCE}
    )
"""
"""Marks rows, in a transaction of its own: the one that writes a row may have to be repeated, and then it is there."""

_HOLD = "update ledger set sweep = sweep where sweep = $1"
"""Keeps other servers from marking these rows until the transaction is over, which deletes them."""

_ADD = f"""
    insert into ledger_hours (hour, {", ".join(_OF_ALL)}, {", ".join(SUMMED)}, cost, requests)
    select hour, {", ".join(_OF_ALL)}, {", ".join(f"sum({name})" for name in SUMMED)}, sum(cost), count(*)
    from ledger where sweep = $1
    group by hour, {", ".join(_OF_ALL)} order by hour, {", ".join(_OF_ALL)}
    on conflict (hour, {", ".join(_OF_ALL)}) do update set
        {", ".join(f"{name} = ledger_hours.{name} + excluded.{name}" for name in (*SUMMED, "requests"))},
        cost = case
            when ledger_hours.cost is null then excluded.cost
            else ledger_hours.cost + coalesce(excluded.cost, 0) end
"""

_CLEAR = "delete from ledger where sweep = $1"

_FORGET = ("delete from ledger where hour < $1", "delete from ledger_hours where hour < $1")

_TIMES = {"hour": ("hour", HOUR), "day": ("hour / 24", DAY), "month": ("hour / 24", DAY)}
"""The times of groups: an expression of whole numbers, and the seconds of one.

Databases know no months in common: their days are added up here.
"""

BY: Final = (*_TIMES, *_OF_ALL)
"""The words of groups."""

_SUMS = f"""
    {LONG} select {{groups}}, {{sums}}, sum(cost) from (
        select hour, {{columns}}, cost, 1 as requests from ledger where {{found}}
        union all
        select hour, {{columns}}, cost, requests from ledger_hours where {{found}}
    ) as uses {{group_by}}
"""


class Prices(Protocol):
    """The prices of what is used."""

    @property
    def currency(self) -> str:
        """The currency of all costs, such as ``USD``."""
        ...

    def cost(self, use: Use) -> float | None:
        """Return the cost of a use, in units of the currency; None if no price is known.  Threads call it, too."""
        ...


class Sum(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the uses of one group.  What they are not grouped by has its default."""

    at: int = 0
    """The start of the hour, day or month, in seconds since 1970; all are of UTC."""
    team: str = ""
    owner: str = ""
    key_name: str = ""
    model: str = ""
    api: str = ""
    is_line: bool = False
    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    tool_seconds: float = 0.0
    searches: int = 0
    images: int = 0
    cost: float | None = None
    """None if no price was known for any of them."""

    def __add__(self, other: Sum) -> Sum:
        """Return the sum of both, in the group of this one."""
        added = {name: getattr(self, name) + getattr(other, name) for name in COUNTED}
        costs = [each.cost for each in (self, other) if each.cost is not None]
        return replace(self, **added, cost=sum(costs) if costs else None)


COUNTED: Final = ("requests", *SUMMED)
"""The numbers of a `Sum`, beside its cost."""


class Ledger(StorePart):
    """The accounts in the store: the sums of what all owners have used."""

    name = "ledger"
    tables = _TABLES
    queued = (_NOTE, _NOTE_STORED)

    prices: Prices | None = None
    keep: float = inf
    """Seconds for which the sums are kept; with 0, nothing is written.

    A server sweeps and writes before it has opened the resource of the accounts, which sets this.
    """

    @property
    def currency(self) -> str:
        """The currency of all costs."""
        return self.prices.currency if self.prices else "USD"

    def used(self, use: Use, response_id: str | None) -> Iterable[Statement]:
        """Yield the statement that writes the row of a use, with its cost by the prices of now."""
        if not self.keep:
            return
        row: tuple[Value, ...] = (
            use.id,
            self.context.server_id,
            int(use.at // HOUR),
            *(model_column(getattr(use, name)) for name in _TEXTS),
            int(use.is_line),
            *(getattr(use, name) for name in SUMMED),
            self.prices.cost(use) if self.prices else None,
        )
        yield Statement(_NOTE, row) if response_id is None else Statement(_NOTE_STORED, (*row, response_id))

    async def sweep(self) -> None:
        """Add up the rows of hours that are over, and forget the sums that have expired."""
        now, is_full = time.time(), True
        while is_full:
            mark = secrets.token_hex(8)
            take = Statement(_TAKE, (mark, int(now // HOUR), self.context.server_id))
            (count,) = await self.context.writer.carry_out([take])
            await self.context.writer.carry_out([Statement(sql, (mark,)) for sql in (_HOLD, _ADD, _CLEAR)])
            is_full = count == AT_ONCE
        if self.keep < inf:
            expired = (int((now - self.keep) // HOUR),)
            await self.context.writer.carry_out([Statement(sql, expired) for sql in _FORGET])

    async def sums(
        self, since: float, until: float, by: Sequence[str] = (), where: Mapping[str, Sequence[str | int]] | None = None
    ) -> Sequence[Sum]:
        """Return the sums of the hours from ``since`` until ``until``, in the order of their groups.

        There is one for each group of the words ``by``, which are of `BY`: none if nothing was used.  ``where`` has the
        values that count of a column.  Times are in seconds since 1970; an hour that has begun counts whole.  Raises
        `StoreFailed`.
        """
        await self.context.writer.flushed()
        groups = [_TIMES[word][0] if word in _TIMES else word for word in by]
        found, values = ["hour >= $1", "hour < $2"], list[Value]((int(since // HOUR), int(-(-until // HOUR))))
        for column, allowed in (where or {}).items():
            found.append(f"{column} in ({placeholders(len(allowed), len(values) + 1)})" if allowed else "1 = 0")
            values += [model_column(value) if isinstance(value, str) else value for value in allowed]
        query = _SUMS.format(
            groups=", ".join(groups or ["1"]),
            sums=", ".join(f"cast(sum({name}) as {_KINDS[name]})" for name in COUNTED),
            columns=", ".join((*_OF_ALL, *SUMMED)),
            found=" and ".join(found),
            group_by=f"group by {', '.join(groups)}" if groups else "having count(*) > 0",
        )
        rows = await self.context.read(query, *values)
        return await apart(len(rows) > MANY_VALUES, _summed, rows, by)


def _summed(rows: Sequence[Row], by: Sequence[str]) -> Sequence[Sum]:
    """Return the sums of rows, of which several may be of one month."""
    sums: dict[Sum, Sum] = {}
    for row in rows:
        named = dict(zip(by or ("",), row, strict=False))
        counted, cost = row[len(named) : -1], row[-1]
        group = _group(named)
        sums[group] = sums.get(group, group) + Sum(**dict(zip(COUNTED, counted, strict=True)), cost=cost)
    words = ["at" if word in _TIMES else word for word in by]
    return sorted(sums.values(), key=lambda one: [getattr(one, word) for word in words])


def _group(named: Mapping[str, Any]) -> Sum:
    """Return an empty sum of a group."""
    return Sum(**dict(_field(word, value) for word, value in named.items() if word))


def _field(word: str, value: Any) -> tuple[str, Any]:
    if word == "is_line":
        return word, bool(value)
    if word not in _TIMES:
        return word, value
    at = int(value) * _TIMES[word][1]
    if word == "month":
        at = int(datetime.fromtimestamp(at, UTC).replace(day=1).timestamp())
    return "at", at
