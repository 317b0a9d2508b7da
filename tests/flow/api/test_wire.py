"""Guarantees for clients and proxies, most of them from defects of other servers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientPayloadError, ClientSession, web
from aiohttp.test_utils import TestServer

from penstock.api.http.errors import STREAMING, errors_as_json
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.protocol.events import DONE
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.event_streams import final, read_sse
from tests.support.server import CALL, WEATHER, ScriptedServer, script

FIELDS = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "store"),
    *("max_output_tokens", "max_tool_calls", "background", "service_tier", "metadata", "safety_identifier"),
    "prompt_cache_key",
}
"""The 31 fields of a response."""


@pytest.mark.defect("24")
async def test_reasoning_is_an_item_and_is_counted(served: ScriptedServer) -> None:
    _, answer = await served.post({"input": "Hi"})
    details = answer["usage"]["output_tokens_details"]
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert 0 < details["reasoning_tokens"] < answer["usage"]["output_tokens"]


@pytest.mark.defect("36", "45")
@pytest.mark.parametrize("body", [{}, {"store": None}, {"store": True}])
async def test_response_is_stored_by_default(served: ScriptedServer, body: dict[str, Any]) -> None:
    _, answer = await served.post({"input": "Hi", **body})
    assert answer["store"] is True
    assert await served.get(f"/v1/responses/{answer['id']}") == (200, answer)


@pytest.mark.defect("36")
async def test_unstored_response_echoes_store_false(served: ScriptedServer) -> None:
    _, answer = await served.post({"input": "Hi", "store": False})
    assert answer["store"] is False
    status, error = await served.get(f"/v1/responses/{answer['id']}")
    assert (status, error["error"]["code"]) == (404, "response_not_found")


@pytest.mark.defect("37")
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_stream_closes_after_its_terminal_event(served: ScriptedServer, version: str) -> None:
    """A reader that waits for the end of the body does not wait longer."""
    data = json.dumps({"input": "Hi", "stream": True}).encode()
    reader, writer = await asyncio.open_connection(*served.url.removeprefix("http://").split(":"))
    head = f"POST /v1/responses HTTP/{version}\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    body = await reader.readuntil(DONE)
    assert body.count(b"event: response.completed") == 1
    async with asyncio.timeout(120):
        rest = await reader.read() if version == "1.0" else await reader.readuntil(b"0\r\n\r\n")
    assert rest in (b"", b"\r\n0\r\n\r\n")
    writer.close()


@pytest.mark.defect("40")
async def test_first_events_have_every_field_of_a_response(served: ScriptedServer) -> None:
    stream = await served.stream({"input": "Hi", "tools": [WEATHER]})
    bodies = [json.loads(frame.partition("data: ")[2]) for frame in stream.decode().split("\n\n")[:-2]]
    responses = [body["response"] for body in bodies if "response" in body]
    assert [response["status"] for response in responses] == ["in_progress", "in_progress", "completed"]
    for response in responses:
        assert set(response) == FIELDS
    assert len(FIELDS) == 31


@pytest.mark.defect("40")
async def test_echoed_namespace_has_a_description(served: ScriptedServer) -> None:
    """Clients require it, so a namespace without one gets an empty one."""
    bare = {"type": "namespace", "name": "maps", "tools": [WEATHER]}
    response = final(read_sse(await served.stream({"input": "Hi", "tools": [bare]})))
    assert response.tools == (bare | {"description": ""},)


@pytest.mark.defect("40")
async def test_unusual_items_of_clients_are_accepted(served: ScriptedServer) -> None:
    served.engine.script = script(CALL)
    tools: list[dict[str, Any]] = [WEATHER, {"type": "custom", "name": "shell"}]
    _, first = await served.post({"input": "Hi", "tools": tools, "client_metadata": {"a": "b"}, "include": []})
    call = first["output"][-1]
    served.engine.script = script()
    parts = [{"type": "input_text", "text": "18 degrees"}, {"type": "input_text", "text": "and sunny"}]
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": parts}
    status, second = await served.post({"input": [output], "previous_response_id": first["id"], "tools": tools})
    assert (status, second["status"]) == (200, "completed")


async def test_traces_are_passed_to_the_engine(served: ScriptedServer) -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1"}
    headers = {"Traceparent": trace["traceparent"], "TRACESTATE": trace["tracestate"], "Authorization": "Bearer x"}
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi"}, headers=headers) as answer:
        assert answer.status == 200
    assert served.engine.prompts[-1].facts.scheduling.trace_headers == trace
    await served.post({"input": "Hi"})
    assert served.engine.prompts[-1].facts.scheduling.trace_headers == {}


async def test_head_of_a_stream_is_refused(served: ScriptedServer) -> None:
    """The headers of a stream cannot describe the end of its body, so HEAD is refused."""
    _, answer = await served.post({"input": "Hi"})
    async with served.client.head(f"{served.url}/v1/responses/{answer['id']}?stream=true") as refused:
        assert refused.status == 405
    async with served.client.head(f"{served.url}/v1/models") as answered:
        assert answered.status == 200


@pytest.mark.defect("11")
async def test_error_after_the_headers_closes_the_connection() -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse()
        request[STREAMING] = True
        await stream.prepare(request)
        await stream.write(b"data: 1\n\n")
        raise EngineFailed("It failed.")

    app = web.Application(middlewares=[errors_as_json])
    app.router.add_get("/", breaks)
    async with TestServer(app) as server, ClientSession() as client, client.get(server.make_url("/")) as answer:
        with pytest.raises(ClientPayloadError):
            await answer.read()


async def test_model_goes_on_after_an_asynchronous_call_whose_outputs_come_later(served: ScriptedServer) -> None:
    served.engine.turns = (script(CALL), script())
    tools = [WEATHER | {"async": True}]
    first = final(read_sse(await served.stream({"input": "Hi", "tools": tools})))
    assert [item.__struct_config__.tag for item in first.output] == [
        *("reasoning", "function_call", "reasoning", "message"),
    ]
    assert (first.status, first.tools) == ("completed", tuple(tools))
    _, stored = await served.get(f"/v1/responses/{first.id}")
    call = stored["output"][1]
    assert (call["async"], call["status"]) == (True, "completed")
    assert "running" in prompt_of(served, 1)
    last = first.id
    for text in ("18 °C", "19 °C"):
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": text}
        status, answer = await served.post({"input": [output], "previous_response_id": last, "tools": tools})
        assert (status, answer["status"]) == (200, "completed")
        assert text in prompt_of(served, -1)
        last = answer["id"]
    assert prompt_of(served, -1).index("18 °C") < prompt_of(served, -1).index("19 °C")


def prompt_of(served: ScriptedServer, at: int) -> str:
    return load_encoding().decode(served.engine.prompts[at].token_ids)
