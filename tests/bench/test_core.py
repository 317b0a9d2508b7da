"""The stand-in engine core: its protocol, which vLLM's own classes read and write as well, and its steps."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from penstock.stages.models.harmony.vocabulary import RETURN, load_encoding
from tests.bench.core import AHEAD, CONTEXT, FILL, Case, End, SteppedCore, Window
from tests.bench.engine_protocol import ABORT, ADD, STOP, Core, Frontend, abilities
from tests.bench.readers import COUNT, MARK
from tests.support.processes import free_port

(TOKEN,) = load_encoding().encode(MARK.decode())

PATIENCE = 60.0
"""Seconds after which a message is lost."""


@asynccontextmanager
async def joined() -> AsyncGenerator[tuple[Frontend, Core], None]:
    """Yield a frontend and its core, which have found each other."""
    address, cores = f"tcp://127.0.0.1:{free_port()}", Queue[Core]()
    frontend = Frontend(address)
    dialling = threading.Thread(target=lambda: cores.put(Core(address, CONTEXT)))
    dialling.start()
    assert (await frontend.accept())["max_model_len"] == CONTEXT
    dialling.join()
    core = cores.get()
    yield frontend, core
    core.close()
    frontend.close()


def read(core: Core, count: int) -> list[tuple[bytes, list[str]]]:
    """Wait for a number of messages of the frontend."""
    found: list[tuple[bytes, list[str]]] = []
    while len(found) < count:
        found += core.read(PATIENCE)
    return found


async def test_requests_are_added_and_aborted() -> None:
    async with joined() as (frontend, core):
        await frontend.add("a")
        await frontend.abort("a", "b")
        assert read(core, 2) == [(ADD, ["a"]), (ABORT, ["a", "b"])]


async def test_each_request_of_a_step_gets_its_tokens() -> None:
    async with joined() as (frontend, core):
        core.step(["a", "b"], (1, 2))
        core.step(["b"], (3,), STOP)
        steps = frontend.steps()
        assert [(each.request_id, each.tokens) for each in await anext(steps)] == [("a", [1, 2]), ("b", [1, 2])]
        assert [(each.request_id, each.finish_reason) for each in await anext(steps)] == [("b", STOP)]


@pytest.mark.vllm
async def test_vllm_reads_and_writes_the_same() -> None:
    from vllm import SamplingParams  # noqa: PLC0415 - takes seconds
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, FinishReason  # noqa: PLC0415
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder  # noqa: PLC0415

    params = SamplingParams(max_tokens=7)
    request = EngineCoreRequest("a", [1, 2, 3], None, params, None, 0.0, None, None, None, priority=3)
    decoded = MsgpackDecoder(EngineCoreOutputs)
    async with joined() as (frontend, core):
        await frontend.send(ADD, MsgpackEncoder().encode(request))
        await frontend.call(5, "get_supported_tasks")
        assert read(core, 1) == [(ADD, ["a"])]
        core.step(["a"], (8, 9), STOP)
        messages = frontend.messages()
        called, stepped = [decoded.decode([await anext(messages)]) for _ in range(2)]
        assert (called.utility_output.call_id, called.utility_output.result.result) == (5, ["generate"])
        assert [(each.request_id, each.new_token_ids) for each in stepped.outputs] == [("a", [8, 9])]
        assert stepped.outputs[0].finish_reason is FinishReason.STOP


@pytest.mark.vllm
async def test_vllm_knows_what_the_core_can_do() -> None:
    import msgspec  # noqa: PLC0415
    from vllm.v1.engine import EngineCoreReadyResponse  # noqa: PLC0415 - takes seconds

    known = msgspec.convert(abilities(CONTEXT), EngineCoreReadyResponse)
    assert known.max_model_len == CONTEXT


class Clients:
    """A frontend and its clients: it notes the tokens of each step, and counts the measured ones as read."""

    def __init__(self, frontend: Frontend, file: Path) -> None:
        self._frontend = frontend
        self._file = os.open(file, os.O_RDWR | os.O_CREAT)
        self.steps: list[dict[str, Any]] = []
        self.is_reading = True
        self.count = 0

    async def run(self) -> None:
        async for outputs in self._frontend.steps():
            self.steps.append({each.request_id: each.tokens for each in outputs})
            self.count += sum(each.tokens.count(TOKEN) for each in outputs)
            if self.is_reading:
                self.read()

    def read(self) -> None:
        os.pwrite(self._file, COUNT.pack(self.count), 0)

    def taken(self) -> list[dict[str, Any]]:
        """Return the steps since the last call."""
        steps, self.steps = self.steps, []
        return steps


async def test_streams_of_a_case_get_each_step_together(tmp_path: Path) -> None:
    file = tmp_path / "read"
    async with joined() as (frontend, core):
        clients, stepped = Clients(frontend, file), SteppedCore(core, file)
        running = asyncio.create_task(clients.run())
        accepted = asyncio.Event()
        loop = asyncio.get_running_loop()
        case = asyncio.create_task(
            asyncio.to_thread(stepped.run, Case(2, 10), lambda: loop.call_soon_threadsafe(accepted.set))
        )
        await accepted.wait()
        for request_id in ("a", "b"):
            await frontend.add(request_id)
        await case
        begun = clients.taken()
        assert all(step["a"] == step["b"] for step in begun)
        assert begun[-1]["a"] == [TOKEN] * FILL
        for window in (Window(6, 2), Window(6, 2, 100.0)):
            await asyncio.to_thread(stepped.run, window, bool)
            assert clients.taken() == [{"a": [TOKEN] * 2, "b": [TOKEN] * 2}] * 3
        clients.is_reading = False
        window_task = asyncio.create_task(asyncio.to_thread(stepped.run, Window(6, 1), bool))
        while len(clients.steps) < AHEAD:
            await asyncio.sleep(0.01)
        clients.is_reading = True
        clients.read()
        await window_task
        assert len(clients.taken()) == 6
        await asyncio.to_thread(stepped.run, End(), bool)
        while not clients.steps:
            await asyncio.sleep(0.01)
        assert clients.taken() == [{"a": [RETURN], "b": [RETURN]}]
        running.cancel()


async def test_request_outside_of_a_case_is_answered_at_once(tmp_path: Path) -> None:
    async with joined() as (frontend, core):
        stepped, steps = SteppedCore(core, tmp_path / "read"), frontend.steps()
        await frontend.add("a")
        await asyncio.to_thread(stepped.receive, PATIENCE)
        (answer,) = await anext(steps)
        assert (answer.request_id, answer.tokens[-2:], answer.finish_reason) == ("a", [TOKEN, RETURN], STOP)
