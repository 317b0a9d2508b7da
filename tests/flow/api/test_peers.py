"""Several servers over one store: each answers for the others, and ends the responses of a dead one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.api.peers import FORWARDED, SseRelay
from penstock.api.settings import Settings
from penstock.pipeline.protocol.events import DONE, KEEP_ALIVE, Event, to_sse
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.runs import run
from tests.support import api_clients
from tests.support.event_streams import final, read_sse
from tests.support.frames import response_frames, written_events
from tests.support.server import BASES, COUNT, PacedEngine, PacedServer, ScriptedServer, running_server, script
from tests.support.stores import FaultyDatabase, database_at, wait_until_stored


def settings(**options: Any) -> Settings:
    return Settings.model_validate({"engine_arguments": [], **options})


def body(events: Iterable[Event], *, silences: bool) -> bytes:
    return b"".join(KEEP_ALIVE * silences + to_sse(event) for event in events) + DONE


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, *(cut % len(data) for cut in cuts), len(data)})
    return [data[start:end] for start, end in pairwise(places)]


@pytest.mark.defect("39")
@given(response_frames(), st.lists(st.integers(0), max_size=20), st.booleans())
def test_only_whole_frames_are_passed_on(frames: Any, cuts: list[int], silences: bool) -> None:
    events = written_events(frames)
    data, relayed, passed = body(events, silences=silences), SseRelay(), bytearray()
    for piece in pieces(data, cuts):
        whole = relayed.feed(piece)
        assert not whole or whole.endswith(b"\n\n")
        passed += whole
        assert relayed.last == passed.count(b"\ndata: ") - 1
        assert relayed.ended is (relayed.last == len(events) - 1)
    assert passed == data.removesuffix(DONE)


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({}, "http://127.0.0.1:81"),
        ({"host": "10.0.0.7", "store": "postgresql://db/it"}, "http://10.0.0.7:81"),
        ({"store": "postgresql://me@localhost/it"}, "http://127.0.0.1:81"),
        ({"store": "postgresql://me@/it?host=/run/postgresql"}, "http://127.0.0.1:81"),
        ({"host": "fe80::1"}, "http://[fe80::1]:81"),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:81"),
        ({"host": "0.0.0.0", "store": "postgresql://db/it", "peer_url": "http://one:8000"}, "http://one:8000"),
    ],
)
def test_server_knows_its_own_url(options: dict[str, str], url: str) -> None:
    assert settings(**options).reached_at(81) == url


@pytest.mark.parametrize(
    "options",
    [
        {"host": "::", "store": "postgresql://db/it"},
        {"store": "postgresql:///it?host=db"},
        {"peer_url": "one:8000"},
        {"peer_url": "http:///x"},
    ],
)
def test_unreachable_peer_url_is_refused(options: dict[str, str]) -> None:
    """Other machines cannot use a loopback address or a malformed URL."""
    with pytest.raises(ValidationError, match="peer_url"):
        settings(**options)


Pair: TypeAlias = tuple[PacedServer, ScriptedServer]


@pytest.fixture
async def pair(store_at: str) -> AsyncGenerator[Pair, None]:
    """Two servers over one store; the first runs one response at a time, and its engine stops in the middle."""
    slow, quick = PacedEngine(script(COUNT), initial=60), ScriptedEngine(script())
    async with running_server(slow, store_at, limit=1) as one, running_server(quick, store_at) as other:
        yield one, other


def stream_of(response_id: str, after: int = -1, base: str = "/v1") -> str:
    return f"{base}/responses/{response_id}?stream=true" + (f"&starting_after={after}" if after >= 0 else "")


@pytest.mark.defect("18")
async def test_servers_share_stored_responses(pair: Pair) -> None:
    one, other = pair
    one.engine.say_all()
    _, answer = await one.post({"input": "Hi"})
    path = f"/v1/responses/{answer['id']}"
    for look in (path, f"{path}/input_items"):
        assert await other.get(look) == await one.get(look)
    assert await other.again(stream_of(answer["id"])) == await one.again(stream_of(answer["id"]))
    status, continued = await other.post({"input": "And?", "previous_response_id": answer["id"]})
    assert (status, continued["status"]) == (200, "completed")
    assert (await other.delete(path))[0] == 200
    assert (await one.get(path))[0] == (await other.get(path))[0] == 404


@pytest.mark.defect("39")
@pytest.mark.parametrize("base", BASES)
async def test_live_stream_passes_through_another_server(pair: Pair, base: str) -> None:
    one, other = pair
    response_id, numbers = await one.start_background(), (-1, 0, 7, 40, 41)
    async with AsyncExitStack() as stack:
        path = stream_of(response_id, -1, base)
        first, *readers = [
            api_clients.StreamReader(await stack.enter_async_context(server.client.get(server.url + path)))
            for server, path in [(one, path), *((other, stream_of(response_id, number, base)) for number in numbers)]
        ]
        for reader in (first, *readers):
            await reader.upto(b"event: ")
        assert one.engine.running == 1
        one.engine.say_all()
        frames = api_clients.sse_frames(await first.rest())
        assert len(frames) > 100
        for number, reader in zip(numbers, readers, strict=True):
            assert api_clients.sse_frames(await reader.rest()) == frames[number + 1 :]
    assert api_clients.sse_frames(await other.again(stream_of(response_id, -1, base))) == frames


async def test_stream_is_passed_on_as_it_grows(pair: Pair) -> None:
    one, other = pair
    path = f"{stream_of(await one.start_background())}&include_obfuscation=true"
    async with other.client.get(other.url + path) as answer:
        reader = api_clients.StreamReader(answer)
        await reader.upto(b'"obfuscation":')
        assert one.engine.running == 1
        one.engine.say_all()
        assert final(read_sse(await reader.rest())).status == "completed"


async def test_reader_that_leaves_another_server_ends_nothing(pair: Pair) -> None:
    one, other = pair
    response_id = await one.start_background()
    async with other.client.get(other.url + stream_of(response_id)) as answer:
        await api_clients.StreamReader(answer).upto(b"output_text.delta")
    one.engine.say_all()
    assert (await other.wait_for_end(response_id))["status"] == "completed"


@pytest.mark.defect("13", "42")
@pytest.mark.parametrize("background", [True, False])
async def test_cancel_reaches_the_server_that_runs_the_response(pair: Pair, store_at: str, background: bool) -> None:
    one, other = pair
    async with one.open_stream({"background": background}) as first:
        response_id = await first.response_id()
        await first.upto(b"output_text.delta")
        await wait_until_stored(store_at, response_id, 1)
        status, answer = await other.cancel(response_id)
        assert (status, answer["status"], one.engine.running) == (200, "cancelled", 0)
        assert final(read_sse(await first.rest())).status == "cancelled"
    assert await other.cancel(response_id) == await one.cancel(response_id) == (200, answer)
    assert await other.get_response(response_id) == answer


@pytest.mark.defect("13")
async def test_queued_response_is_cancelled_at_another_server(pair: Pair) -> None:
    one, other = pair
    running, waiting = await one.start_background(), await one.start_background()
    assert (await other.get_response(waiting))["status"] == "queued"
    assert (await other.cancel(waiting))[1]["status"] == "cancelled"
    one.engine.say_all()
    assert (await other.wait_for_end(running))["status"] == "completed"
    assert [len(one.engine.prompts), len(other.engine.prompts)] == [1, 0]


async def test_response_deleted_at_another_server_ends(pair: Pair) -> None:
    one, other = pair
    response_id = await one.start_background()
    await api_clients.wait_until(lambda: one.engine.running == 1)
    assert (await other.delete(f"/v1/responses/{response_id}"))[0] == 200
    assert one.engine.running == 0
    assert (await one.get(f"/v1/responses/{response_id}"))[0] == 404


async def test_request_is_forwarded_once(pair: Pair) -> None:
    one, other = pair
    response_id = await one.start_background()
    await api_clients.wait_until(lambda: one.engine.running == 1)
    for method, path in (("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")):
        url = f"{other.url}/v1/responses/{response_id}{path}"
        async with other.client.request(method, url, headers={FORWARDED: "1"}) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
    one.engine.say_all()
    await other.wait_for_end(response_id)
    async with other.client.get(other.url + stream_of(response_id), headers={FORWARDED: "1"}) as answer:
        assert final(read_sse(await answer.read())).status == "completed"


async def test_response_has_ended_for_a_poll_once_its_end_is_stored(
    store_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise another server would refuse to continue it."""
    monkeypatch.setattr(run, "COMMIT_WAIT", api_clients.PATIENCE)
    database = FaultyDatabase(database_at(store_at))
    async with (
        running_server(PacedEngine(script(COUNT), initial=5), database) as one,
        running_server(ScriptedEngine(script()), store_at) as other,
    ):
        response_id = await one.start_background()
        await wait_until_stored(store_at, response_id, 1)  # the events of a run wait until its beginning is stored
        with database.stalled():
            one.engine.say_all()
            (live,) = one.scheduler.runs
            await api_clients.wait_until(lambda: live.ended)
            poll = asyncio.create_task(one.get_response(response_id))
            assert (await other.get_response(response_id))["status"] in ("queued", "in_progress")
            assert not poll.done()
        assert (await poll)["status"] == "completed"
        status, answer = await other.post({"input": "Go on.", "previous_response_id": response_id})
        assert (status, answer["status"]) == (200, "completed")
