"""The data of the page: what was used on each day, by key, team, model or API, and how full the budgets are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from aiohttp import web

from penstock.api.http.auth import for_operators
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.query import Choice, Number
from penstock.extensions.accounts.books import Books
from penstock.extensions.accounts.ledger import DAY, Ledger, Sum
from penstock.extensions.accounts.spending import day_of, next_of
from penstock.pipeline.distribution import own_version
from penstock.pipeline.errors import InvalidRequest, StoreFailed
from penstock.pipeline.tasks import MANY_VALUES, apart

MOST_DAYS = 400
"""The most days that the page shows."""

MOST_GROUPS = 20
"""The most keys, teams or models that the page names; the others are one group."""

_COLUMNS = {"key": "key_name", "team": "team", "model": "model", "api": "api"}

DAYS = Number("days", default=30, least=1, most=MOST_DAYS, meaning="The number of days, of which today is the last.")
BY = Choice("by", tuple(_COLUMNS), meaning="The word by which the amounts are grouped.")


class Group(msgspec.Struct, frozen=True):
    """The amounts of a key, a team, a model or an API: one for each day."""

    name: str
    """Its name; empty for what has none, and for the rest."""
    is_rest: bool
    """True for the groups that are not named."""
    requests: Sequence[int]
    input_tokens: Sequence[int]
    cached_tokens: Sequence[int]
    output_tokens: Sequence[int]
    reasoning_tokens: Sequence[int]
    cost: Sequence[float | None]
    """None where no price was known."""


class BudgetNow(msgspec.Struct, frozen=True):
    """A bound of a budget, and what was spent of it."""

    whose: str
    period: str
    unit: str
    most: float
    spent: float
    warn: float
    """The fraction from which on answers have a warning."""
    until: str
    """The time at which it begins anew."""


class UsageData(msgspec.Struct, frozen=True):
    """The amounts of some days, and the budgets of now."""

    version: str
    keeps: bool
    """False if this server keeps no accounts."""
    currency: str | None
    """None without prices."""
    days: Sequence[str]
    groups: Sequence[Group]
    """The largest ones first, by their tokens."""
    budgets: Sequence[BudgetNow]


@dataclass
class Usage:
    """The route over the ledger of a store, and over the books if the server has them."""

    ledger: Ledger
    books: Books | None
    keeps: bool = True
    clock: Callable[[], float] = time.time

    @for_operators
    @operation(Operation(UsageData, query=(DAYS, BY), refusals=(InvalidRequest, StoreFailed)))
    async def data(self, request: web.Request) -> web.Response:
        """Describe what was used on the latest days, and how full the budgets are."""
        count, by = DAYS.read(request), _COLUMNS[BY.read(request)]
        now = self.clock()
        days = range(day_of(now) + 1 - count, day_of(now) + 1)
        sums = await self.ledger.sums(days.start * DAY, days.stop * DAY, ("day", by))
        groups = await apart(len(sums) > MANY_VALUES, grouped, sums, days, by)
        books = self.books
        is_long = books is not None and len(books.keys.all) > MANY_VALUES
        budgets = await apart(is_long, budgets_now, books, now) if books else ()
        return as_json(
            UsageData(
                own_version(),
                keeps=self.keeps,
                currency=books.accounts.currency if books and books.accounts.prices else None,
                days=[f"{datetime.fromtimestamp(day * DAY, UTC):%Y-%m-%d}" for day in days],
                groups=groups,
                budgets=budgets,
            )
        )


def grouped(sums: Iterable[Sum], days: range, by: str) -> Sequence[Group]:
    """Return the largest groups, and the sum of the rest as the last one."""
    found: dict[str, dict[int, Sum]] = {}
    for each in sums:
        of_group, place = found.setdefault(getattr(each, by), {}), each.at // DAY - days.start
        of_group[place] = of_group[place] + each if place in of_group else each
    names = sorted(found, key=lambda name: (-sum(map(_tokens, found[name].values())), name))
    rest: dict[int, Sum] = {}
    for name in names[MOST_GROUPS:]:
        for place, each in found[name].items():
            rest[place] = rest[place] + each if place in rest else each
    groups = [_group(name, found[name], len(days)) for name in names[:MOST_GROUPS]]
    return [*groups, _group("", rest, len(days), is_rest=True)] if rest else groups


def _tokens(amounts: Sum) -> int:
    return amounts.input_tokens + amounts.output_tokens


def _group(name: str, sums: Mapping[int, Sum], count: int, *, is_rest: bool = False) -> Group:
    of_days = [sums.get(place, Sum()) for place in range(count)]
    return Group(
        name,
        is_rest=is_rest,
        requests=[day.requests for day in of_days],
        input_tokens=[day.input_tokens for day in of_days],
        cached_tokens=[day.cached_tokens for day in of_days],
        output_tokens=[day.output_tokens for day in of_days],
        reasoning_tokens=[day.reasoning_tokens for day in of_days],
        cost=[day.cost for day in of_days],
    )


def budgets_now(books: Books, now: float) -> Sequence[BudgetNow]:
    """Return the bounds of the file, and what was spent of each."""
    return [
        BudgetNow(
            whose,
            period=bound.period,
            unit=bound.unit,
            most=float(bound.most),
            spent=bound.spent(books.spending),
            warn=bound.warn,
            until=next_of(bound.period, now).isoformat(),
        )
        for whose, bound in books.gate.all_bounds()
    ]
