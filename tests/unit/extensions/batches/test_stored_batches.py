"""The rules of the store of batches: each line has exactly one result, whatever servers and commits do."""

from __future__ import annotations

import asyncio
import time
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.extensions.batches.batch import BatchError, LineResult, NewLine, StoredBatch, StoredLine
from penstock.extensions.batches.errors import GivenUp
from penstock.extensions.batches.room import Bounds
from penstock.extensions.batches.stored_batches import Candidate, ClaimedLine, StoredBatches
from penstock.pipeline.errors import LimitReached
from penstock.services.store.store import Store
from penstock.services.use import Use
from tests.support.batches import OWNER, a_batch, batches_of, begun, found, lines
from tests.support.stored_responses import expire_heartbeat
from tests.support.stores import open_store

DONE = LineResult("succeeded", 200, "req_1", b'{"answer": 42}')


async def claimed(stored: StoredBatches, batch: StoredBatch, most: int = 10) -> list[ClaimedLine]:
    waiting = await stored.waiting(batch, most)
    return await stored.claim([Candidate(batch, number) for number, _ in waiting])


async def test_batch_is_read_as_it_was_created(store: Store) -> None:
    batch = a_batch(
        metadata={"a": "\udc00"}, model="m\0", input_file_id="file-1", output_expires_after=3600, key_name="k", team="t"
    )
    await batches_of(store).create(batch)
    read = await found(store, batch)
    assert read == replace(batch, model=read.model)
    assert await batches_of(store).get(batch.id, "bob") is None
    assert await batches_of(store).get("\0", OWNER) is None


async def test_lines_are_claimed_in_order_of_their_prefixes(store: Store) -> None:
    batch = a_batch()
    await batches_of(store).create(batch)
    new = [NewLine(n, str(n), b"{}", prefix="ab"[n % 2]) for n in range(1, 7)]
    await batches_of(store).add_lines(batch.id, new)
    await batches_of(store).begin(batch.id)
    assert [number for number, _ in await batches_of(store).waiting(batch, 10)] == [2, 4, 6, 1, 3, 5]


async def test_line_is_claimed_by_one_server(store: Store, other: Store) -> None:
    batch = await begun(batches_of(store), 20)
    await asyncio.gather(store.servers.join("one"), other.servers.join("other"))
    both = await asyncio.gather(*(claimed(batches_of(each), batch, 20) for each in (store, other)))
    numbers = [each.line.number for some in both for each in some]
    assert sorted(numbers) == list(range(1, 21))
    assert both[0] or both[1]


async def test_claim_of_unknown_outcome_may_be_repeated(store: Store) -> None:
    batch = await begun(batches_of(store), 2)
    candidates = [Candidate(batch, 1), Candidate(batch, 2)]
    first = await batches_of(store).claim(candidates)
    await batches_of(store).cancel(batch.id, OWNER)
    again = await batches_of(store).claim(candidates)
    assert [each.line for each in first] == [each.line for each in again]


async def test_claimed_line_has_its_request(store: Store) -> None:
    batch = await begun(batches_of(store), 1)
    (line,) = await claimed(batches_of(store), batch)
    assert (line.line, line.body, line.attempts) == (StoredLine(batch.id, 1, "line 1"), b'{"n": 1}', 1)


async def test_line_has_one_result(store: Store) -> None:
    batch = await begun(batches_of(store), 1)
    (line,) = await claimed(batches_of(store), batch)
    assert await batches_of(store).finish(line.line, DONE, None, ())
    assert not await batches_of(store).finish(line.line, LineResult("errored", 500), None, ())
    assert await batches_of(store).results(batch.id) == [(line.line, DONE)]
    assert await claimed(batches_of(store), batch) == []


async def test_use_is_noted_once_with_the_result(store: Store, other: Store) -> None:
    """A server that seemed dead must not note what its lost answer has used."""
    batch = await begun(batches_of(store), 1)
    await asyncio.gather(store.servers.join("one"), other.servers.join("other"))
    (line,) = await claimed(batches_of(store), batch)
    await expire_heartbeat(other, "one")
    await batches_of(other).recover()
    (taken,) = await claimed(batches_of(other), batch)
    slow, quick = (Use(id=line.line.id, model="m", api="chat", output_tokens=tokens, is_line=True) for tokens in (7, 9))
    assert not await batches_of(store).finish(line.line, DONE, slow, store.statements_of(slow))
    assert await batches_of(other).finish(taken.line, DONE, quick, other.statements_of(quick))
    assert not await batches_of(store).finish(line.line, DONE, slow, store.statements_of(slow))
    noted = await store.context.read("select output_tokens from ledger where id = $1", line.line.id)
    assert [tokens for (tokens,) in noted] == [9]


