"""The rules of the runner of batches: each line has one result, whatever happens to servers, store and batch."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.extensions.batches import line_runs, runner
from penstock.extensions.batches.batch import BatchError, LineAnswer, StoredBatch
from penstock.extensions.batches.runner import LineRequest
from penstock.pipeline.errors import InvalidRequest
from penstock.services.store.database import Database, DatabaseUnavailable, Unit
from penstock.services.store.store import Store
from tests.support.api_clients import wait_until
from tests.support.batches import (
    OWNER,
    Answers,
    a_batch,
    answer_of,
    batches_of,
    begun,
    contents,
    ended,
    found,
    lines,
    running_batches,
)
from tests.support.stored_responses import execute_sql, expire_heartbeat
from tests.support.stores import FaultyDatabase, database_at, open_store

pytestmark = [pytest.mark.io, pytest.mark.slow]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no test wait for pauses."""
    monkeypatch.setattr(runner, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(line_runs, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(line_runs, "RESTS", (0.02, 0.05))


def numbers(asked: list[LineRequest]) -> list[int]:
    return [int(each.id.rpartition(":")[2]) for each in asked]


async def test_each_line_gets_its_result_in_a_file(store: Store) -> None:
    def answer(line: LineRequest) -> LineAnswer:
        return answer_of(line, status=400 if line.id.endswith(":3") else 200, has_failed=line.id.endswith(":5"))

    answers = Answers(answer)
    batch = await begun(batches_of(store), 10, endpoint="/v1/responses", key_name="k", team="t")
    async with running_batches(store, answers):
        over = await ended(store, batch)
    assert (over.status, over.total, over.succeeded, over.errored) == ("completed", 10, 8, 2)
    assert (over.input_tokens, over.output_tokens) == (20, 30)
    assert await contents(store, over.output_file_id) == [
        f"line {n} succeeded" for n in range(1, 11) if n not in (3, 5)
    ]
    assert await contents(store, over.error_file_id) == ["line 3 errored", "line 5 errored"]
    assert answers.most <= 4
    first = min(answers.asked, key=lambda each: each.id)
    assert first == LineRequest(f"{batch.id}:1", OWNER, "k", "t", "/v1/responses", b'{"n": 1}')
    assert await batches_of(store).results(batch.id) == []


async def test_results_of_anthropic_stay_with_their_lines(store: Store) -> None:
    batch = await begun(batches_of(store), 3, api="anthropic", id="msgbatch_1")
    async with running_batches(store, Answers()):
        over = await ended(store, batch)
    assert (over.status, over.output_file_id) == ("completed", None)
    assert [line.number for line, _ in await batches_of(store).results(batch.id)] == [1, 2, 3]


async def test_two_servers_share_the_lines(store: Store, other: Store) -> None:
    batch = await begun(batches_of(store), 60)
    one, two = Answers(), Answers()
    async with running_batches(store, one), running_batches(other, two, name="other"):
        over = await ended(store, batch)
    assert over.succeeded == 60
    assert sorted(numbers(one.asked) + numbers(two.asked)) == list(range(1, 61))


async def test_line_of_a_dead_server_has_the_result_of_the_next(store: Store, other: Store) -> None:
    """The first server comes back with its answers, which are lost: the batch may have ended with others."""
    batch = await begun(batches_of(store), 4)
    held = Answers()
    held.free.clear()
    async with running_batches(store, held) as silent:
        await held.wait_for(4)
        await expire_heartbeat(other, "one")
        await batches_of(other).recover()
        async with running_batches(other, Answers(lambda line: answer_of(line, status=201)), name="other"):
            over = await ended(other, batch)
            held.free.set()
            await wait_until(lambda: not silent.lines.tasks)
            assert await found(other, batch) == over
    noted = await other.context.read("select id from ledger")
    assert over.succeeded == len(noted) == 4


async def test_lines_of_a_server_that_stops_run_elsewhere(store: Store, other: Store) -> None:
    batch = await begun(batches_of(store), 4)
    held = Answers()
    held.free.clear()
    async with running_batches(store, held):
        await held.wait_for(4)
    async with running_batches(other, Answers(), name="other"):
        assert (await ended(other, batch)).succeeded == 4


async def test_no_answer_counts_once_the_server_stops(store: Store) -> None:
    """The engine may have ended it early, as that of a response which `Scheduler.drain` interrupts."""
    batch = await begun(batches_of(store), 1)
    held = Answers()
    held.free.clear()
    async with running_batches(store, held) as running:
        await held.wait_for(1)
        running.scheduler.in_flight.stopping = True
        held.free.set()
        await wait_until(lambda: not running.lines.tasks)
        assert await batches_of(store).results(batch.id) == []


async def test_outage_loses_no_result(store_at: str) -> None:
    database = FaultyDatabase(database_at(store_at))
    store = Store(database)
    await store.open()
    batch, held = await begun(batches_of(store), 8), Answers()
    held.free.clear()
    async with running_batches(store, held):
        await held.wait_for(4)
        database.is_down = True
        held.free.set()
        await wait_until(lambda: not held.running)
        await asyncio.sleep(0.2)
        assert len(held.asked) == 4  # nothing begins meanwhile
        database.is_down = False
        assert (await ended(store, batch)).succeeded == 8
    assert sorted(numbers(held.asked)) == list(range(1, 9))
    await store.close()


class Doubtful(FaultyDatabase):
    """A database that loses the connection after the first commit of each change of a batch or line."""

    def __init__(self, inner: Database) -> None:
        super().__init__(inner)
        self.known: set[tuple[Any, ...]] = set()

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts = await super().write(units)
        changes = {(each.sql, *each.arguments[:2]) for unit in units for each in unit.statements if "batch" in each.sql}
        fresh = changes - self.known
        self.known |= fresh
        if fresh:
            raise DatabaseUnavailable("The connection was lost.")
        return counts


async def test_commits_of_unknown_outcome_lose_and_double_nothing(store_at: str) -> None:
    async with open_store(store_at) as store:
        batch = await begun(batches_of(store), 12)
    doubtful = Store(Doubtful(database_at(store_at)))
    await doubtful.open()
    answers = Answers()
    async with running_batches(doubtful, answers):
        over = await ended(doubtful, batch)
    assert (over.status, over.succeeded, over.total) == ("completed", 12, 12)
    assert sorted(numbers(answers.asked)) == list(range(1, 13))
    assert len(await contents(doubtful, over.output_file_id)) == 12
    assert len(await doubtful.context.read("select id from ledger")) == 12
    assert len(await doubtful.context.read("select id from files")) == 1
    await doubtful.close()


@pytest.mark.parametrize("change", ["cancel", "expire"])
async def test_batch_ends_early_with_a_result_for_each_line(store: Store, change: str) -> None:
    batch = await begun(batches_of(store), 10)
    held = Answers()
    held.free.clear()
    async with running_batches(store, held) as running:
        await held.wait_for(4)
        if change == "cancel":
            await batches_of(store).cancel(batch.id, OWNER)
        else:
            await execute_sql(store, f"update batches set expires_at = {time.time()}")
        running.wake()
        await wait_for_results(store, batch, 6)
        held.free.set()
        over = await ended(store, batch)
    kind = "cancelled" if change == "cancel" else "expired"
    assert (over.status, over.succeeded, getattr(over, kind), len(held.asked)) == (kind, 4, 6, 4)
    assert len(await contents(store, over.error_file_id)) == 6
    assert getattr(over, f"{kind}_at") is not None


async def test_line_that_runs_for_too_long_is_cut_off(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LAST_SECONDS", 0.0)
    batch, held = await begun(batches_of(store), 2), Answers()
    held.free.clear()
    async with running_batches(store, held) as running:
        await held.wait_for(2)
        await batches_of(store).cancel(batch.id, OWNER)
        running.wake()
        over = await ended(store, batch)
    assert (over.cancelled, over.succeeded) == (2, 0)


async def test_batch_is_validated_by_one_server_after_another(store: Store, other: Store) -> None:
    batch, at = a_batch(), asyncio.Event()

    async def hangs(one: StoredBatch) -> None:
        await batches_of(store).add_lines(one.id, lines(2))
        at.set()
        await asyncio.Event().wait()

    async def validates(one: StoredBatch) -> None:
        await batches_of(other).add_lines(one.id, lines(3))
        await batches_of(other).begin(one.id)

    await batches_of(store).create(batch)
    async with running_batches(store, Answers(), validate=hangs):
        await at.wait()
        async with running_batches(other, Answers(), validate=validates, name="other"):
            await expire_heartbeat(other, "one")
            await batches_of(other).recover()
            over = await ended(other, batch)
    assert (over.total, over.succeeded) == (3, 3)


async def test_batch_whose_validation_has_a_bug_fails(store: Store) -> None:
    async def broken(_: StoredBatch) -> None:
        raise ValueError

    batch = a_batch()
    await batches_of(store).create(batch)
    async with running_batches(store, Answers(), validate=broken):
        over = await ended(store, batch)
    assert (over.status, over.errors) == ("failed", (BatchError("server_error", "Internal error."),))


async def test_cancelled_validation_ends_without_lines(store: Store) -> None:
    batch, at = a_batch(), asyncio.Event()

    async def slow(one: StoredBatch) -> None:
        for _ in range(10_000):
            await batches_of(store).add_lines(one.id, lines(3))
            at.set()
            await asyncio.sleep(0.01)

    await batches_of(store).create(batch)
    async with running_batches(store, Answers(), validate=slow):
        await at.wait()
        await batches_of(store).cancel(batch.id, OWNER)
        over = await ended(store, batch)
    assert (over.status, over.total, over.cancelled, over.error_file_id) == ("cancelled", 0, 0, None)


async def test_batch_of_anthropic_that_could_not_be_created_is_deleted(store: Store) -> None:
    """A request adds its lines; if the store fails it, and the undoing as well, the server goes on with that."""
    batch = a_batch(api="anthropic", id="msgbatch_1")
    async with running_batches(store, Answers()) as running:
        running.works.creating.add(batch.id)
        await batches_of(store).create(batch)
        await batches_of(store).add_lines(batch.id, lines(3))
        await asyncio.sleep(0.2)
        assert [each.batch.id for each in await batches_of(store).look()] == [batch.id]
        running.works.creating.discard(batch.id)
        while await batches_of(store).look():
            await asyncio.sleep(0.01)
    assert await store.context.read("select 1 from batch_lines") == []


async def test_places_are_shared_by_weight(store: Store) -> None:
    limits = {"default": KeyLimits(), "heavy": KeyLimits(weight=3)}
    admission = Admission(tables=limits, name_of=lambda owner: "heavy" if owner == "bob" else "default")
    for owner in (OWNER, "bob"):
        await begun(batches_of(store), 40, owner=owner)
    held = Answers()
    held.free.clear()
    async with running_batches(store, held, places=8, admission=admission):
        await held.wait_for(8)
        assert Counter(each.owner for each in held.asked) == {"bob": 6, OWNER: 2}


async def test_lines_that_share_a_prefix_run_together(store: Store) -> None:
    batch = a_batch()
    await batches_of(store).create(batch)
    await batches_of(store).add_lines(batch.id, [each._replace(prefix="ab"[each.number % 2]) for each in lines(6)])
    await batches_of(store).begin(batch.id)
    answers = Answers()
    async with running_batches(store, answers, places=1):
        await ended(store, batch)
    assert numbers(answers.asked) == [2, 4, 6, 1, 3, 5]


async def test_error_that_may_pass_is_no_result(store: Store) -> None:
    fails = {1, 2, 3}

    def answer(line: LineRequest) -> LineAnswer:
        number = numbers([line])[0]
        return answer_of(line, status=503, may_pass=True) if fails & {number} else answer_of(line)

    answers = Answers(answer)
    batch = await begun(batches_of(store), 6)
    async with running_batches(store, answers):
        await answers.wait_for(6)
        fails.clear()
        assert (await ended(store, batch)).succeeded == 6


async def test_error_that_never_passes_is_the_result(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_runs, "ATTEMPTS", 3)
    batch = await begun(batches_of(store), 1)
    answers = Answers(lambda line: answer_of(line, status=503, may_pass=True))
    async with running_batches(store, answers):
        assert (await ended(store, batch)).errored == 1
    assert len(answers.asked) == 3


@pytest.mark.parametrize(("dies", "asked"), [(True, 2), (False, 4)])
async def test_line_that_an_engine_may_die_of_runs_a_few_times(
    store: Store, monkeypatch: pytest.MonkeyPatch, dies: bool, asked: int
) -> None:
    monkeypatch.setattr(line_runs, "DEATHS", 2)
    monkeypatch.setattr(line_runs, "ATTEMPTS", 4)

    def answer(line: LineRequest) -> LineAnswer:
        engine.is_alive = not dies
        asyncio.get_running_loop().call_soon(setattr, engine, "is_alive", True)
        return answer_of(line, status=500, has_failed=True, may_pass=True)

    batch, answers = await begun(batches_of(store), 1), Answers(answer)
    async with running_batches(store, answers) as running:
        engine: Any = running.scheduler.engine
        assert (await ended(store, batch)).errored == 1
    assert len(answers.asked) == asked


async def test_bug_in_an_answer_ends_no_other_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_runs, "ATTEMPTS", 2)

    def answer(line: LineRequest) -> LineAnswer:
        if numbers([line]) == [2]:
            raise ValueError
        return answer_of(line)

    batch = await begun(batches_of(store), 4)
    async with running_batches(store, Answers(answer)):
        over = await ended(store, batch)
    assert (over.succeeded, over.errored) == (3, 1)


class Shut:
    """A gate that a test opens."""

    is_open = False

    async def check(self, owner: str) -> None:
        if not self.is_open and owner == OWNER:
            raise InvalidRequest("The budget is used up.")

    def headers(self, owner: str) -> dict[str, str]:
        return {}


async def test_lines_of_an_owner_without_a_budget_wait(store: Store) -> None:
    gate, answers = Shut(), Answers()
    batch, others = await begun(batches_of(store), 3), await begun(batches_of(store), 3, owner="bob")
    async with running_batches(store, answers, admission=Admission(gates=[gate])):
        await ended(store, others)
        assert {each.owner for each in answers.asked} == {"bob"}
        gate.is_open = True
        await ended(store, batch)


async def test_lines_of_a_revoked_key_wait(store: Store) -> None:
    keys = Keys(given=["k" * 40])
    (key,) = keys.own
    answers, batch = Answers(), await begun(batches_of(store), 3, owner=key.digest)
    async with running_batches(store, answers) as running:
        running.keys = keys
        await ended(store, batch)
        keys.take([])
        again, bobs = [await begun(batches_of(store), 3, owner=key.digest) for _ in range(2)]
        await asyncio.sleep(0.3)
        assert len(answers.asked) == 3
        keys.take([key])
        await asyncio.gather(ended(store, again), ended(store, bobs))


class NoTokens:
    """A way to sign in by which nobody is signed in now."""

    async def key_of(self, token: str) -> None:
        """Return None: no text is a token."""

    def known(self, owner: str) -> None:
        """Return None: no owner has a token now."""


async def test_lines_of_a_revoked_key_wait_beside_those_of_owners_who_signed_in(store: Store) -> None:
    keys, revoked, signed = Keys(given=["k" * 40]), "a" * 64, "b" * 64
    keys.sign_in, keys.remembered = NoTokens(), {signed: "name=bob"}.get
    lost, held = [await begun(batches_of(store), 1, owner=owner) for owner in (revoked, signed)]
    answers = Answers()
    async with running_batches(store, answers) as running:
        running.keys = keys
        await ended(store, held)
        await asyncio.sleep(0.3)
    assert [line.owner for line in answers.asked] == [signed]
    assert await batches_of(store).get(lost.id, revoked)


async def test_lines_of_models_that_are_served_elsewhere_wait(store: Store) -> None:
    batch = a_batch()
    new = [each._replace(model=("tiny", "other", "")[each.number % 3]) for each in lines(6)]
    await batches_of(store).create(batch)
    await batches_of(store).add_lines(batch.id, new)
    await batches_of(store).begin(batch.id)
    answers = Answers()
    async with running_batches(store, answers):
        await answers.wait_for(4)
        await asyncio.sleep(0.3)
    assert sorted(numbers(answers.asked)) == [2, 3, 5, 6]


async def test_line_beside_a_model_without_room_is_found_once(store: Store) -> None:
    batch = a_batch()
    new = [each._replace(model=model) for each, model in zip(lines(3), ("tiny", "other", ""), strict=True)]
    await batches_of(store).create(batch)
    await batches_of(store).add_lines(batch.id, new)
    await batches_of(store).begin(batch.id)
    answers = Answers()
    answers.free.clear()
    async with running_batches(store, answers) as running:
        await answers.wait_for(2)
        await wait_until(lambda: running.places.held == {OWNER: 2})


async def test_lines_wait_while_the_engine_is_down(store: Store) -> None:
    batch, answers = await begun(batches_of(store), 1), Answers()
    async with running_batches(store, answers) as running:
        await ended(store, batch)
        running.scheduler.engine.is_alive = False  # type: ignore[misc]
        again = await begun(batches_of(store), 1)
        await asyncio.sleep(0.3)
        assert len(answers.asked) == 1
        running.scheduler.engine.is_alive = True  # type: ignore[misc]
        await ended(store, again)


async def wait_for_results(store: Store, batch: StoredBatch, number: int) -> None:
    async with asyncio.timeout(60):
        while len(await batches_of(store).results(batch.id)) < number:
            await asyncio.sleep(0.02)
