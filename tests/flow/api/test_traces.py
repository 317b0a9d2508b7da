"""Traces, as a collector receives them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
from aiohttp.test_utils import TestClient, TestServer
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

from penstock.api.http.auth import Keys
from penstock.api.settings import Settings
from penstock.pipeline.distribution import own_version
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.protocol.items import McpCall, of_type
from penstock.server import application
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.mcp_config import HttpServer
from penstock.services.tracing import Attribute, exporting
from tests.support import tool_servers
from tests.support.api_clients import StreamReader, wait_until
from tests.support.event_streams import final, read_sse
from tests.support.mcp_servers import HttpServers
from tests.support.otlp import Receiver, collecting, receiving
from tests.support.paths import FIXTURES
from tests.support.server import ENDLESS, HELLO, PacedEngine, PacedServer, running_server, script
from tests.support.socket_client import connected

REQUEST = "POST /v1/responses"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
CLIENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
CANARY = "canary-9a7f"


@asynccontextmanager
async def traced(where: Path | str, **options: Any) -> AsyncGenerator[tuple[PacedServer, Receiver], None]:
    """A server that is traced; the receiver has all spans after the block."""
    async with collecting() as receiver, running_server(PacedEngine(script()), where, **options) as served:
        yield served, receiver


async def test_response_with_two_turns_and_a_call_is_one_trace(tmp_path: Path, http: HttpServers) -> None:
    turns = [tool_servers.call_markup("docs.parent", {}), tool_servers.answer_markup()]
    tool = tool_servers.mcp_tool()
    async with (
        collecting() as receiver,
        tool_servers.tool_server(tmp_path, turns, servers={"docs": HttpServer(http.url())}) as served,
    ):
        body = {"input": "Hi", "tools": [tool], "stream": True}
        async with served.client.post(f"{served.url}/v1/responses", json=body, headers=CLIENT) as answer:
            response = final(read_sse(await answer.read()))
        sent = [prompt.facts.scheduling.trace_headers["traceparent"] for prompt in served.engine.prompts]
    request, whole, call = receiver.one(REQUEST), receiver.one("response"), receiver.one("tools/call parent")
    turns_seen = receiver.named("chat tiny")
    assert {span.trace for span in receiver.spans} == {TRACE}
    assert (request.parent, whole.parent) == (PARENT, request.id)
    assert [name for name in receiver.under(whole) if name != "store commit"] == [
        "chat tiny",
        "tools/call parent",
        "chat tiny",
    ]
    assert sent == [turn.traceparent for turn in turns_seen]
    assert [item.output for item in of_type(response.output, McpCall)] == [call.traceparent]
    assert call.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "parent",
        "mcp.method.name": "tools/call",
    }
    assert whole.attributes == {
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": response.id,
        "penstock.response.mode": "stream",
        "penstock.response.outcome": "completed",
    }
    assert request.attributes == {
        "http.request.method": "POST",
        "http.route": "/v1/responses",
        "http.response.status_code": 200,
        "penstock.delivery.outcome": "delivered",
    }
    assert response.usage is not None
    for name, total in (("input_tokens", response.usage.input_tokens), ("output_tokens", response.usage.output_tokens)):
        assert sum(turn.attributes[f"gen_ai.usage.{name}"] for turn in turns_seen) == total
    for turn in turns_seen:
        assert turn.attributes["gen_ai.operation.name"] == "chat"
        assert turn.attributes["gen_ai.response.finish_reasons"] == ["stop"]
        assert turn.attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert not any(span.has_failed for span in receiver.spans)


async def test_background_response_is_linked_to_its_request(tmp_path: Path) -> None:
    async with traced(tmp_path) as (served, receiver):
        await served.wait_for_end(await served.start_background())
    request, whole = receiver.one(REQUEST), receiver.one("response")
    assert (whole.parent, whole.links) == ("", (request.id,))
    assert whole.attributes["penstock.response.mode"] == "background"
    assert receiver.one("chat tiny").parent == whole.id
    assert whole.trace != request.trace


async def test_resumed_stream_is_linked_to_its_response(tmp_path: Path) -> None:
    async with traced(tmp_path) as (served, receiver):
        served.engine.hold(1)
        response_id = await served.start_background()
        await wait_until(lambda: served.engine.running)
        async with served.client.get(f"{served.url}/v1/responses/{response_id}?stream=true") as answer:
            resumed = StreamReader(answer)
            await resumed.upto(b"response.created")
            served.engine.say_all()
            await resumed.rest()
    resume = next(span for span in receiver.spans if "penstock.delivery.outcome" in span.attributes and span.links)
    assert resume.name == "GET /v1/responses/{response_id}"
    assert resume.links == (receiver.one("response").id,)


async def test_responses_of_a_connection_are_linked_to_it(tmp_path: Path) -> None:
    async with traced(tmp_path) as (served, receiver), connected(served) as client:
        for _ in range(2):
            await client.send(input="Hi")
            await client.stream()
    connection = receiver.one("GET /v1/responses")
    exchanges, wholes = receiver.named("response.create"), receiver.named("response")
    assert [span.links for span in exchanges] == [(connection.id,)] * 2
    assert [span.parent for span in wholes] == [span.id for span in exchanges]
    assert len({span.trace for span in (connection, *exchanges)}) == 3
    assert {span.attributes["penstock.delivery.outcome"] for span in exchanges} == {"delivered"}
    assert {span.attributes["penstock.response.mode"] for span in wholes} == {"websocket"}


async def test_client_that_leaves_is_told_apart_from_the_end_of_its_response(tmp_path: Path) -> None:
    async with traced(tmp_path, detaches=True) as (served, receiver):
        served.engine.hold(1)
        async with served.open_stream() as stream:
            response_id = await stream.response_id()
        await wait_until(lambda: served.scheduler.in_flight.count == 1)
        served.engine.say_all()
        await served.wait_for_end(response_id)
    request, whole = receiver.one(REQUEST), receiver.one("response")
    assert request.attributes["penstock.delivery.outcome"] == "disconnected"
    assert whole.attributes["penstock.response.outcome"] == "completed"
    assert whole.parent == request.id


async def test_response_ends_with_the_client_that_left(tmp_path: Path) -> None:
    async with traced(tmp_path) as (served, receiver):
        served.engine.script = script(ENDLESS, endless=True, latency=0.01)
        async with served.open_stream() as stream:
            await stream.response_id()
        await wait_until(lambda: served.scheduler.in_flight.count == 0)
    assert receiver.one(REQUEST).attributes["penstock.delivery.outcome"] == "disconnected"
    assert receiver.one("response").attributes["penstock.response.outcome"] == "cancelled"


async def test_failures_have_their_cause(tmp_path: Path) -> None:
    async with traced(tmp_path) as (served, receiver):
        await served.post({"input": "Hi", "model": "another"})
        served.engine.script = script(HELLO.removesuffix("<|return|>"), error=EngineFailed("It failed."))
        await served.post({"input": "Hi"})
    refused, answered = receiver.named(REQUEST)
    assert (refused.attributes["error.type"], refused.has_failed) == ("model_not_found", False)
    assert "error.type" not in answered.attributes
    for span in (receiver.one("response"), receiver.one("chat tiny")):
        assert (span.attributes["error.type"], span.has_failed) == ("server_error", True)
    assert receiver.one("response").attributes["penstock.response.outcome"] == "failed"


async def test_traces_hold_nothing_of_the_client(tmp_path: Path, http: HttpServers) -> None:
    """Only attributes of the list are sent; texts, names, keys and headers of the client are in none of them."""
    call = tool_servers.call_markup(f"{CANARY}.echo", {"text": CANARY})
    failing = tool_servers.call_markup(f"{CANARY}.boom", {})
    turns = [call, failing, tool_servers.answer_markup(CANARY)]
    tool = tool_servers.mcp_tool(CANARY, http.url(), authorization=CANARY, headers={"X-Secret": CANARY})
    async with (
        collecting() as receiver,
        tool_servers.tool_server(tmp_path, turns, keys=Keys(None, f"{CANARY}-key-of-many-letters")) as served,
    ):
        headers = {
            "Authorization": f"Bearer {CANARY}-key-of-many-letters",
            "X-Request-Id": CANARY,
            "tracestate": "vendor=1",
            "baggage": f"user={CANARY}",
            **CLIENT,
        }
        body = {
            "input": CANARY,
            "instructions": CANARY,
            "metadata": {CANARY: CANARY},
            "user": CANARY,
            "tools": [tool],
            "model": "tiny",
        }
        wrong = {**body, "temperature": CANARY}
        for sent in (body, {**body, "stream": True}, wrong, {**body, "model": CANARY}):
            async with served.client.post(f"{served.url}/v1/responses", json=sent, headers=headers) as answer:
                assert (answer.status == 200) == (sent["model"] == "tiny" and "temperature" not in sent)
        async with served.client.get(f"{served.url}/v1/{CANARY}?{CANARY}", headers=headers) as answer:
            assert answer.status == 404
    assert not any(CANARY.encode() in body for body in receiver.bodies)
    assert [span.has_failed for span in receiver.named("tools/call mcp")] == [False, True]
    sent_attributes = {name for span in receiver.spans for name in span.attributes}
    assert sent_attributes <= set(get_args(Attribute))


async def test_request_passed_to_another_server_stays_one_trace(store_at: str) -> None:
    async with traced(store_at) as (one, receiver), running_server(ScriptedEngine(script()), store_at) as other:
        one.engine.hold(1)
        response_id = await one.start_background()
        await wait_until(lambda: one.engine.running)
        status, _ = await other.cancel(response_id)
        assert status == 200
    passed, cancelled = receiver.named("POST /v1/responses/{response_id}/cancel")
    assert (passed.trace, passed.parent) == (cancelled.trace, cancelled.id)


async def test_store_is_traced_under_what_waits_for_it(tmp_path: Path) -> None:
    async with traced(tmp_path) as (served, receiver):
        _, answer = await served.post({"input": "Hi"})
        await served.post({"input": "And?", "previous_response_id": answer["id"]})
        await served.delete(f"/v1/responses/{answer['id']}")
    first, second = receiver.named(REQUEST)
    assert "store read" not in receiver.under(first)
    assert "store read" in receiver.under(second)
    assert "store write" in receiver.under(receiver.one("DELETE /v1/responses/{response_id}"))
    assert {span.parent for span in receiver.named("store commit")} <= {span.id for span in receiver.named("response")}


async def test_health_and_metrics_are_not_traced(tmp_path: Path) -> None:
    async with traced(tmp_path) as (served, receiver):
        await served.get("/health")
        async with served.client.get(f"{served.url}/metrics") as answer:
            await answer.read()
        await served.get("/v1/models")
        await served.get("/v1/models/x/health")  # a name that a client chose
    assert [span.name for span in receiver.spans] == ["GET /v1/models", "GET /v1/models/{model}"]


async def test_collector_that_is_down_harms_no_response(tmp_path: Path) -> None:
    async with (
        exporting(OTLPSpanExporter("http://127.0.0.1:9/v1/traces", timeout=0.1)),
        running_server(ScriptedEngine(script()), tmp_path) as served,
    ):
        _, answer = await served.post({"input": "Hi"})
        assert answer["status"] == "completed"


async def test_standard_variables_turn_traces_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        options: Any = {"store": str(tmp_path / "store.sqlite3"), "sandbox": False}
        settings = Settings(engine=[f"replay:{FIXTURES / 'harmony'}"], **options)
        body = {"input": "Hi", "model": "greeting"}
        async with (
            TestClient(TestServer(await application(settings))) as client,
            client.post("/v1/responses", json=body) as answer,
        ):
            assert answer.status == 200
    assert receiver.one("response").trace == receiver.one(REQUEST).trace
    (resource,) = receiver.resources
    of_server = {"service.name": "penstock", "service.version": own_version()}
    assert of_server.items() <= resource.items()
    assert resource["deployment.environment.name"] == "test"
