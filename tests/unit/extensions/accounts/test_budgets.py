"""Budgets: nobody begins once one is spent, the next day or month begins anew, and servers share what they have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http.auth import Keys
from penstock.extensions.accounts.accounts_file import Accounts
from penstock.extensions.accounts.books import Books
from penstock.extensions.accounts.budgets import HEADER, Gate
from penstock.extensions.accounts.ledger import Ledger, Sum
from penstock.extensions.accounts.spending import EARLIER_EVERY, Spending, day_of, first_day, next_of
from penstock.pipeline.audit import LOGGER
from penstock.pipeline.errors import BudgetSpent, StoreFailed
from penstock.services.use import Use

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()
DAY = 86_400

CI, WEB, OTHER = "the-key-of-ci-01", "the-key-of-web-1", "a-key-without-name"


@dataclass
class Time:
    now: float = NOON

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class FakeLedger(Ledger):
    """The uses of all servers, in memory; with ``problem``, it cannot be read."""

    uses: dict[str, tuple[Use, float | None]] = field(default_factory=dict)
    problem: bool = False
    reads: int = 0

    async def sums(
        self, since: float, until: float, by: Sequence[str] = (), where: Mapping[str, Sequence[str | int]] | None = None
    ) -> Sequence[Sum]:
        self.reads += 1
        if self.problem:
            raise StoreFailed("The store cannot be read.")
        return [
            Sum(
                **{name: getattr(use, name) for name in by},
                input_tokens=use.input_tokens,
                output_tokens=use.output_tokens,
                cost=cost,
            )
            for use, cost in self.uses.values()
            if since <= use.at < until
        ]


def keys() -> Keys:
    return Keys(given=[f"{CI} name=ci team=infra", f"{WEB} name=web team=infra", OTHER])


def owner(key: str) -> str:
    return next(each.digest for each in keys().all if each == keys().of(each.digest) and _is(each.digest, key))


def _is(digest: str, key: str) -> bool:
    return keys().owner(f"Bearer {key}") == digest


@dataclass
class Server:
    """One server of several that share a ledger."""

    ledger: FakeLedger
    time: Time
    budgets: dict[str, Any]
    count: int = 0

    def __post_init__(self) -> None:
        self.keys, self.spending = keys(), Spending(self.ledger, self.time)
        self.gate = Gate(self.keys, self.spending, accounts(self.budgets), self.time)

    def use(self, key: str, tokens: int, cost: float | None = None) -> None:
        """End an answer, whose row is written."""
        self.count += 1
        who = self.keys.owner(f"Bearer {key}")
        title, team = self.keys.title(who), self.keys.team(who)
        use = Use(
            id=f"{id(self)}:{self.count}",
            owner=who,
            key_name=title,
            team=team,
            model="m",
            api="chat",
            at=self.time(),
            output_tokens=tokens,
        )
        self.spending.note(use, cost)
        self.ledger.uses[use.id] = (use, cost)

    async def lets(self, key: str) -> bool:
        try:
            await self.gate.check(self.keys.owner(f"Bearer {key}"))
        except BudgetSpent:
            return False
        return True

    def warning(self, key: str) -> str:
        return self.gate.headers(self.keys.owner(f"Bearer {key}")).get(HEADER, "")


def accounts(budgets: dict[str, Any]) -> Accounts:
    return Accounts.model_validate({"prices": {"m": {"output": 1}}, "budgets": budgets})


@given(
    st.integers(1, 30),
    st.lists(st.one_of(st.just("begin"), st.just("end"), st.just("read"), st.integers(1, 8)), max_size=60),
)
async def test_nobody_begins_once_the_budget_is_spent(most: int, steps: list[str | int]) -> None:
    """What is used is at most the budget, and what ran at the moment at which it was reached."""
    server = Server(FakeLedger(), Time(), {"key": {"ci": {"day-tokens": most}}})
    running, used, ran, size = list[int](), 0, 0, 1
    for step in steps:
        ran = sum(running) if used < most else ran
        match step:
            case int():
                size = step
            case "begin":
                assert await server.lets(CI) is (used < most)
                if used < most:
                    running.append(size)
            case "end" if running:
                used += running[0]
                server.use(CI, running.pop(0))
            case "read":
                await server.spending.read()
            case _:
                pass
    assert used < most + ran or used == ran == 0


Event = st.one_of(
    st.tuples(st.just("use"), st.integers(0, 1), st.sampled_from([CI, WEB, OTHER]), st.integers(5, 20)),
    st.tuples(st.just("read"), st.integers(0, 1), st.sampled_from([True, False, False]), st.none()),
    st.tuples(st.just("wait"), st.sampled_from([1, 6, 12, 24]), st.none(), st.none()),
)

BUDGETS: dict[str, Any] = {
    "key": {"ci": {"day-tokens": 30, "month-tokens": 50}},
    "team": {"infra": {"month-money": 0.4}},
    "each-key": {"day-tokens": 25},
    "all": {"day-money": 0.6, "month-tokens": 90},
}


def is_spent(uses: list[tuple[float, str, int]], key: str, now: float) -> bool:
    """Whether a budget of a key is spent, by the uses, each with its time, key and tokens."""

    def used(whose: set[str], begin: datetime) -> int:
        return sum(tokens for at, by, tokens in uses if by in whose and at >= begin.timestamp())

    day = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    month = day.replace(day=1)
    everybody = {CI, WEB, OTHER}
    spent = used({key}, day) >= 25 or used(everybody, day) >= 60 or used(everybody, month) >= 90
    if key == CI:
        spent = spent or used({CI}, day) >= 30 or used({CI}, month) >= 50
    return spent or (key != OTHER and used({CI, WEB}, month) >= 40)


@given(st.lists(Event, max_size=50))
async def test_servers_share_what_they_have_read_and_begin_anew_with_the_day_and_the_month(steps: list[Any]) -> None:
    """A server refuses none that has something left, and lets none begin that it knows to have nothing left.

    It knows what it has used itself, and what all had used when it read last.
    """
    time, ledger = Time(), FakeLedger()
    servers = [Server(ledger, time, BUDGETS) for _ in range(2)]
    uses, known = list[tuple[float, str, int]](), [list[tuple[float, str, int]](), list[tuple[float, str, int]]()]
    for kind, which, key, tokens in steps:
        if kind == "use":
            servers[which].use(key, tokens, tokens / 100)
            uses.append((time.now, key, tokens))
            known[which].append(uses[-1])
        elif kind == "read":
            ledger.problem = key
            if key:
                with pytest.raises(StoreFailed):
                    await servers[which].spending.read()
            else:
                time.now += EARLIER_EVERY + 1  # what others wrote late of days before is read by then
                await servers[which].spending.read()
                known[which] = [*uses]
        else:
            time.now += which * DAY / 24
        for server, knows in zip(servers, known, strict=True):
            for one in (CI, WEB, OTHER):
                lets = await server.lets(one)
                assert lets or is_spent(uses, one, time.now)
                assert not (lets and is_spent(knows, one, time.now))


@pytest.mark.parametrize("reads", [True, False])
async def test_day_and_month_begin_anew_at_midnight(reads: bool) -> None:
    time = Time(NOON - 2 * DAY)
    server = Server(FakeLedger(), time, {"key": {"ci": {"day-tokens": 10, "month-tokens": 25}}})
    for tokens in (12, 12, 1):  # the day, the day, and the month are spent
        server.use(CI, tokens)
        midnight = next_of("day", time.now).timestamp()
        for moment in (time.now, midnight - 1):
            time.now = moment
            if reads:
                await server.spending.read()
            assert not await server.lets(CI)
        time.now = midnight
        assert await server.lets(CI)
    assert datetime.fromtimestamp(time.now, UTC).month == 12


async def test_what_other_servers_have_used_before_today_counts_in_the_month() -> None:
    time, ledger = Time(NOON - DAY), FakeLedger()
    one, other = (Server(ledger, time, {"team": {"infra": {"month-tokens": 10}}}) for _ in range(2))
    one.use(CI, 4)
    time.now += DAY
    await other.spending.read()
    other.use(WEB, 5)
    assert await other.lets(CI)
    one.ledger.uses["late"] = (
        Use(id="late", key_name="ci", team="infra", model="m", api="chat", at=NOON - DAY, output_tokens=1),
        None,
    )
    await other.spending.read()
    assert await other.lets(CI)  # days that are over are not read each time
    time.now += EARLIER_EVERY + 1
    await other.spending.read()
    assert not await other.lets(CI)


async def test_use_of_yesterday_that_is_written_today_counts_in_the_month() -> None:
    time = Time(NOON - DAY / 2 + 1)
    server = Server(FakeLedger(), time, {"all": {"month-tokens": 10}})
    await server.spending.read()
    late = Use(id="late", model="m", api="chat", at=time.now - 2, output_tokens=10)
    server.spending.note(late, None)
    server.ledger.uses["late"] = (late, None)
    for _ in range(2):
        assert not await server.lets(CI)
        await server.spending.read()


async def test_message_and_warning_name_the_budget(caplog: pytest.LogCaptureFixture) -> None:
    server = Server(
        FakeLedger(), Time(), {"key": {"ci": {"month-money": 0.5}}, "all": {"day-tokens": 1000, "warn": 0.5}}
    )
    server.use(CI, 100, 0.39)
    assert server.warning(CI) == ""
    server.use(CI, 100, 0.025)
    assert server.warning(CI) == "83% of 0.5 USD of the month for key ci"
    server.use(WEB, 400)
    assert server.warning(WEB) == "60% of 1000 tokens of the day for all keys"
    assert server.warning(CI) == "83% of 0.5 USD of the month for key ci"
    assert not caplog.messages
    server.use(CI, 0, 0.1)
    assert not await server.lets(CI)
    with pytest.raises(BudgetSpent) as refused:
        await server.gate.check(server.keys.owner(f"Bearer {CI}"))
    assert refused.value.message == (
        "You exceeded your current quota, please check your plan and billing details: 0.5 USD of the month for key ci "
        "are used up. You have reached your specified API usage limits. "
        "You will regain access on 2026-12-01 at 00:00 UTC."
    )
    assert server.warning(CI) == "103% of 0.5 USD of the month for key ci"
    assert caplog.messages == ["The budget of 0.5 USD of the month for key ci is spent: 0.515 USD were used"]
    assert await server.lets(WEB)


async def test_money_that_adds_up_to_the_budget_in_decimals_spends_it() -> None:
    server = Server(FakeLedger(), Time(), {"all": {"day-money": 0.8}})
    for _ in range(8):
        assert await server.lets(CI)
        server.use(CI, 1, 0.1)  # in doubles, the sum is less than 0.8
    assert not await server.lets(CI)


async def test_use_that_is_noted_twice_counts_once() -> None:
    server = Server(FakeLedger(), Time(), {"all": {"day-tokens": 10}})
    use = Use(id="batch_1:1", model="m", api="chat", at=NOON, output_tokens=6)
    for _ in range(2):
        server.spending.note(use, None)
    assert await server.lets(CI)


async def test_owner_without_a_key_pays_for_all_alone() -> None:
    server = Server(FakeLedger(), Time(), {"each-key": {"day-tokens": 1}, "all": {"day-tokens": 5}})
    server.spending.note(Use(id="r", model="m", api="chat", at=NOON, output_tokens=4), None)
    await server.gate.check("")
    server.spending.note(Use(id="s", model="m", api="chat", at=NOON, output_tokens=1), None)
    with pytest.raises(BudgetSpent):
        await server.gate.check("")


@pytest.mark.parametrize(
    ("now", "day", "month"),
    [
        ("2026-11-30T23:59", "2026-12-01", "2026-12-01"),
        ("2026-12-31T00:00", "2027-01-01", "2027-01-01"),
        ("2028-02-28T12:00", "2028-02-29", "2028-03-01"),
    ],
)
def test_days_and_months_begin_at_midnight_of_utc(now: str, day: str, month: str) -> None:
    at = datetime.fromisoformat(f"{now}Z").timestamp()
    assert next_of("day", at) == datetime.fromisoformat(f"{day}T00:00Z")
    assert next_of("month", at) == datetime.fromisoformat(f"{month}T00:00Z")
    assert first_day("day", day_of(at)) == day_of(at)
    assert (first_day("month", day_of(at)) - 1) * DAY < at


# The file is read again


FILE = "[prices.m]\noutput = 1_000_000\n[budgets.key.ci]\nday-money = {most}\n"


def write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "accounts.toml"
    write(path, FILE.format(most=10))
    return path


async def test_file_that_is_read_again_raises_and_lowers_budgets_and_prices(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    books = Books(file, keys(), FakeLedger(), Time())
    ci = owner(CI)
    async with books.kept():
        assert books.cost(Use(id="a", owner=ci, key_name="ci", model="m", api="chat", at=NOON, output_tokens=8)) == 8.0
        await books.gate.check(ci)
        write(file, FILE.format(most=5))
        books.read_again()
        with pytest.raises(BudgetSpent):
            await books.gate.check(ci)
        write(file, "[budgets.key.ci]\nday-tokens = -1\n")
        books.read_again()
        with pytest.raises(BudgetSpent):
            await books.gate.check(ci)
        write(file, FILE.format(most=20).replace("1_000_000", "2_000_000"))
        books.read_again()
        await books.gate.check(ci)
        assert books.cost(Use(id="b", owner=ci, key_name="ci", model="m", api="chat", at=NOON, output_tokens=6)) == 12.0
        with pytest.raises(BudgetSpent):
            await books.gate.check(ci)
        write(file, "[prices.m]\n")
        books.read_again()
        await books.gate.check(ci)
        books.read_again()
    path = f"--accounts {file}"
    assert [record.message for record in caplog.records if record.name != LOGGER] == [
        "SIGHUP: the accounts were read again",
        "The budget of 5 USD of the day for key ci is spent: 8 USD were used",
        f"SIGHUP: the accounts stay as they were: {path}: budgets.key.ci.day-tokens: Input should be greater than 0",
        "SIGHUP: the accounts were read again",
        "The budget of 20 USD of the day for key ci is spent: 20 USD were used",
        "SIGHUP: the accounts were read again",
        "SIGHUP: the accounts were read again, and have not changed",
    ]


async def test_names_that_no_key_has_get_a_warning(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(file, "[budgets.key.cy]\nday-tokens = 1\n[budgets.team.x]\nday-tokens = 1\n")
    async with Books(file, keys(), FakeLedger(), Time()).kept():
        pass
    assert caplog.messages == [
        "budgets.key.cy: no API key has name=cy",
        "budgets.team.x: no API key has team=x",
    ]


async def test_store_that_cannot_be_read_refuses_nobody(file: Path) -> None:
    ledger = FakeLedger(problem=True)
    books = Books(file, keys(), ledger, Time())
    async with books.kept():
        await books.gate.check(owner(CI))
        books.cost(Use(id="a", owner=owner(CI), key_name="ci", model="m", api="chat", at=NOON, output_tokens=10))
        with pytest.raises(BudgetSpent):  # it counts what it has written itself
            await books.gate.check(owner(CI))
