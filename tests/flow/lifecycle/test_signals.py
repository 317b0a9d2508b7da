"""The rest of the matrix: real servers that are stopped by SIGTERM, or killed by SIGKILL, and started again.

A server is started, ended and started again once for all cases; each test checks one response at the next server.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TypeAlias

import pytest
import pytest_asyncio

from penstock.pipeline.protocol.events import DONE
from tests.support import api_clients
from tests.support.event_streams import renumbered
from tests.support.lifecycle import FinishedResponse
from tests.support.server_process import ServerProcess, running_process
from tests.support.stores import DATABASES, empty_store, open_store, stored_events

pytestmark = pytest.mark.asyncio(loop_scope="module")

DRAIN = 10.0
"""Seconds that a stopping server gives to running responses."""

BRIEF, LONG = 60, 90
"""Tokens of a short response, which takes a fraction of `DRAIN`, and of a long one."""


@dataclass
class Scene:
    """The clients of a server that was ended by a signal: two for each mode, and one whose response was queued."""

    server: ServerProcess
    middle: dict[api_clients.Mode, api_clients.Client]
    near_the_end: dict[api_clients.Mode, api_clients.Client]
    waiting: api_clients.Client
    flushed: dict[api_clients.Mode, bytes] = field(default_factory=dict)
    """The bytes that clients in the middle had seen early enough to be in the store."""
    refusal: int = 0
    """The status of a request that came while the server stopped."""
    exit_status: int | None = None

    async def after(self, client: api_clients.Client) -> FinishedResponse:
        return await FinishedResponse.of(self.server, client.response_id)


@asynccontextmanager
async def at_work(server: ServerProcess, store: str) -> AsyncGenerator[Scene, None]:
    """Give a server running and queued responses.  On exit, wait until all clients have an end."""
    middle, near_the_end = ({mode: api_clients.Client(server, mode) for mode in api_clients.MODES} for _ in range(2))
    waiting = api_clients.Client(server, api_clients.BACKGROUND_STREAM)
    asking = [asyncio.create_task(client.ask()) for client in middle.values()]
    asking += [asyncio.create_task(client.ask(max_output_tokens=BRIEF)) for client in near_the_end.values()]
    await wait_for_events(store, 2 * len(api_clients.MODES), BRIEF - 20)
    for _ in api_clients.MODES:  # too many to run before the server ends
        await server.start_background()
    asking += [asyncio.create_task(waiting.ask())]
    await api_clients.wait_until(lambda: b"response.queued" in waiting.seen)
    yield Scene(server, middle, near_the_end, waiting)
    await asyncio.gather(*asking)


async def wait_for_events(store_at: str, responses: int, events: int) -> None:
    """Wait until that many responses have that many events in the store."""
    async with asyncio.timeout(api_clients.PATIENCE):
        while sum(count >= events for count in (await stored_events(store_at)).values()) < responses:
            await asyncio.sleep(0.05)


async def start_again(server: ServerProcess) -> None:
    """Start the next server, with an engine without latency."""
    server.arguments = ("quick", *server.arguments[1:])
    await server.start()


@asynccontextmanager
async def stopping(store: str, folder: Path) -> AsyncGenerator[Scene, None]:
    """Stop a server by SIGTERM, and start another one at its address."""
    options = ("--max-background", "4", "--drain-timeout", str(DRAIN))
    async with running_process(store, folder, "long", *options) as server:
        async with at_work(server, store) as scene:
            ending = asyncio.create_task(server.kill(signal.SIGTERM))
            await api_clients.wait_until(lambda: "Stopping: " in server.log.read_text())
            scene.refusal, _ = await server.post({"input": "Hi"})
        scene.exit_status = await ending
        await start_again(server)
        yield scene


@asynccontextmanager
async def killing(store: str, folder: Path) -> AsyncGenerator[Scene, None]:
    async with running_process(store, folder, "long", "--max-background", "4") as server:
        async with at_work(server, store) as scene:
            scene.flushed = {mode: client.seen for mode, client in scene.middle.items()}
            longest = max(len(api_clients.sse_frames(seen)) for seen in scene.flushed.values())
            await wait_for_events(store, len(api_clients.MODES), max(LONG, longest))
            await api_clients.wait_until(lambda: all(client.is_complete for client in scene.near_the_end.values()))
            scene.exit_status = await server.kill()
        scene.middle[api_clients.SYNC].answer = {"id": await id_of_what_was_for(scene.middle[api_clients.SYNC], store)}
        await start_again(server)
        yield scene


async def id_of_what_was_for(client: api_clients.Client, store_at: str) -> str:
    """Read the id of a response that its client never learned from the store of a dead server."""
    async with open_store(store_at, stale=0.0) as store:
        left = [orphan.stored.response for orphan in await store.orphans()]
    (response_id,) = [each.id for each in left if each.conversation and each.conversation.id == client.conversation]
    return response_id


Scenes: TypeAlias = dict[str, Scene]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scenes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scenes]:
    """Run all scenes at once, because most of their time is waiting."""
    async with AsyncExitStack() as stack:
        scenes = {}
        for place, scene in product(DATABASES, (stopping, killing)):
            folder = tmp_path_factory.mktemp(scene.__name__)
            store = await stack.enter_async_context(empty_store(request, place, folder))
            scenes[f"{scene.__name__} {place}"] = scene(store, folder)
        entered = await asyncio.gather(*map(stack.enter_async_context, scenes.values()))
        yield dict(zip(scenes, entered, strict=True))


@pytest.fixture(params=DATABASES)
def stopped(request: pytest.FixtureRequest, scenes: Scenes) -> Scene:
    return scenes[f"stopping {request.param}"]


@pytest.fixture(params=DATABASES)
def killed(request: pytest.FixtureRequest, scenes: Scenes) -> Scene:
    return scenes[f"killing {request.param}"]


# SIGTERM


@pytest.mark.defect("V1")
async def test_sigterm_fails_a_long_response(stopped: Scene, mode: api_clients.Mode) -> None:
    client = stopped.middle[mode]
    assert client.is_complete or client.mode.name == "background"  # a polling client may find no server any more
    finished = await stopped.after(client)
    await finished.check("failed", client)
    assert finished.text.startswith("1 2 3 ")


async def test_stopping_server_refuses_new_requests(stopped: Scene) -> None:
    assert (stopped.refusal, stopped.exit_status) == (503, 0)
    assert "Traceback" not in stopped.server.log.read_text()


# SIGKILL


@pytest.mark.defect("V1")
async def test_sigkill_fails_a_running_response(killed: Scene, mode: api_clients.Mode) -> None:
    client = killed.middle[mode]
    assert (client.is_complete, killed.exit_status) == (False, -signal.SIGKILL)
    finished = await killed.after(client)
    await finished.check("failed", replace(client, seen=killed.flushed[mode]))
    assert finished.text.startswith("1 2 3 4 5 6 7 8 9 10 ")


@pytest.mark.defect("V2", "V3")
@pytest.mark.parametrize("mode", [mode for mode in api_clients.MODES if mode.stream], ids=str)
async def test_sigkill_ends_a_resumed_stream(killed: Scene, mode: api_clients.Mode) -> None:
    finished = await killed.after(killed.middle[mode])
    number = len(api_clients.sse_frames(killed.middle[mode].seen)) - 1
    for beyond in range(number, number + 12):
        rest = await finished.after(beyond)
        assert (
            rest == finished.stream[-len(rest) :]
            or rest == renumbered(api_clients.sse_frames(finished.stream)[-1], beyond + 1) + DONE
        )
        assert rest.count(b"event: response.failed") == 1


# Both


@pytest.fixture(params=["stopping", "killing"])
def scene(request: pytest.FixtureRequest, scenes: Scenes, place: str) -> Scene:
    return scenes[f"{request.param} {place}"]


@pytest.mark.parametrize("place", DATABASES)
async def test_nearly_finished_response_ends_as_usual(scene: Scene, mode: api_clients.Mode) -> None:
    client = scene.near_the_end[mode]
    assert client.is_complete
    finished = await scene.after(client)
    await finished.check("incomplete", client)
    assert finished.response["usage"]["output_tokens"] == BRIEF


@pytest.mark.parametrize("place", DATABASES)
async def test_queued_response_is_left_to_the_next_server(scene: Scene) -> None:
    assert not scene.waiting.is_complete
    finished = await scene.after(scene.waiting)
    await finished.check("completed", scene.waiting)
    assert finished.text == "Hello!"