async def test_lines_of_a_dead_server_wait_again(store: Store, other: Store) -> None:
    batch = await begun(batches_of(store), 3)
    await asyncio.gather(store.servers.join("one"), other.servers.join("other"))
    first, *_ = await claimed(batches_of(store), batch)
    await batches_of(store).finish(first.line, DONE, None, ())
    assert await claimed(batches_of(other), batch) == []
    await batches_of(other).recover()
    assert await claimed(batches_of(other), batch) == []
    await expire_heartbeat(other, "one")
    await batches_of(other).recover()
    again = await claimed(batches_of(other), batch)
    assert [(each.line.number, each.attempts) for each in again] == [(2, 11), (3, 11)]


async def test_lines_of_a_server_that_stops_wait_again(store: Store, other: Store) -> None:
    batch = await begun(batches_of(store), 2)
    await claimed(batches_of(store), batch)
    await batches_of(store).release_all()
    assert [each.attempts for each in await claimed(batches_of(other), batch)] == [1, 1]


@pytest.mark.parametrize("change", ["cancel", "expire"])
async def test_no_line_begins_after_cancellation_or_expiry(store: Store, change: str) -> None:
    batch = await begun(batches_of(store), 2, **({"expires_at": time.time()} if change == "expire" else {}))
    if change == "cancel":
        await batches_of(store).cancel(batch.id, OWNER)
    assert await claimed(batches_of(store), batch) == []


async def test_counts_are_those_of_the_results(store: Store) -> None:
    batch = await begun(batches_of(store), 4)
    one, two, *_ = await claimed(batches_of(store), batch, 3)
    await batches_of(store).finish(one.line, DONE, None, ())
    await batches_of(store).finish(two.line, LineResult("errored", 400), None, ())
    await batches_of(store).cancel(batch.id, OWNER)
    assert not await batches_of(store).close_lines(batch.id, "cancelled")
    read = await found(store, batch)
    assert (read.total, read.succeeded, read.errored, read.cancelled) == (4, 1, 1, 1)
    assert not await batches_of(store).claim_end(batch.id)  # one line still runs


async def test_batch_ends_once(store: Store, other: Store) -> None:
    batch = await begun(batches_of(store), 2)
    await asyncio.gather(store.servers.join("one"), other.servers.join("other"))
    for line in await claimed(batches_of(store), batch):
        use = Use(id=line.line.id, model="m", api="chat", input_tokens=3, output_tokens=4, reasoning_tokens=1)
        await batches_of(store).finish(line.line, DONE, use, ())
    both = [batches_of(store), batches_of(other)]
    for each in both:
        each.notifies = True
    assert sorted(await asyncio.gather(*(each.claim_end(batch.id) for each in both))) == [False, True]
    totals = await batches_of(store).totals(batch.id)
    assert await batches_of(store).name_files(batch.id, "file-1", None) != await batches_of(other).name_files(
        batch.id, "file-1", None
    )
    ends = [await each.end(batch.id, "completed", totals) for each in both * 2]
    assert ends.count(True) == 1
    read = await found(store, batch)
    assert (read.status, read.total, read.succeeded, read.output_file_id) == ("completed", 2, 2, "file-1")
    assert (read.input_tokens, read.output_tokens, read.reasoning_tokens) == (6, 8, 2)
    assert read.completed_at == read.ended_at is not None
    assert await store.webhooks.count() == 1
    await batches_of(store).drop_lines(batch.id)
    assert await batches_of(store).results(batch.id) == []
    assert await found(store, batch) == read


async def test_work_on_a_batch_of_a_dead_server_goes_on_at_another(store: Store, other: Store) -> None:
    await asyncio.gather(store.servers.join("one"), other.servers.join("other"))
    batch = a_batch()
    await batches_of(store).create(batch)
    await batches_of(store).add_lines(batch.id, lines(2))
    assert not await batches_of(other).claim_validation(batch.id)
    await expire_heartbeat(other, "one")
    await batches_of(other).recover()
    assert await batches_of(other).claim_validation(batch.id)
    for step in (
        batches_of(store).add_lines(batch.id, lines(2)),
        batches_of(store).begin(batch.id),
        batches_of(store).fail(batch.id, ()),
    ):
        with pytest.raises(GivenUp):
            await step
    await batches_of(other).add_lines(batch.id, lines(3))
    await batches_of(other).begin(batch.id)
    assert (await found(other, batch)).total == 3


