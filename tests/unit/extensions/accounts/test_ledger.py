"""The ledger: each use counts once, whatever ends, dies, is repeated or is added up meanwhile."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import add
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

from penstock.extensions.accounts.ledger import AT_ONCE, HOUR, Ledger, Sum
from penstock.pipeline.errors import RunInterrupted, StoreFailed
from penstock.pipeline.frames import Origin
from penstock.pipeline.protocol.response import InputTokensDetails, OutputTokensDetails, Response, Usage
from penstock.services.runs.run import RunRegistry
from penstock.services.store.database import Database, DatabaseUnavailable, NullDatabase, Row, Unit, Value
from penstock.services.store.store import Store
from penstock.services.store.writer import LIMIT
from penstock.services.use import Use
from tests.support.api_clients import PATIENCE
from tests.support.stored_responses import begun_response, expire_heartbeats, stored_response
from tests.support.stores import database_at, open_store

T = TypeVar("T")

EVER = 10.0**10

TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


def use(number: int, *, at: float | None = None, **fields: Any) -> Use:
    counts = {name: number * (place + 1) for place, name in enumerate(TOKENS)}
    named = {
        "owner": f"owner{number % 3}",
        "key_name": f"key{number % 3}",
        "team": "red",
        "model": f"model{number % 2}",
    }
    tools = {"tool_seconds": 0.5 * (number % 2), "searches": number % 4, "images": number % 5}
    given: dict[str, Any] = {"api": "chat", **named, **counts, **tools, "at": time.time() if at is None else at}
    return Use(id=f"use_{number}", **(given | fields))


def sum_of(uses: Sequence[Use]) -> Sum:
    counted: dict[str, Any] = {
        name: sum(getattr(each, name) for each in uses) for name in (*TOKENS, "searches", "images")
    }
    return Sum(requests=len(uses), tool_seconds=sum(each.tool_seconds for each in uses), **counted)


async def total(store: Store, **where: Any) -> Sum:
    found = await store.part(Ledger).sums(0, EVER, where=where)
    return reduce(add, found, Sum())


async def rows(store: Store) -> tuple[int, int]:
    """Return the number of rows of the uses, and of the sums."""
    tables = ("ledger", "ledger_hours")
    first, second = [(await store.context.read(f"select count(*) from {table}"))[0][0] for table in tables]
    return int(first), int(second)


async def note(store: Store, each: Use) -> None:
    noted = store.used(each)
    assert noted is not None
    await noted


async def test_uses_of_hours_that_are_over_become_sums(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)  # the hour does not end meanwhile
    uses = [use(number, at=now - HOUR * (number % 4)) for number in range(1, 41)]
    for each in uses:
        await note(store, each)
    assert await rows(store) == (40, 0)
    assert await total(store) == sum_of(uses)
    await store.part(Ledger).sweep()
    left, sums = await rows(store)
    assert left == sum(int(each.at // HOUR) == int(now // HOUR) for each in uses)
    assert sums == len({(each.at, each.owner, each.model) for each in uses if each.at != now})
    assert await total(store) == sum_of(uses)
    await store.part(Ledger).sweep()
    assert await rows(store) == (left, sums)


@pytest.mark.parametrize("word", ["team", "owner", "key_name", "model", "api", "is_line"])
async def test_sums_are_grouped_and_chosen_by_each_column(store: Store, word: str) -> None:
    now = time.time()
    apart = {"team": "blue", "api": "messages", "is_line": True}
    uses = [use(number, at=now - HOUR * (number % 2), **(apart if number % 3 else {})) for number in range(1, 13)]
    for each in uses:
        await note(store, each)
    await store.part(Ledger).sweep()
    values = sorted({getattr(each, word) for each in uses})
    assert len(values) > 1
    expected = {value: sum_of([each for each in uses if getattr(each, word) == value]) for value in values}
    found = await store.part(Ledger).sums(0, EVER, [word])
    assert {getattr(one, word): one for one in found} == {
        value: replace(one, **{word: value}) for value, one in expected.items()
    }
    for value in values:
        assert await total(store, **{word: [value]}) == expected[value]
    assert await total(store, **{word: values}) == sum_of(uses)
    assert await total(store, **{word: []}) == Sum()


FIRST_OF_DECEMBER = 1_796_083_200


@pytest.mark.parametrize(
    ("word", "starts"),
    [
        ("hour", (FIRST_OF_DECEMBER - HOUR, FIRST_OF_DECEMBER, FIRST_OF_DECEMBER + 30 * HOUR)),
        ("day", (FIRST_OF_DECEMBER - 24 * HOUR, FIRST_OF_DECEMBER, FIRST_OF_DECEMBER + 24 * HOUR)),
        ("month", (FIRST_OF_DECEMBER - 30 * 24 * HOUR, FIRST_OF_DECEMBER)),
    ],
)
@pytest.mark.parametrize("is_swept", [False, True])
async def test_sums_have_times_of_utc(
    store: Store, monkeypatch: pytest.MonkeyPatch, word: str, starts: Sequence[int], *, is_swept: bool
) -> None:
    ledger = store.part(Ledger)
    for number, seconds in enumerate((-1, 0, 30 * HOUR + 59)):
        await note(store, use(number, at=FIRST_OF_DECEMBER + seconds))
    if is_swept:
        monkeypatch.setattr(time, "time", lambda: FIRST_OF_DECEMBER + 60.0 * HOUR)
        await ledger.sweep()
        assert await rows(store) == (0, 3)
    assert tuple(one.at for one in await ledger.sums(0, EVER, [word])) == starts
    assert sum(one.requests for one in await ledger.sums(FIRST_OF_DECEMBER, EVER, [word])) == 2
    assert sum(one.requests for one in await ledger.sums(0, FIRST_OF_DECEMBER, [word])) == 1


class ByToken:
    """Prices by the number of tokens read; those of an unknown model have none."""

    currency = "USD"

    def cost(self, use: Use) -> float | None:
        return use.input_tokens / 4 if use.model == "model1" else None


async def test_costs_are_those_of_the_time_and_unknown_prices_cost_nothing(store: Store) -> None:
    ledger = store.part(Ledger)
    before = time.time() - HOUR
    await note(store, use(1, at=before))
    ledger.prices = ByToken()
    for number in (2, 3, 5, 7):
        await note(store, use(number, at=before))
    ledger.prices = None
    for _ in range(2):
        found = {one.model: one.cost for one in await ledger.sums(0, EVER, ["model"])}
        assert found == {"model0": None, "model1": (3 + 5 + 7) / 4}
        assert (await total(store)).cost == (3 + 5 + 7) / 4
        await ledger.sweep()
    ledger.prices = ByToken()
    await note(store, use(9, at=before))
    await ledger.sweep()
    assert (await total(store)).cost == (3 + 5 + 7 + 9) / 4


async def test_sums_are_kept_for_a_time_and_with_none_nothing_is_written(store: Store) -> None:
    ledger, now = store.part(Ledger), time.time()
    for number, hours in enumerate((0, 1, 5, 50, 500)):
        await note(store, use(number, at=now - hours * HOUR))
    ledger.keep = 6.0 * HOUR
    await ledger.sweep()
    assert (await total(store)).requests == 3
    ledger.keep = 0.0
    assert store.used(use(9)) is None
    assert (await total(store)).requests == 3


async def test_nothing_is_noted_where_nothing_is_kept() -> None:
    store = Store(NullDatabase(), keeps=False)
    await store.open()
    assert store.used(use(1)) is None
    assert await store.part(Ledger).sums(0, EVER) == []
    await store.part(Ledger).sweep()
    await store.close()


async def test_use_is_lost_with_a_word_if_too_much_waits_already(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(store.writer, "backlog", LIMIT + 1)
        assert [store.used(use(number)) for number in range(3)] == [None] * 3
    assert "The use of an answer that is not stored is lost: The store cannot keep up" in caplog.text
    assert len(caplog.records) == 1
    await note(store, use(4))
    assert await total(store) == sum_of([use(4)])


async def test_sweep_takes_rows_in_steps(store: Store) -> None:
    before = time.time() - HOUR
    uses = [use(number, at=before) for number in range(2 * AT_ONCE)]
    for each in uses:
        store.used(each)
    await store.part(Ledger).sweep()
    assert await rows(store) == (0, 6)
    assert await total(store) == sum_of(uses)


async def test_line_whose_server_has_died_counts_with_its_result_alone(store: Store, other: Store) -> None:
    for line in ("", "batch_1:7"):
        begun = begun_response(stored_response(f"resp_{len(line)}"))
        await store.begin(replace(begun, origin=Origin("ann", line=line)))
    await expire_heartbeats(store)
    for orphan in await other.orphans():
        assert await other.claim(orphan)
        RunRegistry(other).adopt(orphan.stored, ()).fail(RunInterrupted())
    assert (await total(other)).requests == 1


async def test_texts_that_no_database_accepts_are_noted(store: Store) -> None:
    await note(store, use(1, model="a\0b\ud800", team="\0"))
    ((found,),) = [await store.part(Ledger).sums(0, EVER, ["model", "team"])]
    assert (found.model, found.team) == ("a\\0b\\ud800", "\\0")


# Schedules


@dataclass
class UnsureDatabase:
    """A database that commits some writes, and then loses the connection before it says so."""

    inner: Database
    chance: random.Random
    share: float = 0.0
    lost: int = 0

    async def open(self) -> None:
        await self.inner.open()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts = await self.inner.write(units)
        if self.chance.random() < self.share:
            self.lost += 1
            raise DatabaseUnavailable("The connection was lost.")
        return counts

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        return await self.inner.read(sql, *arguments)

    async def size(self) -> int:
        return await self.inner.size()

    async def close(self) -> None:
        await self.inner.close()


@dataclass
class World:
    """Servers that share a store, whose responses end, and that die and come back as zombies."""

    store_at: str
    chance: random.Random
    servers: list[Store] = field(default_factory=list)
    dead: list[Store] = field(default_factory=list)
    running: dict[str, Store] = field(default_factory=dict)
    unstored: list[Use] = field(default_factory=list)
    number: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    async def start(self) -> None:
        # Writes come in groups of any size: if they took from the numbers of the steps, no schedule would come again.
        unsure = UnsureDatabase(database_at(self.store_at), random.Random(self.number), 0.2)
        store = Store(unsure, stale=1000.0)
        await store.open()
        self.servers.append(store)
        await settled(partial(store.servers.join, f"http://server{self.fresh()}"))

    def fresh(self) -> int:
        self.number += 1
        return self.number

    def begin(self, store: Store) -> None:
        response_id = f"resp_{self.fresh()}"
        store.begin(stored_response(response_id))
        self.running[response_id] = store

    def end(self, store: Store, response_id: str) -> None:
        number = self.fresh()
        used = use(number, at=self.at())
        usage = Usage(
            input_tokens=used.input_tokens,
            input_tokens_details=InputTokensDetails(used.cached_tokens),
            output_tokens=used.output_tokens,
            output_tokens_details=OutputTokensDetails(used.reasoning_tokens),
            total_tokens=used.input_tokens + used.output_tokens,
        )
        stored = stored_response(response_id)
        stored = replace(stored, response=replace(stored.response, usage=usage))
        store.end(stored, None, lambda: replace(used, id=response_id))

    def at(self) -> float:
        return time.time() - self.chance.choice((0, 0, HOUR, 3 * HOUR, 30 * HOUR))

    async def step(self) -> None:
        store = self.chance.choice(self.servers)
        step = self.chance.choice(
            ("begin", "begin", "end", "end", "use", "use", "sweep", "sweep", "both", "kill", "zombie", "wait")
        )
        self.seen[step] += 1
        match step:
            case "begin":
                self.begin(store)
            case "end" if mine := [name for name, runner in self.running.items() if runner is store]:
                name = self.chance.choice(mine)
                del self.running[name]
                self.end(store, name)
            case "use":
                each = use(self.fresh(), at=self.at())
                self.unstored.append(each)
                store.used(each)
            case "sweep":
                await self.swept(store)
            case "both":
                await asyncio.gather(*map(self.swept, self.servers))
            case "kill" if len(self.servers) > 1:
                await self.kill(store)
            case "zombie" if self.dead:
                self.zombie()
            case _:
                await asyncio.sleep(0)

    async def swept(self, store: Store) -> None:
        with suppress(StoreFailed):
            await store.part(Ledger).sweep()

    async def kill(self, store: Store) -> None:
        """Let a server look dead, once what it has queued is written, and another one take over its responses."""
        await store.writer.flushed()
        self.servers.remove(store)
        self.dead.append(store)
        await settled(store.servers.leave)
        other = self.chance.choice(self.servers)
        found = await other.orphans(restarts=False)
        for orphan in found:
            name = orphan.stored.response.id
            if await settled(partial(other.claim, orphan)):
                del self.running[name]
                self.end(other, name)
                self.seen["taken over"] += 1

    def zombie(self) -> None:
        """Let a server that seemed dead end a response that another has taken over, or has ended itself."""
        store = self.chance.choice(self.dead)
        names = [f"resp_{number}" for number in range(self.number + 1) if f"resp_{number}" not in self.running]
        self.end(store, self.chance.choice(names))

    async def stop(self) -> None:
        for store in (*self.servers, *self.dead):
            database = store.context.database
            assert isinstance(database, UnsureDatabase)
            database.share = 0.0
            self.seen["lost"] += database.lost
            await store.writer.flushed()


@asynccontextmanager
async def opened_world(store_at: str, seed: int) -> AsyncIterator[World]:
    world = World(store_at, random.Random(seed))
    try:
        for _ in range(3):
            await world.start()
        yield world
    finally:
        for store in (*world.servers, *world.dead):
            await store.close()


async def settled(write: Callable[[], Awaitable[T]]) -> T:
    """Repeat a write until its outcome is known."""
    while True:
        with suppress(StoreFailed):
            return await write()


async def check(world: World) -> None:
    """The sums are those of what the ended responses say, and of the rest, once each."""
    async with open_store(world.store_at) as store:
        ended = await store.context.read("select response from responses where ended_at is not null")
        expected = sum_of(world.unstored)
        for (text,) in ended:
            usage = msgspec.json.decode(text, type=Response).usage
            assert usage
            expected += Sum(
                requests=1,
                input_tokens=usage.input_tokens,
                cached_tokens=usage.input_tokens_details.cached_tokens,
                output_tokens=usage.output_tokens,
                reasoning_tokens=usage.output_tokens_details.reasoning_tokens,
            )
        found = await total(store)
        tools = {"tool_seconds": 0.0, "searches": 0, "images": 0}  # the responses do not say them
        assert replace(found, **tools) == replace(expected, **tools)


@pytest.mark.parametrize("seed", range(6))
async def test_sums_are_those_of_all_answers_after_any_schedule(
    store_at: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.services.store.writer.PAUSES", (0.0, 0.0))
    monkeypatch.setattr("penstock.services.store.writer.READ_WAIT", PATIENCE)
    async with opened_world(store_at, seed) as world:
        for _ in range(150):
            await world.step()
            if len(world.servers) < 3 and world.chance.random() < 0.2:
                await world.start()
        await world.stop()
        await check(world)
        for store in world.servers:
            await store.part(Ledger).sweep()
        await check(world)
        assert world.seen["taken over"]
        assert world.seen["lost"]
