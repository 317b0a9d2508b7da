"""The WebSocket transport: the same responses as over HTTP, in lanes, on one connection that remembers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec import UNSET

from penstock.api.http.auth import Keys
from penstock.api.http.origins import Origins
from penstock.api.open_sockets import Latest
from penstock.api.socket import connection as connection_module
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import ResponseEvent, to_json
from penstock.pipeline.protocol.items import FunctionCall
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.lru_cache import LruCache
from tests.support.api_clients import PATIENCE, wait_until
from tests.support.event_streams import final, read_sse
from tests.support.server import (
    CALL,
    ENDLESS,
    HELLO,
    WEATHER,
    PacedEngine,
    PacedServer,
    ScriptedServer,
    running_server,
    script,
)
from tests.support.socket_client import IMPATIENT, Lane, SocketClient, connected


@pytest.fixture
async def client(served: PacedServer) -> AsyncGenerator[SocketClient, None]:
    async with connected(served) as client:
        yield client


def without_ids(stream: list[ResponseEvent]) -> str:
    """The events without what differs between two responses: ids and times."""
    text = b"\n".join(map(to_json, stream)).decode().replace(final(stream).id.removeprefix("resp_"), "ID")
    return re.sub(r'"(created|completed)_at":\d+', "", text)


FIELDS = [{}, {"tools": [WEATHER]}, {"reasoning": {"summary": "auto"}}]


@pytest.mark.parametrize("fields", FIELDS, ids=str)
async def test_events_are_those_of_sse(served: PacedServer, client: SocketClient, fields: dict[str, Any]) -> None:
    served.engine.script = script(CALL if "tools" in fields else HELLO)
    await client.send(input="Hi", stream=True, **fields)
    over_socket = await client.stream()
    over_http = read_sse(await served.stream({"input": "Hi", **fields}))
    assert without_ids(over_socket) == without_ids(over_http)


async def test_event_that_brings_a_request_is_no_unknown_parameter(
    client: SocketClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await client.send(input="Hi", brand_new=1)
    await client.stream()
    assert [line for line in caplog.messages if "Ignored" in line] == ["Ignored unknown parameters: brand_new"]


async def test_open_responses_has_its_own_names_of_events(served: PacedServer) -> None:
    async with connected(served, "/openresponses/v1") as client:
        await client.send(input="Hi")
        names = [(await client.frame())["type"] for _ in range(10)]
        assert "response.reasoning.delta" in names


async def test_responses_of_a_lane_run_one_after_another(served: PacedServer, client: SocketClient) -> None:
    served.engine.hold()
    for _ in range(3):
        await client.send(input="Hi")
    await wait_until(lambda: served.engine.running == 1)
    served.engine.say_all()
    streams = [await client.stream() for _ in range(3)]
    assert len({final(stream).id for stream in streams}) == 3


async def test_lanes_run_side_by_side(served: PacedServer, client: SocketClient) -> None:
    served.engine.hold(3)
    for lane in (None, "a", "b.c-d_1"):
        await client.send(lane=lane, input="Hi")
    await wait_until(lambda: served.engine.running == 3)
    served.engine.say_all()
    for lane in ("b.c-d_1", None, "a"):
        assert final(await client.stream(lane)).status == "completed"


async def test_connection_may_use_32_names(served: PacedServer, client: SocketClient) -> None:
    for number in range(32):
        await client.create(lane=f"lane{number}", input="Hi")
    await client.send(lane="one-more", input="Hi")
    error = await client.error("one-more")
    assert (error["status"], error["error"]["code"], error["error"]["param"]) == (
        400,
        "websocket_stream_limit_reached",
        "stream_id",
    )
    await client.create(lane="lane7", input="Hi")
    await client.create(input="Hi")


async def test_wrong_stream_id_is_refused(client: SocketClient) -> None:
    for name in ("", "x" * 10_000, 5, None, ["a"]):
        await client.socket.send_str(json.dumps({"type": "response.create", "input": "Hi", "stream_id": name}))
        error = await client.error()
        refusal = (error["status"], error["error"]["code"], error["error"]["param"])
        assert refusal == (400, "invalid_stream_id", "stream_id"), name


CHAIN = (
    "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|end|>"
    "<|start|>user<|message|>Go on<|end|><|start|>assistant"
)


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("lane", [None, "fork"])
async def test_latest_response_is_continued(
    served: PacedServer, client: SocketClient, store: bool, lane: str | None
) -> None:
    first = await client.create(input="Hi", store=store)
    second = await client.create(lane=lane, input="Go on", previous_response_id=first.id, store=store)
    assert second.previous_response_id == first.id
    assert served.prompt_text().endswith(CHAIN)


async def test_stored_response_is_continued_from_another_connection(served: PacedServer) -> None:
    async with connected(served) as client:
        first = await client.create(input="Hi")
    async with connected(served) as client:
        await client.create(input="Go on", previous_response_id=first.id)
    assert served.prompt_text().endswith(CHAIN)


def called(response: Response) -> str:
    call = response.output[-1]
    assert isinstance(call, FunctionCall)
    return call.call_id


async def test_chain_that_is_not_stored_goes_on_token_for_token(served: PacedServer, client: SocketClient) -> None:
    served.engine.script = script(CALL)
    first = await client.create(input="Hi", store=False, tools=[WEATHER])
    output = {"type": "function_call_output", "call_id": called(first), "output": "Sunny"}
    await client.create(input=[output], store=False, tools=[WEATHER], previous_response_id=first.id)
    before, after = (list(prompt.token_ids) for prompt in served.engine.prompts)
    generated = list(served.engine.script.token_ids)
    assert after[: len(before) + len(generated)] == before + generated


@pytest.mark.parametrize("lane", [None, "fork"])
async def test_only_the_latest_response_of_a_lane_is_remembered(client: SocketClient, lane: str | None) -> None:
    first = await client.create(input="Hi", store=False)
    await client.create(input="Hi", store=False)
    await client.send(lane=lane, input="Go on", previous_response_id=first.id, store=False)
    error = await client.error(lane)
    assert error == {
        "status": 400,
        "error": {
            "type": "invalid_request_error",
            "code": "previous_response_not_found",
            "message": f"Previous response with id '{first.id}' not found.",
            "param": "previous_response_id",
        },
    }


REFUSED_CONTINUATIONS: list[dict[str, Any]] = [
    *({"temperature": 9}, {"input": 5}, {"input": [{"type": "no_such"}]}, {"model": "absent"}),
    *({"background": True}, {"generate": 1}, {"tool_choice": "required"}, {"conversation": "conv_0"}),
    {"input": [{"type": "function_call_output", "call_id": "no_such", "output": "x"}]},
]


@pytest.mark.parametrize("lane", [None, "a"])
async def test_refused_continuation_evicts_its_parent(client: SocketClient, lane: Lane) -> None:
    for fields in REFUSED_CONTINUATIONS:
        first = await client.create(lane=lane, input="Hi", store=False)
        refused = {"input": "Go on", "previous_response_id": first.id, "store": False, **fields}
        await client.send(lane=lane, **refused)
        assert (await client.error(lane))["status"] in (400, 404), fields
        await client.send(lane=lane, input="Go on", previous_response_id=first.id, store=False)
        assert (await client.error(lane))["error"]["code"] == "previous_response_not_found", fields


async def test_continuation_without_a_valid_key_evicts_its_parent(tmp_path: Path) -> None:
    keys = Keys(None, "a-key-of-sixteen-or-more")
    headers = {"Authorization": "Bearer a-key-of-sixteen-or-more"}
    async with (
        running_server(ScriptedEngine(script()), tmp_path, keys=keys) as served,
        connected(served, headers=headers) as client,
    ):
        first = await client.create(input="Hi", store=False)
        connection: Any
        (connection,) = served.api.sockets.connections
        assert connection.memory.find(first.id)
        connection._is_expired = True
        await client.send(input="Go on", previous_response_id=first.id, store=False)
        assert (await client.error())["error"]["code"] == "websocket_connection_limit_reached"
        assert connection.memory.find(first.id) is None


async def test_refused_request_that_continues_nothing_evicts_nothing(client: SocketClient) -> None:
    first = await client.create(input="Hi", store=False)
    for previous in ({}, {"previous_response_id": None}, {"previous_response_id": "x"}):
        await client.send(input=5, store=False, **previous)
        assert (await client.error())["status"] == 400
    await client.create(input="Go on", previous_response_id=first.id, store=False)


async def test_least_recent_histories_are_forgotten_first(served: PacedServer) -> None:
    served.api.sockets.remembered = remembered = LruCache[Latest](10_000)
    async with connected(served) as client:
        first = await client.create(lane="a", input="Hi", store=False)
        second = await client.create(lane="b", input="Hi " * 3000, store=False)
        await client.send(lane="a", input="Go on", previous_response_id=first.id, store=False)
        assert (await client.error("a"))["error"]["code"] == "previous_response_not_found"
        await client.create(lane="b", input="Go on", previous_response_id=second.id, store=False)
    await wait_until(lambda: remembered.get(second.id) is None)


async def test_refused_fork_keeps_its_parent(client: SocketClient) -> None:
    first = await client.create(input="Hi", store=False)
    await client.send(lane="fork", input="Go on", previous_response_id=first.id, store=False, model="absent")
    assert (await client.error("fork"))["status"] == 404
    await client.create(input="Go on", previous_response_id=first.id, store=False)


async def test_response_without_generation_prepares_the_next(served: PacedServer, client: SocketClient) -> None:
    await client.send(input="Hi", generate=False, store=False, instructions="Rhyme.", min_tokens=5)
    stream = await client.stream()
    assert [type(event) for event in stream] == [
        *(events.ResponseCreated, events.ResponseInProgress, events.ResponseCompleted)
    ]
    prepared = final(stream)
    assert (prepared.output, prepared.max_output_tokens) == ((), None)
    assert prepared.usage is not None
    assert (prepared.usage.input_tokens, prepared.usage.output_tokens) == (len(served.engine.prompts[0].token_ids), 0)
    sampling = served.engine.prompts[0].facts.sampling
    assert (sampling.max_tokens, sampling.min_tokens) == (1, UNSET)
    await client.create(input="Go on", previous_response_id=prepared.id, store=False)
    assert served.prompt_text().endswith(
        "<|start|>user<|message|>Hi<|end|><|start|>user<|message|>Go on<|end|><|start|>assistant"
    )


async def test_response_without_generation_compacts_nothing(client: SocketClient) -> None:
    talk = [{"role": "user", "content": "Hi"}, {"type": "compaction_trigger"}]
    assert (await client.create(input=talk, generate=False)).output == ()


async def test_response_without_generation_needs_no_input(served: PacedServer, client: SocketClient) -> None:
    """Codex opens a conversation like this if it declares its tools in the input."""
    prepared = await client.create(input=[], generate=False, store=False)
    assert (prepared.output, served.engine.prompts) == ((), [])
    await client.send(lane="fork", input=[], previous_response_id=prepared.id, store=False)
    assert (await client.error("fork"))["error"]["param"] == "input"
    await client.create(input="Hi", previous_response_id=prepared.id, store=False)
    assert served.prompt_text().endswith("<|start|>user<|message|>Hi<|end|><|start|>assistant")


async def test_processed_responses_are_acknowledged_in_silence(client: SocketClient) -> None:
    first = await client.create(input="Hi")
    await client.socket.send_json({"type": "response.processed", "response_id": first.id})
    await client.create(input="Hi")


WRONG_EVENTS: list[tuple[str | bytes, str | None]] = [
    ("{", None),
    ("[]", None),
    ('"response.create"', None),
    ("{}", "type"),
    ('{"type": 5}', "type"),
    ('{"type": "response.append"}', "type"),
    ('{"type": "response.create"}', "input"),
    ('{"type": "response.create", "input": "Hi", "generate": 1}', "generate"),
    ('{"type": "response.create", "input": "Hi", "background": true}', "background"),
    ('{"type": "response.create", "input": 5}', "input"),
    (b'{"type": "response.create", "input": "Hi"}', None),
    (f"{'[' * 5000}", None),
]


async def test_wrong_event_gets_an_error_and_the_connection_goes_on(client: SocketClient) -> None:
    for frame, param in WRONG_EVENTS:
        await (client.socket.send_str(frame) if isinstance(frame, str) else client.socket.send_bytes(frame))
        error = await client.error()
        assert (error["status"], error["error"]["param"]) == (400, param), frame
        await client.create(input="Hi")


async def test_client_that_leaves_cancels_what_runs_and_what_waits(served: PacedServer) -> None:
    served.engine.hold()
    async with connected(served) as client:
        for lane in (None, "a", None):
            await client.send(lane=lane, input="Hi")
        created = [await client.frame(), await client.frame("a")]
        await wait_until(lambda: served.engine.running == 2)
    await served.wait_until_idle()
    for frame in created:
        response = await served.wait_for_end(frame["response"]["id"])
        assert response["status"] == "cancelled"
    assert len(served.engine.prompts) == 2


async def test_large_frame_is_refused_as_a_large_body_is(served: PacedServer, client: SocketClient) -> None:
    await client.socket.send_str(json.dumps({"type": "response.create", "input": "x" * 100_001}))
    message = await client.socket.receive(timeout=PATIENCE)
    assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.MESSAGE_TOO_BIG)


async def test_client_that_offers_compression_is_served_without(served: PacedServer) -> None:
    async with connected(served, compress=15) as client:
        assert not client.socket.compress
        response = await client.create(input="Hi", instructions="Rhyme. " * 1000)
        assert response.instructions == "Rhyme. " * 1000


async def test_connection_needs_a_key_as_requests_do(tmp_path: Path) -> None:
    key = "a-key-of-sixteen-or-more"
    async with running_server(ScriptedEngine(script()), tmp_path, keys=Keys(None, key)) as served:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            async with connected(served):
                pass
        assert refused.value.status == 401
        async with connected(served, headers={"Authorization": f"Bearer {key}"}) as client:
            await client.create(input="Hi")


async def test_foreign_page_cannot_connect(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script()), tmp_path, origins=Origins()) as served:
        for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                async with connected(served, headers=headers):
                    pass
            assert refused.value.status == 403


async def test_get_without_an_upgrade_is_not_allowed(served: ScriptedServer) -> None:
    async with served.client.get(f"{served.url}/v1/responses") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "POST")


async def test_silent_connection_is_pinged(tmp_path: Path) -> None:
    async with (
        running_server(ScriptedEngine(script()), tmp_path, keep_alive=0.05) as served,
        connected(served, autoping=False) as client,
    ):
        for _ in range(2):
            assert (await client.socket.receive(timeout=PATIENCE)).type == aiohttp.WSMsgType.PING


async def test_client_that_answers_no_ping_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with (
        running_server(ScriptedEngine(script()), tmp_path, keep_alive=0.05) as served,
        connected(served, autoping=False) as client,
    ):
        messages = [await client.socket.receive(timeout=PATIENCE) for _ in range(3)]
        assert [message.type for message in messages] == [aiohttp.WSMsgType.PING] * 2 + [aiohttp.WSMsgType.CLOSE]
        assert messages[-1][1:] == (aiohttp.WSCloseCode.POLICY_VIOLATION, "Two pings were not answered.")
        await wait_until(lambda: not served.api.sockets.connections)
    assert "its client answers no ping" in caplog.text


@pytest.mark.parametrize("answer", [b"\x8a\x80abcd", b"\x89\x80abcd"], ids=["a pong", "a ping"])
async def test_client_from_which_anything_comes_is_not_closed(tmp_path: Path, answer: bytes) -> None:
    async with (
        running_server(ScriptedEngine(script()), tmp_path, keep_alive=0.2) as served,
        connected(served, autoping=False) as client,
    ):
        for _ in range(4):
            while (await client.socket.receive(timeout=PATIENCE)).type is not aiohttp.WSMsgType.PING:
                pass
            transport: Any = client.socket._response.connection
            transport.transport.write(answer)
        assert served.api.sockets.connections


async def test_client_that_reads_nothing_is_closed_and_its_response_cancelled(tmp_path: Path) -> None:
    engine = ScriptedEngine(script(ENDLESS, endless=True))
    async with (
        running_server(engine, tmp_path, keep_alive=0.1) as served,
        connected(served, timeout=IMPATIENT) as client,
    ):
        connection: Any = client.socket._response.connection
        ours: Any
        (ours,) = served.api.sockets.connections
        for transport in (connection.transport, ours.request.transport):
            for buffer in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # small, so that they are full soon
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, buffer, 4096)
        connection.transport.pause_reading()
        await client.send(input="Hi", instructions="Rhyme. " * 1000, max_output_tokens=100_000)
        await wait_until(lambda: engine.running == 1)
        await wait_until(lambda: not served.api.sockets.connections and not engine.running)


async def test_client_is_not_closed_while_the_server_does_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pongs stand behind requests that wait."""
    monkeypatch.setattr(connection_module, "MOST_WAITING", 1)
    engine = PacedEngine(script())
    engine.hold(1)
    async with running_server(engine, tmp_path, keep_alive=0.05) as served, connected(served) as client:
        connection: Any
        (connection,) = served.api.sockets.connections
        requests, pings = 12, list[bytes]()
        for _ in range(requests):
            await client.send(input="Hi", instructions="x" * 50_000)
        await wait_until(lambda: connection.incoming.is_paused)
        with monkeypatch.context() as patched:
            patched.setattr(connection, "_write_control", pings.append)
            await wait_until(lambda: len(pings) >= 5)
        engine.say_all()
        for _ in range(requests):
            assert final(await client.stream()).status == "completed"


