"""Writes in any order, and kills at any time: the data is read back unchanged."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import count

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.services.runs.event_log import Block
from penstock.services.store.store import Store
from tests.support import stored_responses
from tests.support.examples import examples
from tests.support.paths import ROOT
from tests.support.stores import open_store

_names = (f"resp_{number:08}" for number in count())  # unique names in the order in which they are drawn

RUNS = st.lists(st.lists(st.binary(max_size=20), max_size=4), min_size=1, max_size=4)
"""The blocks of several runs."""


def write_steps(store: Store, name: str, blocks: Iterable[Block]) -> Iterator[str]:
    """Store a run step by step, and yield the name of each step."""
    store.begin(stored_responses.begun_response(stored_responses.stored_response(name, *stored_responses.ITEMS[:2])))
    yield "begun"
    for block in blocks:
        store.append(name, block)
        yield "appended"
    store.end(stored_responses.stored_response(name, *stored_responses.ITEMS[:2]), None)


@given(runs=RUNS, data=st.data())
@examples(25, [HealthCheck.function_scoped_fixture])
async def test_any_order_of_several_runs_is_read_back(
    store: Store, runs: list[list[bytes]], data: st.DataObject
) -> None:
    """Beginnings, blocks and ends of several runs may be mixed, with pauses anywhere."""
    names = [next(_names) for _ in runs]
    expected = [tuple(Block(n, 1, data) for n, data in enumerate(blocks)) for blocks in runs]
    left = {name: write_steps(store, name, blocks) for name, blocks in zip(names, expected, strict=True)}
    while left:
        name = data.draw(st.sampled_from(sorted(left)))
        if next(left[name], None) is None:
            del left[name]
        if data.draw(st.booleans()):
            await asyncio.sleep(0)
    for name, blocks in zip(names, expected, strict=True):
        assert await store.get(name, "") == stored_responses.stored_response(name, *stored_responses.ITEMS[:2])
        assert await store.blocks(name) == blocks


KEEP_FOR_EVER = """
import asyncio, sys
from itertools import count
from penstock.services.runs.event_log import Block
from tests.support.stored_responses import begun_response, queued_response, request_of, stored_response
from tests.support.stores import open_store

async def main():
    async with open_store(sys.argv[1]) as store:
        for number in count():
            name = f"resp_{number}"
            store.begin(begun_response(stored_response(name)))
            for first in range(3):
                store.append(name, Block(first, 1, b"x" * 1000))
            await store.end(stored_response(name), Block(3, 1, b"end"))
            store.begin(begun_response(stored_response(f"resp_b{number}")))
            store.append(f"resp_b{number}", Block(0, 1, b"begun"))
            waiting = queued_response(f"resp_q{number}")
            await store.accept(waiting, request_of(waiting))
            print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.io
@pytest.mark.defect("18")
@pytest.mark.parametrize("seconds", [0.0, 0.3])
async def test_durable_writes_survive_a_kill(store_at: str, seconds: float) -> None:
    """SIGKILL during writes loses nothing that was confirmed, and leaves nothing half written."""
    command = [sys.executable, "-c", KEEP_FOR_EVER, store_at]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await process.stdout.readline() == b"0\n"
    await asyncio.sleep(seconds)
    process.kill()
    numbers = [0, *map(int, (await process.stdout.read()).split())]
    assert await process.wait() == -signal.SIGKILL
    async with open_store(store_at) as store:
        for number in numbers:
            assert await store.get(f"resp_{number}", "") == stored_responses.stored_response(f"resp_{number}")
            assert len(await store.blocks(f"resp_{number}")) == 4
            assert await store.get(f"resp_b{number}", "") == stored_responses.begun_response(
                stored_responses.stored_response(f"resp_b{number}")
            )
            assert await store.blocks(f"resp_b{number}") == (Block(0, 1, b"begun"),)
        orphans = await store.orphans()
        assert {orphan.stored.response.status for orphan in orphans} == {"queued", "in_progress"}
        while orphans:
            assert all([await store.claim(orphan) for orphan in orphans])
            orphans = await store.orphans()
        for number in numbers:
            assert await store.queued(f"resp_q{number}") == stored_responses.request_of(
                stored_responses.queued_response(f"resp_q{number}")
            )
        await stored_responses.store_response(store, stored_responses.stored_response("resp_after"))
