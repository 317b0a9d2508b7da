"""A bare server over the stand-in engine core, with the clients of the benchmark, and the tables of the budget."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tests.bench.apis import APIS
from tests.bench.bare import deltas
from tests.bench.budget import STREAM, TOKEN, stream_budget, token_budget
from tests.bench.core import Case, Window
from tests.bench.first_token import timed_answer
from tests.bench.loopback import BARE, cost, serving


@pytest.mark.parametrize("which", ["sent", BARE])
async def test_bare_server_writes_the_bytes_of_penstock(which: str, tmp_path: Path) -> None:
    penstock = await deltas()
    case = Case(3, 100)
    async with serving(which, tmp_path / "server.log") as server:
        for api in APIS.values():
            _, answer = await asyncio.to_thread(timed_answer, server.port, api.asking("Hi"), api.path)
            assert without_ids(penstock[api.path][0]) in without_ids(answer)
            async with server.running(case, api=(api.path, api.asking("Hi"))) as begun:
                assert begun.cpu > 0
                assert await cost(server, case, Window(8, 2)) > 0
                assert await cost(server, case, Window(5, 1, 100.0)) > 0


def without_ids(events: bytes) -> bytes:
    return re.sub(rb'"[a-z]+[-_][0-9a-f]{8,}"|"created":\d+', b"", events)


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
