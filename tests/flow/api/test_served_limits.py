"""Ends of responses with tools: limits, the client's turn, forbidden addresses and a full engine."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic_settings import CliApp

from penstock.api.http.auth import Keys
from penstock.api.settings import Settings
from penstock.api.start.assembly import toolbox
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.pipeline.errors import EngineOverloaded
from penstock.services.web.ssrf import NOTHING_ALLOWED
from penstock.stages.converse.tool_loop import Limits
from tests.support.mcp_servers import HttpServers
from tests.support.server import WEATHER, ScriptedServer
from tests.support.stores import stored_text
from tests.support.tool_servers import (
    CODE_TOOL,
    MODES,
    SEARCH_TOOL,
    STORED_MODES,
    ClientResponse,
    Json,
    answer_markup,
    browser_markup,
    call_markup,
    join_calls,
    mcp_tool,
    play_turns,
    prompts_read,
    python_markup,
    respond,
    running_site,
    tool_server,
)

USER: Json = {"role": "user", "content": "Go."}
ASK = call_markup("functions.get_weather", {"city": "Paris"})
ECHO = call_markup("docs.echo", {"text": "hello"})


# Limits

TOO_MANY: dict[str, tuple[Sequence[str], Json, list[str], str]] = {
    "calls": ([ECHO], {"max_tool_calls": 1}, ["completed", "in_progress"], "max_tool_calls"),
    "turns": ([ECHO], {}, ["completed"] * 2, "max_turns"),
}
"""The model's output, the request's fields, the ends of the calls before the last, and the reason for the limit."""


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("many", TOO_MANY)
async def test_model_that_goes_on_calling_is_stopped_by_a_limit(
    tmp_path: Path, http: HttpServers, sandbox: Sandbox, mode: str, many: str
) -> None:
    turns, limit, ends, reason = TOO_MANY[many]
    async with tool_server(tmp_path, turns, sandbox=sandbox, limits=Limits(turns=3)) as served:
        received = await respond(served, mode, {"tools": [CODE_TOOL, mcp_tool(url=http.url())], **limit})
    assert (received.response["status"], received.response["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert [item["status"] for item in received.output[1:]] == [*ends, "incomplete"]
    last = received.ladder(len(received.output) - 1)
    assert last[-1] == "output_item.done"
    assert not {"mcp_call.completed", "mcp_call.failed", "code_interpreter_call.interpreting"} & {*last}
    assert received.response["usage"]["output_tokens"] > 0


SURPLUS = "<|message|>Error: all 1 calls of tools that this response may make were made."


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("turns", [[join_calls(ECHO, python_markup("print(1)"))], [ECHO, python_markup("print(1)")]])
async def test_surplus_call_never_completes_and_the_model_answers(
    tmp_path: Path, http: HttpServers, sandbox: Sandbox, mode: str, turns: list[str]
) -> None:
    """As at OpenAI."""
    async with tool_server(tmp_path, [*turns, answer_markup()], sandbox=sandbox) as served:
        received = await respond(served, mode, {"tools": [CODE_TOOL, mcp_tool(url=http.url())], "max_tool_calls": 1})
        read = prompts_read(served)[-1]
    assert (received.response["status"], received.response["incomplete_details"]) == ("completed", None)
    assert received.types == ["mcp_list_tools", "mcp_call", "code_interpreter_call", "message"]
    assert [item["status"] for item in received.output[1:]] == ["completed", "in_progress", "completed"]
    assert received.output[2]["outputs"] is None
    assert received.ladder(2)[-2:] == ["code_interpreter_call.interpreting", "output_item.done"]
    assert f"<|start|>python to=assistant<|channel|>analysis{SURPLUS}" in read


@pytest.mark.parametrize("mode", MODES)
async def test_next_response_reads_why_a_call_was_refused(tmp_path: Path, http: HttpServers, mode: str) -> None:
    async with tool_server(tmp_path, [join_calls(ECHO, ECHO, ASK)]) as served:
        body = {"tools": [WEATHER, mcp_tool(url=http.url())], "max_tool_calls": 1}
        first = await respond(served, mode, body)
        assert [item["status"] for item in first.output[1:]] == ["completed", "in_progress", "completed"]
        assert (first.output[2]["output"], first.output[2]["error"]) == (None, None)
        play_turns(served.engine, answer_markup("Rain."))
        output = {"type": "function_call_output", "call_id": first.output[-1]["call_id"], "output": "rain"}
        await respond(served, mode, body | {"previous_response_id": first.response["id"], "input": [output]})
        assert f"<|start|>docs.echo to=assistant<|channel|>commentary{SURPLUS}" in prompts_read(served)[-1]


@pytest.mark.parametrize("mode", MODES)
async def test_truncated_call_is_not_made(tmp_path: Path, http: HttpServers, mode: str) -> None:
    hang = call_markup("docs.hang", {"padding": "x " * 30})
    before = http.state().get("hang", 0)
    async with tool_server(tmp_path, [hang]) as served:
        received = await respond(served, mode, {"tools": [mcp_tool(url=http.url())], "max_output_tokens": 20})
    assert received.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert (received.types, received.output[1]["status"]) == (["mcp_list_tools", "mcp_call"], "incomplete")
    assert http.state().get("hang", 0) == before


# The client's turn


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["previous_response_id", "stateless"])
async def test_mixed_turn_continues_with_the_clients_output(
    tmp_path: Path, sandbox: Sandbox, http: HttpServers, mode: str, way: str
) -> None:
    turn = join_calls(python_markup("print(6 * 7)"), ECHO, ASK)
    include = ["code_interpreter_call.outputs"]
    async with tool_server(tmp_path, [turn], sandbox=sandbox) as served:
        body = {"tools": [CODE_TOOL, WEATHER, mcp_tool(url=http.url())], "include": include}
        first = await respond(served, mode, body | {"input": [USER]})
        assert first.types == ["mcp_list_tools", "code_interpreter_call", "mcp_call", "function_call"]
        assert (first.response["status"], len(served.engine.prompts)) == ("completed", 1)
        play_turns(served.engine, answer_markup("Rain."))
        output = {"type": "function_call_output", "call_id": first.output[-1]["call_id"], "output": "rain"}
        by_id = {"previous_response_id": first.response["id"], "input": [output]}
        second = await respond(
            served, mode, body | (by_id if way != "stateless" else {"input": [USER, *first.output, output]})
        )
        read = prompts_read(served)[-1]
    assert (second.types, second.response["status"]) == (["message"], "completed")
    results = [
        "<|start|>python to=assistant<|channel|>analysis<|message|>42\n",
        "<|start|>docs.echo to=assistant<|channel|>commentary<|message|>hello<|end|>",
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>rain<|end|><|start|>assistant",
    ]
    places = [read.find(result) for result in results]
    assert -1 < places[0] < places[1] < places[2]


# Forbidden addresses


@pytest.mark.parametrize("mode", MODES)
async def test_private_url_of_a_request_is_not_reached(tmp_path: Path, http: HttpServers, mode: str) -> None:
    before = http.state()["requests"]
    async with (
        running_site() as site,
        tool_server(tmp_path, allowed=NOTHING_ALLOWED, search="http://127.0.0.1:9") as served,
    ):
        play_turns(served.engine, browser_markup("open", {"id": f"{site.url}/gates"}), answer_markup())
        received = await respond(
            served, mode, {"tools": [SEARCH_TOOL, mcp_tool(url=http.url()), mcp_tool("more", http.url(over="sse"))]}
        )
    assert received.types == ["mcp_list_tools", "mcp_list_tools", "web_search_call", "message"]
    assert received.response["status"] == "completed"
    assert [bool(item["error"]) for item in received.output[:2]] == [True, True]
    assert (received.output[2]["status"], site.requests) == ("failed", 0)
    assert http.state()["requests"] == before


async def test_operator_may_allow_an_address(tmp_path: Path, http: HttpServers) -> None:
    for allowed in ([], ["--allow-address", "127.0.0.1"]):
        tools = await toolbox(CliApp.run(Settings, cli_args=["--no-sandbox", *allowed]), Keys())
        async with tool_server(tmp_path / str(len(allowed)), [ECHO, answer_markup()], toolbox=tools) as served:
            received = await respond(served, "whole", {"tools": [mcp_tool(url=http.url())]})
        assert bool(received.output[0].get("error")) == (not allowed)
        assert ("mcp_call" in received.types) == bool(allowed)


# Secrets

CANARY = "canary-5512e0"


@pytest.fixture
def where(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "responses.sqlite3")


@pytest.mark.parametrize(("mode", "store"), STORED_MODES)
async def test_secrets_go_to_their_server_only(
    where: str, http: HttpServers, caplog: pytest.LogCaptureFixture, mode: str, store: bool
) -> None:
    secret = {"authorization": CANARY, "headers": {"X-Key": CANARY}}
    tools = [mcp_tool(url=f"{http.url()}?key=in-the-url") | secret, mcp_tool("broken", http.url("broken")) | secret]
    with caplog.at_level(logging.DEBUG):
        async with tool_server(where, [call_markup("docs.leak", {}), answer_markup()]) as served:
            received = await respond(served, mode, {"tools": tools, "store": store})
            prompts = prompts_read(served)
            kept = await stored_text(where)
    assert received.types == ["mcp_list_tools", "mcp_list_tools", "mcp_call", "message"]
    assert http.state()["headers"]["/good/mcp"]["x-key"] == CANARY
    for text in (json.dumps(received.response), received.raw.decode(), *prompts, kept, caplog.text):
        assert CANARY not in text
    assert "in-the-url" not in json.dumps(received.response) + received.raw.decode()


# A full engine

FULL = EngineOverloaded("The engine's queue is full.")
SOON = Limits(retry_seconds=0.02)


def is_full(served: ScriptedServer, *, full: bool = True) -> None:
    served.engine.script = replace(served.engine.script, refusal=FULL if full else None)


@pytest.mark.parametrize("mode", MODES)
async def test_started_response_waits_for_a_full_engine(tmp_path: Path, http: HttpServers, mode: str) -> None:
    """After its first event it cannot be refused: each turn begins when there is room."""
    door = tmp_path / "door"
    turns = [call_markup("docs.wait", {"path": str(door)}), answer_markup()]
    async with tool_server(tmp_path, turns, limits=SOON) as served:
        is_full(served)
        responding = asyncio.create_task(respond(served, mode, {"tools": [mcp_tool(url=http.url())]}))
        for at in (0, 1):
            await asyncio.sleep(0.3)
            assert (len(served.engine.prompts), responding.done()) == (at, False)
            is_full(served, full=False)
            while len(served.engine.prompts) == at:
                await asyncio.sleep(0.01)
            is_full(served, full=at == 0)
            await asyncio.to_thread(door.touch)
        received: ClientResponse = await responding
    assert (received.response["status"], received.types) == ("completed", ["mcp_list_tools", "mcp_call", "message"])


async def test_new_response_is_refused_by_a_full_engine(tmp_path: Path, http: HttpServers, sandbox: Sandbox) -> None:
    async with tool_server(tmp_path, [answer_markup()], sandbox=sandbox, limits=SOON) as served:
        is_full(served)
        status, error = await served.post({"input": "Hi", "tools": [CODE_TOOL]})
        assert (status, error["error"]["code"]) == (503, "rate_limit_exceeded")
        waiting = await served.start_background({"tools": [CODE_TOOL]})
        is_full(served, full=False)
        assert (await served.wait_for_end(waiting))["status"] == "completed"


async def test_response_waiting_for_the_engine_can_be_cancelled(tmp_path: Path, http: HttpServers) -> None:
    async with tool_server(tmp_path, limits=Limits(retry_seconds=3600)) as served:
        is_full(served)
        async with served.open_stream({"tools": [mcp_tool(url=http.url())], "background": True}) as stream:
            response_id = await stream.response_id()
            await stream.upto(b"response.output_item.done")
            status, cancelled = await served.ask("POST", f"/v1/responses/{response_id}/cancel")
            await stream.rest()
        assert (status, cancelled["status"]) == (200, "cancelled")
        assert [item["type"] for item in cancelled["output"]] == ["mcp_list_tools"]
        assert await served.get_response(response_id) == cancelled