async def test_anthropic_batch_is_seen_once_it_is_whole(store: Store, other: Store) -> None:
    await asyncio.gather(store.servers.join("one"), other.servers.join("other"))
    whole, part = a_batch(api="anthropic"), a_batch(api="anthropic")
    for batch in (whole, part):
        await batches_of(store).create(batch)
        await batches_of(store).add_lines(batch.id, lines(2))
        assert await batches_of(store).get(batch.id, OWNER) is None
    await batches_of(store).begin(whole.id)
    assert await batches_of(store).page(OWNER, "anthropic", limit=9) == [await found(store, whole)]
    await expire_heartbeat(other, "one")
    await batches_of(other).sweep()
    assert [each.batch.id for each in await batches_of(other).look()] == [whole.id]
    assert await batches_of(other).waiting(part, 9) == []


async def test_failed_batch_has_its_errors_and_no_lines(store: Store) -> None:
    batch = a_batch()
    await batches_of(store).create(batch)
    await batches_of(store).add_lines(batch.id, lines(2))
    error = BatchError("invalid_json_line", "This line is no JSON.", line=3)
    await batches_of(store).fail(batch.id, [error])
    read = await found(store, batch)
    assert (read.status, read.errors, read.failed_at is not None) == ("failed", (error,), True)
    assert await batches_of(store).waiting(batch, 9) == []


async def test_cancelled_validation_is_given_up(store: Store) -> None:
    batch = a_batch()
    await batches_of(store).create(batch)
    cancelled = await batches_of(store).cancel(batch.id, OWNER)
    assert cancelled
    assert cancelled.status == "cancelling"
    with pytest.raises(GivenUp):
        await batches_of(store).add_lines(batch.id, lines(1))
    assert await batches_of(store).claim_end(batch.id)


async def test_ended_batch_is_not_cancelled(store: Store) -> None:
    batch = a_batch()
    await batches_of(store).create(batch)
    await batches_of(store).fail(batch.id, ())
    cancelled = await batches_of(store).cancel(batch.id, OWNER)
    assert cancelled
    assert cancelled.status == "failed"
    assert await batches_of(store).cancel("batch_none", OWNER) is None


async def test_only_an_ended_batch_is_deleted(store: Store) -> None:
    batch = await begun(batches_of(store), 2, api="anthropic")
    assert not await batches_of(store).delete(batch.id, OWNER)
    for line in await claimed(batches_of(store), batch):
        await batches_of(store).finish(line.line, DONE, None, ())
    await batches_of(store).claim_end(batch.id)
    await batches_of(store).end(batch.id, "completed", await batches_of(store).totals(batch.id))
    await batches_of(store).drop_lines(batch.id)
    assert len(await batches_of(store).results(batch.id)) == 2  # a client of this API reads them from here
    assert not await batches_of(store).delete(batch.id, "bob")
    assert await batches_of(store).delete(batch.id, OWNER)
    assert await batches_of(store).results(batch.id) == []


async def test_pages_follow_each_other(store: Store) -> None:
    batches = [a_batch(created_at=float(at)) for at in (1, 2, 2, 3, 4)]
    for batch in batches:
        await batches_of(store).create(batch)
    newest = [each.id for each in sorted(batches, key=lambda one: (one.created_at, one.id), reverse=True)]

    async def page(**place: Any) -> list[str]:
        return [each.id for each in await batches_of(store).page(OWNER, "openai", limit=2, **place) or ()]

    assert await page() == newest[:2]
    assert await page(after=newest[1]) == newest[2:4]
    assert await page(before=newest[3]) == newest[1:3]
    assert await page(after=newest[4]) == []
    assert await batches_of(store).page(OWNER, "openai", limit=2, after="batch_none") is None


