"""Memory after many finished responses of every kind, in both databases."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.event_log import EventLog
from penstock.services.runs.run import Run
from tests.bench.soak.kinds import soak
from tests.bench.soak.programs import soaked_programs
from tests.bench.soak.watch import Look, faults
from tests.support.api_clients import ApiClient, wait_until
from tests.support.sandboxes import available
from tests.support.server import running_server, script
from tests.support.stores import both_if_thorough

RESPONSES = 60
"""Each kind runs several times, so that a leak in any kind shows."""
PROGRAMS = 40
"""Responses with programs of all kinds, while a server is killed."""

HELD = (Run, EventLog, asyncio.Task, asyncio.Future)


def held() -> Counter[str]:
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if issubclass(type(each), HELD))


@pytest.mark.defect("17", "V25")
@both_if_thorough
async def test_finished_responses_leave_nothing_in_memory(store_at: str) -> None:
    engine = ScriptedEngine(script(latency=0.001))
    async with running_server(engine, store_at) as served:
        await served.get("/health")
        before = held()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as client:
            await soak(ApiClient(served.url, client), RESPONSES)
        await wait_until(lambda: not len(served.scheduler.runs) and not served.store.backlog)
        await wait_until(lambda: not held() - before)
        background = served.scheduler.background
        assert (background.slots._waiting, background._tasks, served.scheduler._interrupts) == ({}, {}, {})
        assert served.scheduler.in_flight.count == 0
        assert (served.store.writer._last, engine.running) == ({}, 0)


async def test_programs_leave_nothing(tmp_path: Path) -> None:
    await available("program")
    assert await soaked_programs(str(tmp_path / "store.sqlite3"), PROGRAMS, tmp_path) == []


@pytest.mark.defect("17")
@pytest.mark.parametrize(
    ("memory", "stored", "message"),
    [(100, 0, None), (1000, 0, "memory grew by 1000 bytes"), (0, 100, "the store grew")],
)
def test_growth_per_response_is_a_fault(memory: int, stored: int, message: str | None) -> None:
    looks = [
        Look(made, 10**8 + min(made, 5000) * 2000 + made * memory, made * stored) for made in range(0, 20_001, 100)
    ]
    assert [fault[: len(message or "")] for fault in faults(looks)] == ([message] if message else [])
