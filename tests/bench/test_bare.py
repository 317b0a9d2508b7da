"""The servers below penstock in the budget of a token, and its table."""

from __future__ import annotations

import asyncio
import re

import aiohttp
import pytest

from penstock.api.settings import Settings
from tests.bench.bare import deltas, serve_bare
from tests.bench.budget import STREAM, TOKEN, stream_budget, token_budget
from tests.bench.core import Case, End, SteppedCore, Window
from tests.support.api_clients import wait_until
from tests.support.processes import free_port


@pytest.mark.vllm
@pytest.mark.parametrize("which", ["sent", "bare"])
async def test_bare_server_writes_the_bytes_of_penstock(which: str) -> None:
    settings, cores = Settings.model_validate({"port": free_port()}), list[SteppedCore]()
    serving = asyncio.create_task(serve_bare(which, settings, cores))
    await wait_until(lambda: cores)
    async with aiohttp.ClientSession() as client:
        case, accepts = Case(1, 0), asyncio.Event()
        begun = asyncio.create_task(cores[0].run(case, accepts.set))
        await accepts.wait()
        async with client.post(f"http://127.0.0.1:{settings.port}/v1/responses", json={}) as answer:
            await begun
            assert (await cores[0].run(Window(5, 1), bool)).cpu > 0
            await cores[0].run(End(), bool)
            outputs = await answer.read()
    serving.cancel()
    count = outputs.count(b"event:")
    assert count >= 5
    assert without_ids(outputs) == without_ids(b"".join((await deltas())[:count]))


def without_ids(events: bytes) -> bytes:
    return re.sub(rb'"msg_\w+"', b"", events)


def test_parts_of_a_token_add_up() -> None:
    costs = [[5.0 * step - 1, 5.0 * step + 1, 5.0 * step] for step in range(1, len(TOKEN) + 1)]
    assert_adds_up(token_budget(costs), len(TOKEN), 5.0)


def test_parts_of_a_stream_add_up() -> None:
    assert_adds_up(stream_budget([12.0 * step for step in range(1, len(STREAM) + 1)]), len(STREAM), 12.0)


def assert_adds_up(table: str, count: int, each: float) -> None:
    lines = table.split("\n")
    parts = [float(line[:-23].split()[-1]) for line in lines[1:]]
    assert len(parts) == count + 1
    assert sum(parts[:-1]) == pytest.approx(parts[-1]) == each * count
    assert len({len(line) for line in lines}) == 1