async def test_connection_that_is_used_is_not_pinged(served: PacedServer) -> None:
    async with connected(served, autoping=False) as client:
        await client.create(input="Hi")


async def test_old_connection_takes_no_requests_and_closes_once_it_is_idle(
    served: PacedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_module, "LIFETIME", 1.0)
    served.engine.hold()
    async with connected(served) as client:
        await client.send(input="Hi")
        connection: Any
        (connection,) = served.api.sockets.connections
        await wait_until(lambda: connection._is_expired)
        await client.send(lane="a", input="Hi")
        assert (await client.error("a"))["error"]["code"] == "websocket_connection_limit_reached"
        served.engine.say_all()
        assert final(await client.stream()).status == "completed"
        error = await client.error()
        assert error["error"]["code"] == "websocket_connection_limit_reached"
        assert (await client.socket.receive(timeout=PATIENCE)).type == aiohttp.WSMsgType.CLOSE


async def test_stopping_server_lets_responses_end_and_closes_connections(served: PacedServer) -> None:
    served.engine.hold(3)
    async with connected(served) as idle, connected(served) as client:
        await client.send(input="Hi")
        await client.frame()
        draining = asyncio.create_task(served.scheduler.drain(30))
        await asyncio.sleep(0)
        await idle.send(input="Hi")
        refused = await idle.error()
        assert (refused["status"], refused["headers"]) == (503, {"retry-after": "1"})
        served.engine.say_all()
        while (frame := await client.frame())["type"] != "response.completed":
            pass
        assert frame["response"]["status"] == "completed"
        await draining
        await served.api.sockets.close(None)  # type: ignore[arg-type]
        message = await idle.socket.receive(timeout=PATIENCE)
        assert (message.type, message.data) == (aiohttp.WSMsgType.CLOSE, aiohttp.WSCloseCode.GOING_AWAY)


async def test_slow_reader_slows_nobody_else(served: PacedServer) -> None:
    served.engine.script = script(ENDLESS, endless=True)
    async with connected(served) as slow, connected(served) as client:
        await slow.send(input="Hi", max_output_tokens=100_000)
        await wait_until(lambda: served.engine.running == 1)
        served.engine.script = script(HELLO)
        for _ in range(5):
            await client.create(input="Hi")


async def test_events_of_a_socket_are_in_the_log(served: PacedServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with connected(served) as client:
        await client.create(input="Hi")
        await client.send(input="Hi", model="absent")
        await client.error()
    lines = [record.getMessage() for record in caplog.records if "WebSocket" in record.getMessage()]
    assert [line.partition(" in ")[0] for line in lines] == [
        "WebSocket /v1/responses: completed, 68 tokens in, 15 out",
        "WebSocket /v1/responses: 404",
    ]