async def test_open_batches_and_bytes_of_an_owner_are_counted(store: Store) -> None:
    batch = await begun(batches_of(store), 3)
    await begun(batches_of(store), 2, owner="bob")
    size = sum(len(each.body) for each in lines(3))
    assert await batches_of(store).open_of(OWNER) == (1, 3, size)
    assert (await batches_of(store).open_of(None))[:2] == (2, 5)
    assert await store.bytes_of(OWNER) == size
    await batches_of(store).cancel(batch.id, OWNER)
    await batches_of(store).close_lines(batch.id, "cancelled")
    await batches_of(store).claim_end(batch.id)
    await batches_of(store).end(batch.id, "cancelled", await batches_of(store).totals(batch.id))
    assert await batches_of(store).open_of(OWNER) == (0, 0, 0)
    assert await store.bytes_of(OWNER) == 0


async def test_results_come_in_slices(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.batches.stored_batches.SLICE", 2 * len(DONE.body))
    batch = await begun(batches_of(store), 7)
    for line in await claimed(batches_of(store), batch):
        await batches_of(store).finish(line.line, DONE, None, ())
    read, sizes = list[int](), list[int]()
    while some := await batches_of(store).results(batch.id, read[-1] if read else 0):
        read += [line.number for line, _ in some]
        sizes.append(len(some))
    assert (read, sizes) == ([1, 2, 3, 4, 5, 6, 7], [2, 2, 2, 1])


async def test_old_batches_and_lines_that_nobody_needs_are_swept(store: Store) -> None:
    batch = await begun(batches_of(store), 700)
    await batches_of(store).cancel(batch.id, OWNER)
    while await batches_of(store).close_lines(batch.id, "cancelled"):
        pass
    await batches_of(store).claim_end(batch.id)
    await batches_of(store).end(batch.id, "cancelled", await batches_of(store).totals(batch.id))
    await batches_of(store).sweep()
    assert await batches_of(store).results(batch.id) == []
    assert await batches_of(store).get(batch.id, OWNER)
    batches_of(store).keep = 0.0
    await batches_of(store).sweep()
    assert await batches_of(store).get(batch.id, OWNER) is None


async def test_lines_of_models_that_are_not_served_are_left_out(store: Store) -> None:
    batch = a_batch()
    await batches_of(store).create(batch)
    await batches_of(store).add_lines(batch.id, [NewLine(n, str(n), b"{}", model="ab"[n % 2]) for n in range(1, 5)])
    await batches_of(store).begin(batch.id)
    assert await batches_of(store).waiting(batch, 9, ["a"]) == [(1, "b"), (3, "b")]


async def test_line_of_another_server_is_not_released(store_at: str, store: Store, other: Store) -> None:
    batch = await begun(batches_of(store), 1)
    (line,) = await claimed(batches_of(store), batch)
    await batches_of(other).release(line.line)
    assert not await batches_of(other).finish(line.line, DONE, None, ())
    async with open_store(store_at) as third:
        assert await claimed(batches_of(third), batch) == []
    assert await batches_of(store).finish(line.line, DONE, None, ())


async def test_batch_that_ends_is_not_cancelled(store: Store) -> None:
    batch = await begun(batches_of(store), 1)
    (line,) = await claimed(batches_of(store), batch)
    await batches_of(store).finish(line.line, DONE, None, ())
    await batches_of(store).claim_end(batch.id)
    cancelled = await batches_of(store).cancel(batch.id, OWNER)
    assert cancelled
    assert (cancelled.status, cancelled.cancelling_at) == ("finalizing", None)


@pytest.mark.parametrize(
    ("limits", "batches", "new_lines", "reason"),
    [
        ({"default": KeyLimits(batches=1)}, 1, 0, "this API key: 1 batches"),
        ({"default": KeyLimits(batches=2)}, 1, 0, ""),
        ({"default": KeyLimits(batch_lines=5)}, 0, 3, "this API key: 5 lines"),
        ({"default": KeyLimits(batch_lines=6)}, 0, 3, ""),
        ({"all": KeyLimits(batches=2)}, 1, 0, "all API keys together: 2 batches"),
    ],
)
async def test_batches_and_lines_of_a_key_are_bounded(
    store: Store, limits: dict[str, KeyLimits], batches: int, new_lines: int, reason: str
) -> None:
    await begun(batches_of(store), 3)
    await begun(batches_of(store), 2, owner="bob")
    admission = Admission(tables=limits)
    with pytest.raises(LimitReached, match=reason) if reason else nullcontext():
        async with Bounds(admission, batches_of(store)).within(OWNER, new_lines, batches=batches):
            pass
