"""``--store none``: requests are answered, and nothing of a response is left after its end."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.api.start.assembly import database
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.event_streams import final, read_sse
from tests.support.server import ENDLESS, ScriptedServer, running_server, script


@pytest.fixture
async def forgetful() -> AsyncIterator[ScriptedServer]:
    async with running_server(ScriptedEngine(script()), database("none"), detaches=True) as served:
        served.store.keeps = False
        yield served


async def test_server_without_a_store_keeps_no_response(forgetful: ScriptedServer) -> None:
    for body in ({}, {"store": True}):
        status, answer = await forgetful.post({"input": "Hi", **body})
        assert (status, answer["status"], answer["store"]) == (200, "completed", False)
        status, error = await forgetful.post({"input": "Hi", "previous_response_id": answer["id"]})
        assert (status, error["error"]["code"]) == (400, "previous_response_not_found")
        assert "--store none" in error["error"]["message"]
    assert final(read_sse(await forgetful.stream({"input": "Hi"}))).status == "completed"
    assert len(forgetful.scheduler.runs) == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")],
)
async def test_missing_response_is_missing_as_nothing_is_stored(
    forgetful: ScriptedServer, method: str, path: str
) -> None:
    _, answer = await forgetful.post({"input": "Hi"})
    status, error = await forgetful.ask(method, f"/v1/responses/{answer['id']}{path}")
    assert (status, error["error"]["code"]) == (404, "response_not_found")
    assert "stores nothing (--store none)" in error["error"]["message"]


async def test_missing_conversation_is_missing_as_nothing_is_stored(forgetful: ScriptedServer) -> None:
    status, error = await forgetful.post({"input": "Hi", "conversation": "conv_1"})
    assert (status, error["error"]["param"]) == (404, "conversation")
    assert "--store none" in error["error"]["message"]


async def test_running_response_is_found_without_a_store(forgetful: ScriptedServer) -> None:
    forgetful.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with forgetful.open_stream({}) as stream:
        response_id = await stream.response_id()
        assert (await forgetful.get_response(response_id))["status"] == "in_progress"
        status, answer = await forgetful.cancel(response_id)
        assert (status, answer["status"]) == (200, "cancelled")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [("/v1/responses", {"input": "Hi", "background": True}, "background"), ("/v1/conversations", {}, None)],
)
async def test_server_without_a_store_refuses_what_needs_one(
    forgetful: ScriptedServer, path: str, body: dict[str, object], param: str | None
) -> None:
    status, answer = await forgetful.post(body, path)
    assert (status, answer["error"]["param"], answer["error"]["code"]) == (400, param, "unsupported_parameter")
    assert "--store none" in answer["error"]["message"]
