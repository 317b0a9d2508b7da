"""A full engine: prompts wait for a place, API keys get slots in turn, and a wait has a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from penstock.api.http.auth import Keys
from penstock.pipeline.core import Pipeline
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.slots import Slots
from penstock.stages.optional.admit import Admit, Places
from tests.support.api_clients import wait_until
from tests.support.server import ENDLESS, HELLO, ScriptedServer, running_server, script

FLOODING, OTHER = "a-key-that-floods", "a-key-of-another"


class Admitting:
    """An edit of a pipeline: a stage that admits prompts to an engine with a number of slots."""

    def __init__(self, most: int, patience: float | None = None, longest: int | None = None) -> None:
        self.slots = Slots(most)
        self.patience = patience
        self.longest = longest

    def __call__(self, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        runs = pipeline.stage("persist").runs
        places = Places(self.slots, self.longest)
        admit = Admit(lambda _: places, runs.is_accepted, lambda _: self.patience)
        return pipeline.insert_before("generate", "admit", admit)


def headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def full(tmp_path: Path) -> AsyncGenerator[tuple[ScriptedServer, Admitting], None]:
    """A server with one place."""
    edit = Admitting(1)
    async with running_server(ScriptedEngine(script()), tmp_path, edit=edit) as served:
        yield served, edit


async def test_prompt_waits_for_a_place(full: tuple[ScriptedServer, Admitting]) -> None:
    served, edit = full
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with served.open_stream() as stream:
        await stream.response_id()
        second = asyncio.create_task(served.post({"input": "Hi"}))
        await wait_until(lambda: edit.slots.waiting == 1)
        served.engine.script = script()
    status, answer = await second
    assert (status, answer["status"]) == (200, "completed")
    await wait_until(lambda: edit.slots.in_use == 0)


async def test_wait_ends_at_its_deadline(full: tuple[ScriptedServer, Admitting]) -> None:
    served, edit = full
    edit.patience = 0.05
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with served.open_stream() as stream:
        await stream.response_id()
        async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi"}) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"]
            assert (await answer.json())["error"]["code"] == "rate_limit_exceeded"
    assert edit.slots.waiting == 0


async def test_queue_that_is_full_refuses_at_once(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True, latency=0.01))
    async with running_server(engine, tmp_path, edit=Admitting(1, longest=1)) as served, served.open_stream() as stream:
        await stream.response_id()
        status, answer = await served.post({"input": "Hi"})
        assert (status, answer["error"]["message"]) == (
            503,
            "The engine is overloaded: its queue is full. Try again in a moment.",
        )


async def test_accepted_response_waits_beyond_the_deadline(full: tuple[ScriptedServer, Admitting]) -> None:
    served, edit = full
    edit.patience = 0.01
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with served.open_stream() as stream:
        await stream.response_id()
        queued = await served.start_background()
        await wait_until(lambda: edit.slots.waiting == 1)
        await asyncio.sleep(0.05)
        served.engine.script = script()
    assert (await served.wait_for_end(queued))["status"] == "completed"


async def test_client_that_leaves_while_it_waits_frees_its_place_in_the_queue(
    full: tuple[ScriptedServer, Admitting],
) -> None:
    served, edit = full
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with served.open_stream() as stream:
        await stream.response_id()
        waiting = asyncio.create_task(served.post({"input": "Hi"}))
        await wait_until(lambda: edit.slots.waiting == 1)
        waiting.cancel()
        await wait_until(lambda: edit.slots.waiting == 0)
    await wait_until(lambda: edit.slots.in_use == 0)


async def test_flooding_key_does_not_starve_another(tmp_path: Path) -> None:
    edit = Admitting(2)
    keys = Keys(given=[FLOODING, OTHER])
    async with running_server(ScriptedEngine(script(HELLO, latency=0.002)), tmp_path, edit=edit, keys=keys) as served:

        async def post(key: str) -> str:
            async with served.client.post(
                f"{served.url}/v1/responses", json={"input": "Hi"}, headers=headers(key)
            ) as answer:
                assert answer.status == 200
                await answer.read()
                return key

        flood = [asyncio.create_task(post(FLOODING)) for _ in range(40)]
        await wait_until(lambda: edit.slots.waiting > 20)
        await post(OTHER)
        done = sum(task.done() for task in flood)
        assert done < 30  # in order of arrival, all 40 would have come first
        await asyncio.gather(*flood)
