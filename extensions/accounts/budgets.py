"""Budgets: requests of keys whose budget is spent are refused, and answers warn before."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from heapq import nlargest

from penstock.api.http.auth import Keys
from penstock.extensions.accounts.accounts_file import Accounts, Budget
from penstock.extensions.accounts.prices import DIGITS
from penstock.extensions.accounts.spending import (
    ALL,
    Payer,
    Period,
    Spending,
    day_of,
    first_day,
    next_of,
    payers_of,
)
from penstock.pipeline.errors import BudgetSpent

logger = logging.getLogger(__name__)

HEADER = "x-penstock-budget"
"""The header of a warning, of answers to clients and of refusals."""

TOKENS = "tokens"

MOST_KNOWN = 10_000
"""The most keys and teams whose bounds are remembered."""

MOST_KEYS = 20
"""The most bounds to show of the budget that each key has."""


@dataclass(frozen=True)
class Bound:
    """The most of one unit, tokens or a currency, that a payer may use in a day or a month."""

    payer: Payer
    period: Period
    unit: str
    most: Decimal
    warn: float

    def spent(self, spending: Spending) -> float:
        """Return what was used of it; money is rounded as the costs are, of which it is a sum."""
        spent = spending.of(self.payer, self.period)
        return spent.tokens if self.unit == TOKENS else round(spent.money, DIGITS)

    def __str__(self) -> str:
        """Return the bound in words, such as ``100 USD of the month for key ci``."""
        kind, name = self.payer
        whose = {"key": f"key {name}", "team": f"team {name}", "each-key": "this key", "all": "all keys"}[kind]
        return f"{self.most.normalize():f} {self.unit} of the {self.period} for {whose}"

    @cached_property
    def limit(self) -> float:
        """The most, to compare."""
        return float(self.most)

    def share(self, spending: Spending) -> float:
        """Return the fraction of it that was used."""
        return self.spent(spending) / self.limit


def bounds_of(payer: Payer, budget: Budget, currency: str) -> Iterator[Bound]:
    """Yield what a budget bounds."""
    periods: tuple[tuple[Period, int | None, Decimal | None], ...] = (
        ("day", budget.day_tokens, budget.day_money),
        ("month", budget.month_tokens, budget.month_money),
    )
    for period, tokens, money in periods:
        if tokens is not None:
            yield Bound(payer, period=period, unit=TOKENS, most=Decimal(tokens), warn=budget.warn)
        if money is not None:
            yield Bound(payer, period=period, unit=currency, most=money, warn=budget.warn)


@dataclass
class Gate:
    """The budgets of a file over what was spent: a gate of `Admission`."""

    keys: Keys
    spending: Spending
    accounts: Accounts
    clock: Callable[[], float] = time.time
    _told: set[tuple[Bound, int]] = field(default_factory=set)
    """The bounds of which the log says that they are spent, each with the first day of the period."""
    _bounds: dict[Payer, Sequence[Bound]] = field(default_factory=dict)
    """The bounds that were found by who pays."""

    def take(self, accounts: Accounts) -> None:
        """Have other budgets hold from now on."""
        self.accounts = accounts
        self._bounds.clear()

    async def check(self, owner: str) -> None:
        """Raise `BudgetSpent` if a budget that pays for the owner is spent."""
        for bound in self.bounds(owner):
            if (spent := bound.spent(self.spending)) >= bound.limit:
                self._tell(bound, spent)
                again = next_of(bound.period, self.clock())
                raise BudgetSpent(str(bound), f"{again:%Y-%m-%d at %H:%M} UTC")

    def headers(self, owner: str) -> Mapping[str, str]:
        """Return the header that warns of the budget of which the most is spent; none before its time."""
        fullest, warning = 0.0, ""
        for bound in self.bounds(owner):
            share = bound.share(self.spending)
            if share >= bound.warn and share > fullest:
                fullest, warning = share, f"{int(round(100 * share, DIGITS))}% of {bound}"
        return {HEADER: warning} if warning else {}

    def bounds(self, owner: str) -> Iterator[Bound]:
        """Yield all bounds of an owner."""
        if not self.accounts.budgets.are_none:
            for payer in payers_of(owner, self.keys.title(owner), self.keys.team(owner)):
                yield from self._bounds_of(payer)

    def all_bounds(self) -> Sequence[tuple[str, Bound]]:
        """Return each bound with who has it; of those that each key has, the ones of which the most is used."""
        budgets = self.accounts.budgets
        named = [("all keys", ALL), *((f"team {name}", Payer("team", name)) for name in budgets.team)]
        named += [(f"key {name}", Payer("key", name)) for name in budgets.key]
        each = [(f"key {key.title}", Payer("each-key", key.digest)) for key in self.keys.all if budgets.each_key]
        fullest = nlargest(MOST_KEYS, self._named(each), key=lambda one: one[1].share(self.spending))
        return [*self._named(named), *fullest]

    def _named(self, payers: Iterable[tuple[str, Payer]]) -> Iterator[tuple[str, Bound]]:
        return ((whose, bound) for whose, payer in payers for bound in self._bounds_of(payer))

    def _bounds_of(self, payer: Payer) -> Sequence[Bound]:
        found = self._bounds.get(payer)
        if found is None:
            if len(self._bounds) > MOST_KNOWN:
                self._bounds.clear()
            budget = self.accounts.budgets.of(*payer)
            found = self._bounds[payer] = () if budget is None else (*bounds_of(payer, budget, self.accounts.currency),)
        return found

    def _tell(self, bound: Bound, spent: float) -> None:
        today = day_of(self.clock())
        told = (bound, first_day(bound.period, today))
        if told not in self._told:
            self._told = {each for each in self._told if each[1] == first_day(each[0].period, today)} | {told}
            logger.warning("The budget of %s is spent: %g %s were used", bound, spent, bound.unit)
