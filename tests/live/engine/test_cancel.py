"""Cancelling on the real engine: the request ends at once, and all generated tokens are passed on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Literal, TypeAlias

import pytest
from prometheus_client import REGISTRY

from pipeline.frames import EngineFrame, Prompt
from stages.generate.vllm import VllmEngine
from stages.harmony import HarmonyEncoding
from tests.support.engine_requests import prompt, rename, sampled, stoppable, until_idle
from tests.support.event_streams import generate, last, token_ids
from tests.support.server import running_server
from tests.support.tiny_engine import QUEUE

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]

Phase: TypeAlias = Literal["queued", "prefill", "decode", "stuck"]
"""Where a request is when it is cancelled; one whose reader is stuck is generated while nobody reads."""


def told(name: str) -> int:
    """What vLLM's own metrics say."""
    (metric,) = (metric for metric in REGISTRY.collect() if metric.name == f"vllm:{name}")
    return int(metric.samples[0].value)


async def until_free(engine: VllmEngine) -> None:
    """Wait until no request is left, neither on our side of vLLM nor in its scheduler."""
    await until_idle(engine)
    async with asyncio.timeout(120):
        while told("num_requests_running") or told("num_requests_waiting"):
            await asyncio.sleep(0.01)


async def cancelled(engine: VllmEngine, asked: Prompt, phase: Phase) -> list[EngineFrame]:
    """The frames of a generation that is cancelled in ``phase``, and has left the engine before anybody reads on."""
    frames = []
    async with engine.open(asked) as stream:
        if phase == "prefill":
            await asyncio.sleep(0.05)
        if phase in {"decode", "stuck"}:
            frames += [await anext(stream) for _ in range(5)]
        if phase == "stuck":
            await asyncio.sleep(0.5)
        assert await engine.cancel(asked.response.id)
        await until_free(engine)
        frames += [frame async for frame in stream]
        assert not await engine.cancel(asked.response.id)
    return frames


@pytest.mark.defect("B22")
@pytest.mark.parametrize("likely", [False, True], ids=["plain", "logprobs"])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode", "stuck"])
async def test_request_is_cancelled_at_any_point(
    engine: VllmEngine, encoding: HarmonyEncoding, phase: Phase, likely: bool
) -> None:
    """It ends at once; its frames end with the reason, after every generated token."""
    asked = prompt(encoding, "word " * 7000 if phase == "prefill" else "Never stop talking.", max_tokens=1000)
    before = told("generation_tokens")
    frames = await cancelled(engine, sampled(asked, logprobs=1 if likely else None), phase)
    assert len(token_ids(frames)) == told("generation_tokens") - before
    assert last(frames).reason == "cancelled"
    assert token_ids(frames) or phase in {"queued", "prefill"}
    assert token_ids(await generate(engine, prompt(encoding, "Say hello.")))


async def test_cancelling_one_request_leaves_the_others(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """Only the named one ends, and an unknown id ends none."""
    asked = prompt(encoding, "Never stop talking.", max_tokens=100)
    tasks = [asyncio.create_task(generate(engine, rename(asked, f"resp_{number}"))) for number in range(QUEUE)]
    while told("num_requests_running") < QUEUE:
        await asyncio.sleep(0.01)
    assert await engine.cancel("resp_3")
    assert not await engine.cancel("resp_99")
    reasons = [last(frames).reason for frames in await asyncio.gather(*tasks)]
    assert reasons == ["cancelled" if number == 3 else "length" for number in range(QUEUE)]
    assert not await engine.cancel("resp_3")


@pytest.mark.defect("13", "B22")
async def test_cancelled_response_frees_the_engine(
    engine: VllmEngine, encoding: HarmonyEncoding, tmp_path: Path
) -> None:
    """After the cancel over HTTP, the scheduler has nothing left of it."""
    async with running_server(stoppable(engine), encoding, tmp_path) as served:
        before = told("generation_tokens")
        _, queued = await served.post({"input": "Never stop talking.", "background": True})
        path = f"/v1/responses/{queued['id']}"
        while told("generation_tokens") < before + 10:
            await asyncio.sleep(0.05)
        status, cancelled = await served.post({}, f"{path}/cancel")
        await until_free(engine)
        assert (status, cancelled["status"]) == (200, "cancelled")
        assert cancelled["usage"]["output_tokens"] == told("generation_tokens") - before
        assert await served.get(path) == (200, cancelled)
