"""Limits: a key never uses more than is said, and is never refused for longer than it takes to refill."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.limits.admission import Admission, _duration
from penstock.api.limits.allowance import Allowance, OwnAllowances
from penstock.api.limits.table import KeyLimits, UnusableLimits, read_limits
from penstock.pipeline.errors import LimitReached, StoreFailed, TokenLimitReached
from penstock.services.store.database import Statement
from penstock.services.store.store import Store
from penstock.services.store.writer import Writer
from tests.support.stores import open_store


@dataclass
class Time:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def admission(time: Time, name_of: Mapping[str, str] | None = None, **tables: KeyLimits) -> Admission:
    names = name_of or {}
    return Admission(None, OwnAllowances(time), lambda owner: names.get(owner, ""), tables, time)


async def admitted(admission: Admission, owner: str, requests: int) -> int:
    count = 0
    for _ in range(requests):
        try:
            await admission.admit(owner)
        except LimitReached:
            continue
        count += 1
    return count


@given(most=st.integers(1, 500), steps=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), max_size=20))
async def test_requests_of_a_key_are_those_that_have_refilled(most: int, steps: list[tuple[int, int]]) -> None:
    time = Time()
    limited = admission(time, default=KeyLimits(requests_per_minute=most))
    left, rate = float(most), most / 60
    for seconds, requests in steps:
        time.now += seconds
        left = min(most, left + seconds * rate)
        count = await admitted(limited, "a", requests)
        assert count <= left + 1e-6
        assert count >= min(requests, int(left * (1 - 1e-9)) - max(1, most * 0.05) - 1)  # taken in advance: not lost
        left -= count


async def test_refused_key_is_admitted_after_the_time_that_the_refusal_says() -> None:
    time = Time()
    limited = admission(time, default=KeyLimits(requests_per_minute=3))
    assert await admitted(limited, "a", 5) == 3
    with pytest.raises(LimitReached) as refused:
        await limited.admit("a")
    time.now += refused.value.seconds
    assert await admitted(limited, "a", 2) == 1


async def test_keys_have_their_own_limits_and_one_in_common() -> None:
    time = Time()
    tables = {
        "default": KeyLimits(requests_per_minute=2),
        "gold": KeyLimits(requests_per_minute=5),
        "all": KeyLimits(requests_per_minute=8),
    }
    limited = admission(time, {"a": "gold", "b": "unknown"}, **tables)
    assert [await admitted(limited, owner, 9) for owner in "abcd"] == [5, 2, 1, 0]


async def test_refused_request_costs_nothing_elsewhere() -> None:
    limited = admission(Time(), default=KeyLimits(requests_per_minute=1), all=KeyLimits(requests_per_minute=2))
    assert await admitted(limited, "a", 50) == 1
    assert await admitted(limited, "b", 50) == 1


SOME_AND_MANY = {"default": KeyLimits(requests_per_minute=20), "all": KeyLimits(requests_per_minute=1000)}


async def test_requests_of_one_moment_get_no_more_than_there_is(store: Store) -> None:
    limited = Admission(allowances=store.allowances, tables=SOME_AND_MANY)
    started = monotonic()
    answers = await asyncio.gather(*(limited.admit("a") for _ in range(100)), return_exceptions=True)
    refilled = (monotonic() - started) * 20 / 60
    assert 19 <= answers.count(None) <= 21 + refilled
    assert {type(answer) for answer in answers} == {type(None), LimitReached}


@pytest.mark.parametrize("steps", range(6))
async def test_requests_of_clients_that_leave_cost_nothing(store: Store, steps: int) -> None:
    limited = Admission(allowances=store.allowances, tables=SOME_AND_MANY)
    for _ in range(30):
        leaving = asyncio.create_task(limited.admit("a"))
        for _ in range(steps):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        if not leaving.cancelled():
            break
    else:
        assert await admitted(limited, "a", 100) >= 19


class LateAllowances(OwnAllowances):
    """Answers that take longer, the earlier they are asked for."""

    def __init__(self, turns: int) -> None:
        super().__init__(Time())
        self._turns = turns

    async def take(self, owner: str, kind: str, amount: float, most: float, seconds: float) -> tuple[bool, float]:
        answer = await super().take(owner, kind, amount, most, seconds)
        self._turns -= 10
        for _ in range(self._turns):
            await asyncio.sleep(0)
        return answer


@pytest.mark.parametrize("turns", [60, 200])
async def test_clients_that_leave_a_slow_store_cost_nothing(turns: int) -> None:
    """Their answers come when the next clients have asked, which must not take an old amount for the new one."""
    limited, left = Admission(allowances=LateAllowances(turns), tables=SOME_AND_MANY, clock=Time()), 0
    for _ in range(30):
        leaving = asyncio.create_task(limited.admit("a"))
        for _ in range(3):
            await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait({leaving})
        left += leaving.cancelled()
    assert await admitted(limited, "a", 100) == 20 - (30 - left)


async def test_servers_know_of_tokens_that_others_spent(store: Store) -> None:
    tables = {"default": KeyLimits(tokens_per_minute=4)}  # so that none refills meanwhile
    one, other = (Admission(allowances=store.allowances, tables=tables) for _ in range(2))
    await one.admit("a")
    one.end(EndedRun("a", 10**9))  # type: ignore[arg-type]
    for _ in range(2):
        with pytest.raises(TokenLimitReached):
            await one.admit("a")  # pays off what it can
    with pytest.raises(TokenLimitReached):
        await other.admit("a")


async def test_call_waits_until_seconds_of_sandboxes_have_refilled() -> None:
    skipped = Time()
    tables = {"default": KeyLimits(sandbox_seconds_per_minute=6000)}
    limited = Admission(tables=tables, clock=lambda: skipped.now + monotonic(), allowances=OwnAllowances(skipped))

    async def call(owner: str, seconds: float) -> None:
        async with limited.sandbox(owner):
            skipped.now += seconds

    await call("a", 6100)
    waiting = asyncio.create_task(call("a", 0))
    async with asyncio.timeout(120):
        await call("b", 0)
        assert not waiting.done()
        skipped.now += 3
        await waiting


@dataclass
class EndedRun:
    """The part of a run that its end is charged by."""

    owner: str
    tokens: int
    line: str = ""

    def __getattr__(self, name: str) -> Any:
        return self

    @property
    def total_tokens(self) -> int:
        return self.tokens

    @property
    def origin(self) -> EndedRun:
        return self


@given(used=st.integers(1, 100_000))
async def test_tokens_that_were_overrun_are_paid_off(used: int) -> None:
    time, most = Time(), 1000
    limited = admission(time, default=KeyLimits(tokens_per_minute=most))
    await limited.admit("a")
    limited.end(EndedRun("a", used))  # type: ignore[arg-type]
    if used > most:
        with pytest.raises(TokenLimitReached):
            await limited.admit("a")
    waited = 0
    while not await admitted(limited, "a", 1):
        time.now += 10
        waited += 10
        assert waited <= max(0, used - most) * 60 / most + 130  # seconds: and no longer
    assert waited >= (used - most) * 60 / most - 10


async def test_limits_of_a_new_file_hold_at_once(tmp_path: Path) -> None:
    file, time = tmp_path / "limits.toml", Time()
    file.write_text("[default]\nrequests_per_minute = 1\n")
    limited = Admission(file, OwnAllowances(time), clock=time)
    assert await admitted(limited, "a", 5) == 1
    file.write_text("[default]\nrequests_per_minute = 50\n")
    limited.tables = limited.read()
    time.now += 60
    assert await admitted(limited, "a", 100) == 50
    file.write_text("[default]\nrequest_per_minute = 50\n")
    with pytest.raises(UnusableLimits, match="request_per_minute"):
        limited.read()
    assert limited.of("a").requests_per_minute == 50


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[default]\nresponses = 0", "default.responses"),
        ("[default]\nresponses = true", "default.responses"),
        ("[default]\nresponses = 99999999999999999999", "default.responses"),
        ("[default]\nwait = 'soon'", "default.wait"),
        ("responses = 1", "responses"),
        ("[default", "Expected"),
        ("[default]\nweight = 'heavy'", "default.weight"),
    ],
)
def test_wrong_file_is_refused_with_the_place_of_the_mistake(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(UnusableLimits) as refused:
        read_limits(file)
    assert str(refused.value).startswith(f"--limits {file}: ")
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.1204, "121ms"), (1.0, "1s"), (7.66, "7.66s"), (360.0, "6m0s"), (61.5, "1m1.5s")],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert _duration(seconds) == text


async def test_servers_of_a_store_take_from_the_same_allowance(store_at: str) -> None:
    most = 40
    async with open_store(store_at) as one, open_store(store_at) as other:
        servers = [Allowance(store.allowances, "a", "requests", most) for store in (one, other)]
        begun = monotonic()
        used = [[await allowance.take(1.0) for allowance in servers] for _ in range(most)]
        refilled = (monotonic() - begun) * most / 60
        assert all(map(any, zip(*used, strict=True)))
        assert most - 1 <= sum(map(sum, used)) <= most + refilled + 1


async def test_amounts_of_the_store_refill(store: Store) -> None:
    taken, left = await store.allowances.take("a", "requests", 10, 10, 1e9)
    assert (taken, left < 0.1) == (True, True)
    assert (await store.allowances.take("a", "requests", 1, 10, 1e9))[0] is False
    taken, left = await store.allowances.take("a", "requests", 10, 10, 1e-9)  # it refills at once
    assert (taken, left <= 10) == (True, True)
    assert (await store.allowances.take("a", "requests", 11, 10, 1e-9))[0] is False


class Unreachable:
    async def take(self, owner: str, kind: str, amount: float, most: float, seconds: float) -> tuple[bool, float]:
        raise StoreFailed("The store cannot be reached.")


async def test_requests_are_admitted_while_the_store_cannot_be_reached() -> None:
    limited = Admission(None, Unreachable(), tables={"default": KeyLimits(requests_per_minute=1)})
    assert await admitted(limited, "a", 5) == 5


@pytest.mark.parametrize("kind", ["requests", "tokens"])
async def test_requests_during_an_outage_are_no_debt_after_it(kind: str) -> None:
    time = Time()
    limits = KeyLimits(requests_per_minute=2) if kind == "requests" else KeyLimits(tokens_per_minute=2)
    limited = Admission(None, Unreachable(), tables={"default": limits}, clock=time)
    for _ in range(500):
        await limited.admit("a")
        limited.end(EndedRun("a", 1))  # type: ignore[arg-type]
    for allowance in limited._known.values():
        allowance.allowances = OwnAllowances(time)
    time.now += 60
    assert await admitted(limited, "a", 1) == 1


@pytest.mark.parametrize("ahead", [0.1, 3600.0])
async def test_clock_that_is_set_back_blocks_no_key(store: Store, ahead: float) -> None:
    await store.allowances.take("a", "requests", 10, 10, 60)
    await store.context.writer.carry_out([Statement("update allowances set at = at + $1", (ahead,))])
    await store.allowances.take("a", "requests", 1, 10, 60)
    taken, left = await store.allowances.take("a", "requests", 9, 10, 60)
    assert (taken, left <= 10) == (ahead > 60, True)


async def test_requests_do_not_wait_for_a_store_that_is_away(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: object) -> None:
        raise AssertionError("the store is asked")

    tables = {"default": KeyLimits(requests_per_minute=1, tokens_per_minute=1, responses=1)}
    limited = Admission(allowances=store.allowances, reservations=store.reservations, tables=tables)
    monkeypatch.setattr(Writer, "is_degraded", True)
    monkeypatch.setattr(Writer, "carry_out", write)
    assert await admitted(limited, "a", 5) == 5
    async with limited.responding("a"):
        pass


@given(
    most=st.integers(1, 500),
    steps=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 40), st.integers(0, 300), st.booleans()), max_size=20),
)
async def test_forgetting_idle_keys_changes_no_verdict(most: int, steps: list[tuple[int, int, int, bool]]) -> None:
    time = Time()
    limits = KeyLimits(requests_per_minute=most, tokens_per_minute=10 * most)
    remembering, forgetting = (admission(time, default=limits, all=limits) for _ in range(2))
    for seconds, requests, tokens, forgets in steps:
        time.now += seconds
        if forgets:
            await forgetting.forget_idle()
        counts = []
        for each in (remembering, forgetting):
            counts.append(await admitted(each, "a", requests))
            each.end(EndedRun("a", tokens))  # type: ignore[arg-type]
        assert counts[0] == counts[1]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 90), st.sampled_from("abc"), st.integers(0, 40), st.integers(1, 50)), max_size=30
    )
)
async def test_amounts_without_a_store_are_known_until_they_have_refilled(
    steps: list[tuple[int, str, int, int]],
) -> None:
    time, known = Time(), dict[str, tuple[float, float]]()
    allowances = OwnAllowances(time)
    for seconds, owner, amount, most in steps:
        time.now += seconds
        level, at = known.get(owner, (most, time.now))
        level = min(most, level + (time.now - at) * most / 60)
        known[owner] = level - (amount if amount <= level else 0), time.now
        assert await allowances.take(owner, "requests", amount, most, 60) == (amount <= level, known[owner][0])
        assert {name for name, _ in allowances._levels} == {each for each in known if known[each][1] > time.now - 60}


@pytest.mark.io
@pytest.mark.slow
async def test_idle_keys_are_forgotten_once_all_has_refilled(store: Store) -> None:
    time = Time()
    limits = KeyLimits(requests_per_minute=10, tokens_per_minute=10, responses=2, background=2, stored_bytes=100_000)
    limited = admission(time, default=limits)
    for number in range(20):
        owner = f"key {number}"
        await limited.admit(owner)
        await limited.storing(owner, store)
        async with limited.responding(owner), limited.queueing(owner, store):
            await limited.forget_idle()
            assert (owner, "requests") in limited._known
            assert owner in limited._queueing
            assert (owner, "responses") in limited._slots
    time.now += 60
    for stored in limited._stored.values():
        stored._read_at -= 60
    await limited.forget_idle()
    assert (dict(limited._known), limited._stored, dict(limited._queueing)) == ({}, {}, {})
    async with asyncio.timeout(120):
        while limited._slots:  # a place is kept for a moment after its use
            await asyncio.sleep(0.01)
