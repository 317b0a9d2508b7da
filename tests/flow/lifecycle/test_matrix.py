"""The lifecycle matrix: every mode of a response with every kind of end, in both databases.

`FinishedResponse` checks what holds after each of them.  Servers that are stopped or killed are in `test_signals`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.api.runs import scheduler
from penstock.pipeline.errors import EngineDead, EngineFailed
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import Client, Mode, wait_until
from tests.support.lifecycle import FinishedResponse
from tests.support.server import COUNT, ENDLESS, ScriptedServer, running_server, script

BEGUN = COUNT[: COUNT.index(" 20 ")]
"""The first half of a message."""


@dataclass
class Cell:
    served: ScriptedServer
    client: Client

    @property
    def response_id(self) -> str:
        """The id of the client's response, the first that the engine ran."""
        return self.served.engine.prompts[0].facts.response.id

    def let_say(self, text: str, **options: Any) -> None:
        self.served.engine.script = script(text, **{"latency": 0.001} | options)

    async def is_at_it(self) -> asyncio.Task[None]:
        """Send the client's request, and return once its response is in the middle."""
        asking = asyncio.create_task(self.client.ask())
        await wait_until(lambda: len(self.served.engine.prompts) == 1)
        prompt = self.served.engine.prompts[0]
        run = self.served.scheduler.runs.get(prompt.facts.response.id, prompt.facts.origin.owner)
        assert run
        await wait_until(lambda: run.log.last_number > 30)
        return asking

    async def check(self, status: str) -> FinishedResponse:
        """Check that the response has ended, left nothing in this process, and that the server still works."""
        await wait_until(lambda: not (self.served.engine.running or len(self.served.scheduler.runs) or at_work()))
        assert self.served.scheduler.in_flight.count == 0
        self.served.engine.script = script()
        aftermath = await FinishedResponse.of(self.served, self.response_id)
        await aftermath.check(status, self.client)
        return aftermath


def at_work() -> list[str]:
    """The coroutine names of this process's tasks, except for the permanent tasks of a server."""
    steady = ("RequestHandler.start", "Membership.", "Sampler.", "Writer._flush")
    tasks = (task.get_coro() for task in asyncio.all_tasks() if task is not asyncio.current_task())
    names = (getattr(coroutine, "__qualname__", "") for coroutine in tasks)
    return [name for name in names if not name.startswith(steady)]


@pytest.fixture
async def cell(store_at: str, mode: Mode) -> AsyncGenerator[Cell, None]:
    async with running_server(ScriptedEngine(), store_at) as served:
        yield Cell(served, Client(served, mode))


@pytest.mark.defect("B21")
async def test_completed_response_is_whole(cell: Cell) -> None:
    cell.let_say(COUNT)
    await cell.client.ask()
    assert cell.client.is_complete
    finished = await cell.check("completed")
    assert finished.text == " ".join(map(str, range(1, 100)))
    assert finished.response["usage"]["output_tokens"] == len(load_encoding().encode_markup(COUNT))


@pytest.mark.defect("V17")
async def test_response_at_its_limit_is_incomplete(cell: Cell) -> None:
    cell.let_say(COUNT)
    await cell.client.ask(max_output_tokens=60)
    assert cell.client.is_complete
    finished = await cell.check("incomplete")
    assert finished.text.startswith("1 2 3 ")
    assert finished.response["usage"]["output_tokens"] == 60


@pytest.mark.defect("V1", "11")
async def test_engine_error_fails_the_response(cell: Cell) -> None:
    cell.let_say(BEGUN, error=EngineFailed("It failed."))
    await cell.client.ask()
    assert cell.client.is_complete
    finished = await cell.check("failed")
    assert finished.response["error"]["message"] == "It failed."
    assert finished.text == " ".join(map(str, range(1, 20)))


@pytest.mark.defect("V1", "11")
async def test_engine_death_fails_the_response(cell: Cell) -> None:
    cell.let_say(BEGUN, error=EngineDead("It died."), dies=True)
    await cell.client.ask()
    assert cell.client.is_complete
    assert (await cell.served.get("/health"))[0] == 503
    assert (await cell.served.post({"input": "Hi"}))[0] == 503
    dead = await FinishedResponse.of(cell.served, cell.response_id)
    cell.served.engine.is_alive = True
    finished = await cell.check("failed")
    assert finished == dead
    assert finished.text == " ".join(map(str, range(1, 20)))


@pytest.mark.defect("42", "B22", "V17", "B23")
async def test_cancelled_response_keeps_its_output(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "CANCEL_WAIT", 3600)
    cell.let_say(ENDLESS, endless=True)
    asking = await cell.is_at_it()
    status, answer = await cell.served.cancel(cell.response_id)
    assert (status, answer["status"], cell.served.engine.running) == (200, "cancelled", 0)
    await asking
    assert cell.client.is_complete
    finished = await cell.check("cancelled")
    assert (finished.response, finished.text.startswith("la la")) == (answer, True)
    assert finished.response["usage"]["output_tokens"] > 20


@pytest.mark.defect("31", "43")
async def test_leaving_client_cancels_a_foreground_response(cell: Cell) -> None:
    goes_on = cell.client.mode.background
    cell.let_say(COUNT, latency=0.005)
    asking = await cell.is_at_it()
    asking.cancel()
    if goes_on:
        await wait_until(lambda: cell.served.engine.running == 0)
    finished = await cell.check("completed" if goes_on else "cancelled")
    assert finished.text.startswith("1 2 3 ")
    assert finished.response["usage"]["input_tokens"] == len(cell.served.engine.prompts[0].token_ids)
    assert finished.response["usage"]["output_tokens"] > 20
    assert cell.served.engine.aborted == (not goes_on)
