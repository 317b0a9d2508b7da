"""Spending: what each key, each team and all together have used today, and this month, of all servers of a store.

The ledger is read every few seconds.  What this server has noted since counts beside what was read.  So a use counts
here at once, and at the other servers of the store with their next read.  If the store cannot be read, what was read
before goes on to count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache, reduce
from threading import Lock
from typing import Literal, NamedTuple, TypeAlias

from penstock.extensions.accounts.ledger import DAY, Ledger, Sum
from penstock.pipeline.errors import StoreFailed
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.use import Use

EVERY = 5.0
"""Seconds between two reads of what was used today."""

SHARE = 0.05
"""The most of the time for which this server has the database read."""

EARLIER_EVERY = 600.0
"""Seconds between two reads of what was used in the month before today."""

Kind: TypeAlias = Literal["key", "team", "each-key", "all"]

Period: TypeAlias = Literal["day", "month"]


class Payer(NamedTuple):
    """The keys of a name, those of a team, the key of an owner, or all keys, which have no name."""

    kind: Kind
    name: str = ""


class Spent(NamedTuple):
    """An amount that was used."""

    tokens: int = 0
    money: float = 0.0

    def plus(self, other: Spent) -> Spent:
        """Return both together."""
        return Spent(self.tokens + other.tokens, self.money + other.money)


class _Note(NamedTuple):
    """A use that was noted here, and not read since."""

    payers: Sequence[Payer]
    day: int
    spent: Spent


@dataclass(frozen=True)
class _Read:
    """The amounts of the ledger at the last read: of its day, and of the month before that day."""

    day: int
    earlier: Mapping[Payer, Spent] = field(default_factory=dict)
    earlier_at: float = float("-inf")
    today: Mapping[Payer, Spent] = field(default_factory=dict)


def day_of(at: float) -> int:
    """Return the day of UTC that has a time in seconds since 1970, as the number of days since then."""
    return int(at // DAY)


@lru_cache(maxsize=16)
def first_day(period: Period, day: int) -> int:
    """Return the first day of the day or the month that has a day."""
    return day if period == "day" else day + 1 - datetime.fromtimestamp(day * DAY, UTC).day


def next_of(period: Period, at: float) -> datetime:
    """Return the begin of the next day or month of UTC."""
    first = first_day(period, day_of(at))
    later = first + 1 if period == "day" else first_day("month", first + 31)
    return datetime.fromtimestamp(later * DAY, UTC)


ALL = Payer("all")


def payers_of(owner: str, key_name: str, team: str) -> Sequence[Payer]:
    """Return all whose budgets pay for an owner with a key of that name and team."""
    named = Payer("key", key_name), Payer("team", team), Payer("each-key", owner)
    return (*(payer for payer in named if payer.name), ALL)


class Spending:
    """The amounts that were used, by who pays."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = time.time) -> None:
        self._ledger, self._clock = ledger, clock
        self._read = _Read(day_of(clock()))
        self._notes: dict[str, _Note] = {}
        self._noted: dict[int, dict[Payer, Spent]] = {}
        """The sums of the notes by day."""
        self._lock = Lock()  # uses are noted in threads, too

    def note(self, use: Use, cost: float | None) -> None:
        """Note a use that is being written; one that is written again counts once."""
        spent = Spent(use.input_tokens + use.output_tokens, cost or 0.0)
        note = _Note(payers_of(use.owner, use.key_name, use.team), day_of(use.at), spent)
        with self._lock:
            if use.id not in self._notes:
                self._notes[use.id] = note
                self._count(note)

    def _count(self, note: _Note) -> None:
        _add(self._noted.setdefault(note.day, {}), note.payers, note.spent)

    def of(self, payer: Payer, period: Period) -> Spent:
        """Return what was used in the day or the month of now."""
        first = first_day(period, day_of(self._clock()))
        with self._lock:
            read = self._read
            counted: list[Mapping[Payer, Spent]] = [noted for day, noted in self._noted.items() if day >= first]
            if read.day >= first:
                counted += [read.today] if period == "day" else [read.earlier, read.today]
            found = [each[payer] for each in counted if payer in each]
        return reduce(Spent.plus, found, Spent())

    async def read(self) -> None:
        """Read the ledger; raises `StoreFailed`."""
        now, before = self._clock(), self._read
        day = day_of(now)
        with self._lock:
            notes = set(self._notes)  # the ledger waits until these are written
            is_late = any(note.day < day for note in self._notes.values())
        earlier, at = before.earlier, before.earlier_at
        if is_late or day != before.day or now - at > EARLIER_EVERY:
            earlier, at = await self._sums(first_day("month", day), day), now
        today = await self._sums(day, day + 1)
        with self._lock:
            self._read = _Read(day, earlier, at, today)
            self._notes = {name: note for name, note in self._notes.items() if name not in notes}
            self._noted = {}
            for note in self._notes.values():
                self._count(note)

    async def _sums(self, since: int, until: int) -> Mapping[Payer, Spent]:
        if since == until:
            return {}
        sums = await self._ledger.sums(since * DAY, until * DAY, ("team", "owner", "key_name"))
        return await apart(len(sums) > MANY_VALUES, _by_payer, sums)

    async def follow(self) -> None:
        """Read the ledger every few seconds, until cancelled."""
        while True:
            begun = time.monotonic()
            with suppress(StoreFailed):  # it is counted and logged where it happens
                await self.read()
            await asyncio.sleep(max(EVERY, (time.monotonic() - begun) / SHARE))


def _by_payer(sums: Iterable[Sum]) -> Mapping[Payer, Spent]:
    found: dict[Payer, Spent] = {}
    for each in sums:
        spent = Spent(each.input_tokens + each.output_tokens, each.cost or 0.0)
        _add(found, payers_of(each.owner, each.key_name, each.team), spent)
    return found


def _add(sums: dict[Payer, Spent], payers: Iterable[Payer], spent: Spent) -> None:
    for payer in payers:
        sums[payer] = sums.get(payer, Spent()).plus(spent)
