"""Secrets of a request: only its MCP servers get them, and they do not outlive it in this process.

Tests of background responses begin after the body is read, and end before an MCP server would be called.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import GenerationStarted, Prompt, ResolvedRequest, with_facts
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import McpServer, Toolset
from penstock.pipeline.recordings.format import read_frames, write_frames
from penstock.pipeline.secret import Secret
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs.run import Run
from tests.support.api_clients import wait_until
from tests.support.server import ScriptedServer, running_server, script
from tests.support.stored_responses import queued_response, request_of
from tests.support.stores import stored_text
from tests.support.tool_servers import mcp_tool

pytestmark = pytest.mark.usefixtures("store_at")

CANARY = "canary-9f2c71d0"
URL = "http://127.0.0.1:1"

Headers = list[dict[str, dict[str, str]]]


def secretive(conversation: ResolvedRequest) -> ResolvedRequest:
    """The same conversation, with an MCP server that requires authorization."""
    server = McpServer("maps", "https://maps.example/mcp", Secret({"Authorization": f"Bearer {CANARY}"}))
    return with_facts(conversation, tools=Toolset(servers=(server,)))


def known_secrets() -> int:
    gc.collect()
    return sum(CANARY in str(each.reveal()) for each in gc.get_objects() if issubclass(type(each), Secret))


class Watched:
    """Record each conversation that reaches the model's turn, with the headers known there."""

    def __init__(self) -> None:
        self.headers: Headers = []

    def edit(self, whole: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return whole.insert_after("generate", "watch", self.watch)

    async def watch(self, source: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        async for frame in source:
            if isinstance(frame, GenerationStarted):
                self.headers.append({each.label: each.headers.reveal() for each in frame.facts.tools.servers})
            yield frame


async def waiting(served: ScriptedServer) -> Run:
    async with await served.scheduler.prepare(CreateResponse(input="Hi", background=True)) as opened:
        opened.half.frame = secretive(opened.request)
        return await served.scheduler.queue(opened)


async def test_background_response_has_its_secrets(where: str, caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    with caplog.at_level(logging.DEBUG):
        async with running_server(ScriptedEngine(script()), where, edit=watched.edit, limit=0) as served:
            run = await waiting(served)
            assert CANARY not in await stored_text(where)
            assert "maps.example" in await stored_text(where)
            served.scheduler.background.slots.limit = 1
            await waiting(served)
            assert (await served.wait_for_end(run.response.id))["status"] == "completed"
            await wait_until(lambda: len(served.scheduler.runs) == 0)
            assert CANARY not in await stored_text(where)
    assert watched.headers == [{"maps": {"Authorization": f"Bearer {CANARY}"}}] * 2
    assert CANARY not in caplog.text


async def test_other_server_runs_without_secrets(where: str) -> None:
    watched = Watched()
    async with running_server(ScriptedEngine(script()), where, limit=0, url=URL) as served:
        response_id = (await waiting(served)).response.id
    async with running_server(ScriptedEngine(script()), where, url=URL, edit=watched.edit) as after:
        assert (await after.wait_for_end(response_id))["status"] == "completed"
    assert watched.headers == [{"maps": {}}]


async def _runs(served: ScriptedServer, run: Run) -> None:
    served.scheduler.background.slots.limit = 1
    served.scheduler.background.slots.grant()
    await run.wait()


async def _is_cancelled(served: ScriptedServer, run: Run) -> None:
    await served.scheduler.cancel(run)


async def _is_deleted(served: ScriptedServer, run: Run) -> None:
    assert (await served.delete(f"/v1/responses/{run.response.id}"))[0] == 200


async def _is_handed_over(served: ScriptedServer, run: Run) -> None:
    await served.scheduler.background.release_queued()


async def _is_taken_away(served: ScriptedServer, run: Run) -> None:
    served.store.release(run.response.id)
    await served.scheduler.release_lost()


@pytest.fixture
def looked_at() -> Iterator[None]:
    """Ignore the objects of earlier tests, which would take seconds to search."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("looked_at")
@pytest.mark.parametrize("happens", [_runs, _is_cancelled, _is_deleted, _is_handed_over, _is_taken_away])
async def test_secrets_are_forgotten_with_the_run(
    tmp_path: Path, happens: Callable[[ScriptedServer, Run], Awaitable[None]]
) -> None:
    engine, before = ScriptedEngine(script()), known_secrets()
    async with running_server(engine, tmp_path, limit=0) as served:
        run = await waiting(served)
        assert known_secrets() == before + 1
        await happens(served, run)
        engine.prompts.clear()
        await wait_until(lambda: known_secrets() == before)


@pytest.mark.parametrize(
    "fields",
    [
        {"headers": {"X-Key": f"{CANARY}\n"}},
        {"headers": {"Authorization": CANARY}},
        {"authorization": [CANARY]},
        {"server_url": f"ftp://docs.invalid/{CANARY}"},
        {"server_url": f"https://u:{CANARY}@docs.invalid"},
        {"server_url": None},
    ],
    ids=str,
)
async def test_errors_never_have_tool_secrets(
    served: ScriptedServer, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    url = f"https://docs.invalid/{CANARY}/mcp?key={CANARY}"
    tool = mcp_tool(url=url, headers={"X-Key": CANARY}, authorization=CANARY) | fields
    with caplog.at_level(logging.DEBUG):
        status, answer = await served.post({"input": "Hi", "tools": [tool]})
    assert (status, answer["error"]["param"].startswith("tools[0].")) == (400, True)
    assert CANARY not in f"{answer} {caplog.text}"


def test_recordings_have_no_secrets(tmp_path: Path) -> None:
    request = secretive(request_of(queued_response()))
    for frame in (request, Prompt(request.facts, (1,), ()), GenerationStarted(request.facts, 1)):
        write_frames(tmp_path / "frames.jsonl", [frame])
        assert CANARY not in (tmp_path / "frames.jsonl").read_text()
        (read,) = read_frames(tmp_path / "frames.jsonl", type(frame))
        assert read == frame
        assert read.facts.tools.servers[0].headers.reveal() == {}
        assert CANARY not in repr(frame)
