"""A recording that ends early says why: its server knows who closed the stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import pytest

from penstock.api.http.wire import Reading
from penstock.extensions.workbench.timeline.facts import facts_of
from penstock.extensions.workbench.timeline.timeline import timeline_of
from penstock.pipeline.core import Pipeline
from penstock.pipeline.frames import ItemClosed, ItemDelta, ParsedFrame, TurnFinished
from penstock.pipeline.plugins import guarded
from penstock.pipeline.recordings.format import CAUSES, Cause
from penstock.pipeline.recordings.recorder import Recorder
from penstock.services.engines.scripted import ScriptedEngine
from tests.support import server
from tests.support.api_clients import wait_until
from tests.support.server import DIALECTS, Server

REQUEST = {"model": "tiny", "input": "Hi"}


class DeafEngine(ScriptedEngine):
    """An engine that hears neither of a cancellation nor of the end of its server, so that the stages are closed."""

    async def cancel(self, response_id: str) -> bool:
        return False

    async def stop(self) -> None:
        """Go on."""


Client: TypeAlias = Callable[[Server[ScriptedEngine]], Awaitable[None]]


async def leave_stream(served: Server[ScriptedEngine]) -> None:
    async with served.client.post(f"{served.url}/v1/responses", json={**REQUEST, "stream": True}) as answer:
        await answer.content.readany()


async def leave_body(served: Server[ScriptedEngine]) -> None:
    asking = asyncio.create_task(served.post(REQUEST))
    await wait_until(lambda: any(run.event_count > 4 for run in served.scheduler.runs))
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking


async def leave_socket(served: Server[ScriptedEngine]) -> None:
    async with served.client.ws_connect(f"{served.url}/v1/responses") as socket:
        await socket.send_json({"type": "response.create", **REQUEST})
        await socket.receive()


def asks_then(happens: Callable[[Server[ScriptedEngine], str], Awaitable[Any]], **body: Any) -> Client:
    """Return a client that reads a response, to which something happens once it runs."""

    async def ask(served: Server[ScriptedEngine]) -> None:
        reading = asyncio.create_task(served.stream({**REQUEST, **body}))
        await wait_until(lambda: any(run.event_count > 4 for run in served.scheduler.runs))
        (run,) = served.scheduler.runs
        await happens(served, run.response.id)
        with suppress(aiohttp.ClientError):
            await reading

    return ask


async def cancel(served: Server[ScriptedEngine], response_id: str) -> None:
    (run,) = served.scheduler.runs
    assert run.response.id == response_id
    await served.scheduler.cancel(run)


async def stop(served: Server[ScriptedEngine], _: str) -> None:
    await served.scheduler.drain(0)


async def take_over(served: Server[ScriptedEngine], response_id: str) -> None:
    await served.store.writer.flushed()
    served.store.release(response_id)
    await served.store.writer.flushed()
    await served.scheduler.release_lost()


@dataclass(frozen=True)
class Case:
    """A client, the cause that its recording has, and how the server is made."""

    client: Client
    cause: Cause
    detaches: bool = False
    restarts: bool = False


IN_BACKGROUND = {"background": True}

CASES = {
    "a stream": Case(leave_stream, "client_left"),
    "one body": Case(leave_body, "client_left"),
    "a socket": Case(leave_socket, "client_left"),
    "cancelled": Case(asks_then(cancel), "cancelled"),
    "cancelled in the background": Case(asks_then(cancel, **IN_BACKGROUND), "cancelled"),
    "cancelled without its client": Case(asks_then(cancel), "cancelled", detaches=True),
    "stopped": Case(asks_then(stop), "interrupted"),
    "stopped in the background": Case(asks_then(stop, **IN_BACKGROUND), "interrupted"),
    "stopped without its client": Case(asks_then(stop), "interrupted", detaches=True),
    "left to the next server": Case(asks_then(stop, **IN_BACKGROUND), "released", restarts=True),
    "taken over": Case(asks_then(take_over), "released"),
    "taken over in the background": Case(asks_then(take_over, **IN_BACKGROUND), "released"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_recording_says_why_its_stream_was_closed(tmp_path: Path, case: Case) -> None:
    engine = DeafEngine(server.script(server.ENDLESS, endless=True, latency=0.01))
    options: dict[str, Any] = {"detaches": case.detaches, "restarts": case.restarts}
    async with server.recording_server(engine, tmp_path / "r", **options) as served:
        await case.client(served)
        await served.wait_until_idle()
    folder = server.only_recording(tmp_path / "r")
    for stage in ("generate", "parse"):
        end = server.read_stage(folder, stage).end
        assert (end.abandoned, end.cause) == (True, case.cause)
    timeline = await timeline_of(folder)
    assert timeline.failures == (f"the recorded stream ends early: {CAUSES[case.cause]}",)
    assert ("Status", "broken off") in facts_of(timeline)


async def raises(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame
        if isinstance(frame, ItemDelta):
            raise KeyError


async def reads_no_further(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame
        if isinstance(frame, ItemDelta):
            yield ItemClosed(complete=False)
            yield TurnFinished("length", 0, 1, 1, 0.0)
            return


@pytest.mark.parametrize(
    ("stage", "cause", "told"),
    [
        (raises, "raised", ": The stage 'ending' of this server raised KeyError."),
        (reads_no_further, "unread", ""),
    ],
)
async def test_recording_says_that_a_later_stage_ended_its_stream(
    tmp_path: Path, stage: Any, cause: Cause, told: str
) -> None:
    taps = Recorder(tmp_path / "r", pause=0.01)

    def edit(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        return taps.tapped(guarded(pipeline.insert_after("parse", "ending", stage), pipeline))

    engine = ScriptedEngine(server.script(server.ENDLESS, endless=True, latency=0.01))
    async with server.running_server(engine, tmp_path, edit=edit, closing=taps.closing) as served:
        await served.stream(REQUEST)
    await taps.close()
    folder = server.only_recording(tmp_path / "r")
    end = server.read_stage(folder, "generate").end
    assert (end.abandoned, end.cause) == (True, cause)
    timeline = await timeline_of(folder)
    assert timeline.failures == (f"the recorded stream ends early: {CAUSES[cause]}{told}",)


async def test_answer_that_its_dialect_cannot_write_is_not_said_to_have_lost_its_client(tmp_path: Path) -> None:
    def fails(_: Any) -> bytes:
        raise KeyError

    responses = next(dialect for dialect in DIALECTS if dialect.name == "responses")

    def read(body: bytes) -> Reading:
        reading = responses.read(body)
        return replace(reading, wire=replace(reading.wire, encode=fails))

    broken = replace(responses, read=read)
    engine = ScriptedEngine(server.script(server.ENDLESS, endless=True, latency=0.01))
    async with server.recording_server(engine, tmp_path / "r", dialects=(broken,)) as served:
        await leave_stream(served)
        await served.wait_until_idle()
    assert server.read_stage(server.only_recording(tmp_path / "r"), "generate").end.cause == "unsent"
