"""Work that goes on if its caller is cancelled."""

from __future__ import annotations

import asyncio
import gc
import logging

import pytest

from penstock.pipeline.tasks import unhindered


@pytest.mark.parametrize("fails", [False, True])
async def test_work_is_completed_without_its_caller(fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    may_end, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        done.set()
        if fails:
            raise ValueError("of no caller")

    caller = asyncio.create_task(unhindered(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    may_end.set()
    with caplog.at_level(logging.ERROR):
        await done.wait()
        await asyncio.sleep(0)
        gc.collect()
    assert not caplog.records


async def test_caller_gets_result_and_error() -> None:
    async def work(number: int) -> float:
        return 1 / number

    assert await unhindered(work(2)) == 0.5
    with pytest.raises(ZeroDivisionError):
        await unhindered(work(0))
