"""Models that penstock starts as they are used: their turns, and their processes that fail or are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer

from penstock import server
from penstock.api.settings import Settings
from tests.support.api_clients import ApiClient
from tests.support.harmony_server import saying
from tests.support.processes import wait_for
from tests.support.scripted_model import MARK, marked
from tests.support.serve_command import running_models
from tests.support.several import text_of

pytestmark = pytest.mark.slow

DELTA = b"event: response.output_text.delta"


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """The mark of the processes of this test."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    return mark


@asynccontextmanager
async def served(folder: Path, **models: Any) -> AsyncGenerator[ApiClient, None]:
    """Serve models with commands for the length of a block."""
    settings = Settings(store=str(folder / "store.sqlite3"), sandbox=False, models=models)
    async with AsyncExitStack() as closing:
        running = await closing.enter_async_context(server.running(settings))
        closing.push_async_callback(running.scheduler.drain, 0)
        http = await closing.enter_async_context(TestServer(running.api.app(settings.max_body_bytes)))
        client = await closing.enter_async_context(aiohttp.ClientSession())
        yield ApiClient(str(http.make_url("")).rstrip("/"), client)


async def text(at: ApiClient, model: str) -> str:
    status, answer = await at.post({"input": "Hi", "model": model})
    assert status == 200, answer
    return text_of(answer)


async def test_models_of_one_place_answer_in_turns(tmp_path: Path, mark: str) -> None:
    tables: dict[str, Any] = {
        name: {"command": saying(f"I am {name}."), "groups": ["gpu0"]} for name in ("big", "small")
    }
    async with served(tmp_path, **tables) as at:
        assert not marked(mark)
        wanted = ["big", "small", "big", "small"]
        assert await asyncio.gather(*(text(at, name) for name in wanted)) == [f"I am {name}." for name in wanted]
        assert len(marked(mark)) == 2  # one process, and its guardian
    assert not marked(mark)


async def test_a_start_that_fails_is_one_sentence_and_harms_no_other_model(tmp_path: Path) -> None:
    tables = {
        "broken": {"command": "sh -c 'echo no such weights; exit 7'"},
        "sound": {"command": saying("I am sound.")},
    }
    async with served(tmp_path, **tables) as at:
        async with at.client.post(f"{at.url}/v1/responses", json={"input": "Hi", "model": "broken"}) as answer:
            body = await answer.json()
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert "it ended with status 7 while it started" in body["error"]["message"]
        assert "weights" not in body["error"]["message"]
        assert await text(at, "sound") == "I am sound."


async def test_a_process_that_is_killed_fails_its_response_alone(tmp_path: Path, mark: str) -> None:
    tables = {"endless": {"command": saying("on and ", "--endless")}, "sound": {"command": saying("I am sound.")}}
    async with served(tmp_path, **tables) as at:
        async with at.open_stream({"model": "endless"}) as stream:
            await stream.upto(DELTA)
            for pid in marked(mark):
                with suppress(ProcessLookupError):  # one ends with the other
                    os.kill(pid, signal.SIGKILL)
            assert b"event: response.failed\n" in await stream.rest()
        assert await text(at, "sound") == "I am sound."
        async with at.open_stream({"model": "endless"}) as stream:
            await stream.upto(DELTA)
    assert not marked(mark)


def test_no_process_is_left_when_penstock_is_killed(tmp_path: Path, mark: str) -> None:
    table = f'[models.big]\ncommand = "{saying("I am big.")}"\n'
    with running_models(tmp_path, table) as command:
        assert command.client.responses.create(model="big", input="Hi").output_text == "I am big."
        assert len(marked(mark)) >= 3
        command.process.kill()
        wait_for(lambda: not marked(mark))
