"""Cancelling on the real engine: the request ends at once, and all generated tokens are passed on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal, TypeAlias

import pytest

from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.vllm import VllmEngine
from tests.support.engine_requests import ON_SHARED_ENGINE, EngineStats, prompt, rename, sampled, stoppable, until_idle
from tests.support.event_streams import generate, last, token_ids
from tests.support.server import running_server
from tests.support.tiny_engine import QUEUE

pytestmark = ON_SHARED_ENGINE

ENDLESS = 5000
"""A token limit that no test reaches."""

Phase: TypeAlias = Literal["queued", "prefill", "decode", "stuck"]
"""The state of a request when it is cancelled; "stuck" means that tokens are generated and not read."""


def endless() -> Prompt:
    return prompt("Never stop talking.", max_tokens=ENDLESS)


async def until_free(engine: VllmEngine, stats: EngineStats) -> None:
    """Wait until no request is left in vLLM's front end and in its scheduler."""
    await until_idle(engine)
    await stats.until(lambda: not stats.running and not stats.waiting)


async def cancelled(engine: VllmEngine, stats: EngineStats, wanted: Prompt, phase: Phase) -> list[EngineFrame]:
    """Cancel a generation in ``phase``, wait until it has left the engine, then read on; return all of its frames."""
    frames = []
    before = stats.generated
    async with engine.open(wanted) as stream:
        if phase == "prefill":
            await stats.until(lambda: stats.running > 0)
        if phase in {"decode", "stuck"}:
            frames += [await anext(stream) for _ in range(5)]
        if phase == "stuck":
            await stats.until(lambda: stats.generated > before + 50)
        assert await engine.cancel(wanted.facts.response.id)
        await until_free(engine, stats)
        frames += [frame async for frame in stream]
        assert not await engine.cancel(wanted.facts.response.id)
    return frames


@pytest.mark.defect("B22")
@pytest.mark.parametrize("likely", [False, True], ids=["plain", "logprobs"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "stuck"])
async def test_request_is_cancelled_at_any_point(
    engine: VllmEngine, stats: EngineStats, phase: Phase, likely: bool
) -> None:
    wanted = prompt("word " * 7000, max_tokens=1000) if phase == "prefill" else endless()
    before = stats.generated
    frames = await cancelled(engine, stats, sampled(wanted, logprobs=1 if likely else None), phase)
    assert len(token_ids(frames)) == stats.generated - before
    assert last(frames).reason == "cancelled"
    assert token_ids(frames) or phase in {"queued", "prefill"}
    assert token_ids(await generate(engine, prompt("Say hello.")))


async def test_cancelling_one_request_leaves_the_others(engine: VllmEngine, stats: EngineStats) -> None:
    wanted = endless()
    names = [f"resp_{number}" for number in range(QUEUE)]
    tasks = {name: asyncio.create_task(generate(engine, rename(wanted, name))) for name in names}
    await stats.until(lambda: stats.running == QUEUE)
    assert await engine.cancel("resp_3")
    assert not await engine.cancel("resp_99")
    assert last(await tasks.pop("resp_3")).reason == "cancelled"
    assert not await engine.cancel("resp_3")
    await stats.until(lambda: stats.running == QUEUE - 1)
    assert not any(task.done() for task in tasks.values())
    for name in tasks:
        assert await engine.cancel(name)
    await until_free(engine, stats)
    assert {last(frames).reason for frames in await asyncio.gather(*tasks.values())} == {"cancelled"}


@pytest.mark.defect("13", "B22")
async def test_cancelled_response_frees_the_engine(engine: VllmEngine, stats: EngineStats, tmp_path: Path) -> None:
    async with running_server(stoppable(engine), tmp_path) as served:
        before = stats.generated
        _, queued = await served.post({"input": "Never stop talking.", "temperature": 0, "background": True})
        path = f"/v1/responses/{queued['id']}"
        await stats.until(lambda: stats.generated >= before + 10)
        status, cancelled = await served.post({}, f"{path}/cancel")
        await until_free(engine, stats)
        assert (status, cancelled["status"]) == (200, "cancelled")
        assert cancelled["usage"]["output_tokens"] == stats.generated - before
        assert await served.get(path) == (200, cancelled)
