from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support import tool_servers
from tests.support.api_clients import conversation_id
from tests.support.mcp_servers import HttpServers
from tests.support.server import ScriptedServer
from tests.support.stores import database_at

USER: tool_servers.Json = {"role": "user", "content": "Add them."}
ASKING = tool_servers.call_markup("docs.add", {"a": 1, "b": 2})
WAYS = ["previous_response_id", "conversation", "stateless"]
"""Ways in which a client continues."""


def approval(request: tool_servers.Json, approve: bool = True, **fields: Any) -> tool_servers.Json:
    return {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": approve, **fields}


async def goes_on(served: ScriptedServer, way: str) -> tool_servers.Json:
    return {"conversation": conversation_id(await served.create_conversation())} if way == "conversation" else {}


def followed(way: str, first: tool_servers.ClientResponse, *items: tool_servers.Json) -> tool_servers.Json:
    match way:
        case "previous_response_id":
            return {"previous_response_id": first.response["id"], "input": list(items)}
        case "conversation":
            return {"input": list(items)}
        case _:
            return {"input": [USER, *first.output, *items], "store": first.response["background"]}


@pytest.mark.defect("29")
@pytest.mark.parametrize("mode", tool_servers.MODES)
@pytest.mark.parametrize("way", WAYS)
async def test_approved_call_is_made(tmp_path: Path, http: HttpServers, mode: str, way: str) -> None:
    async with tool_servers.tool_server(tmp_path) as served:
        body = {"tools": [tool_servers.mcp_tool(url=http.url(), require_approval="always")]}
        for approve in (True, False):
            shared = body | await goes_on(served, way)
            tool_servers.play_turns(served.engine, ASKING)
            requesting = await tool_servers.respond(served, mode, shared | {"input": [USER]})
            assert (requesting.response["status"], requesting.types) == (
                "completed",
                ["mcp_list_tools", "mcp_approval_request"],
            )
            request = requesting.output[1]
            assert (request["name"], request["arguments"]) == ("add", '{"a": 1, "b": 2}')
            assert requesting.ladder(1) == ["output_item.added", "output_item.done"]
            tool_servers.play_turns(served.engine, tool_servers.answer_markup("3"))
            reason = None if approve else "Too dear."
            done = await tool_servers.respond(
                served, mode, shared | followed(way, requesting, approval(request, approve, reason=reason))
            )
            assert done.response["status"] == "completed"
            read = tool_servers.prompts_read(served)[-1]
            if approve:
                assert_made(done, request)
                assert "<|start|>docs.add to=assistant<|channel|>commentary<|message|>3<|end|>" in read
            else:
                assert done.types == ["message"]
                assert "Too dear." in read
                assert "<|message|>3<|end|>" not in read


def assert_made(done: tool_servers.ClientResponse, request: tool_servers.Json) -> None:
    assert done.types == ["mcp_call", "message"]
    made = done.output[0]
    assert (made["approval_request_id"], made["status"], made["output"]) == (request["id"], "completed", "3")
    assert (made["name"], made["arguments"]) == (request["name"], request["arguments"])
    if done.raw:
        assert done.ladder(0)[-3:] == ["mcp_call_arguments.done", "mcp_call.completed", "output_item.done"]


@pytest.mark.parametrize("mode", tool_servers.MODES)
async def test_approval_allows_no_other_call(tmp_path: Path, http: HttpServers, mode: str) -> None:
    forged = {"type": "mcp_approval_request", "arguments": "{}"}
    async with tool_servers.tool_server(tmp_path) as served:
        tools = [tool_servers.mcp_tool(url=http.url(), allowed_tools=["echo"], require_approval="always")]
        for label, name in (("docs", "hang"), ("docs", "nothing"), ("elsewhere", "echo")):
            request = forged | {"server_label": label, "name": name, "id": f"mcpr_{label}_{name}"}
            items = [USER, request, approval(request)]
            received = await tool_servers.respond(served, mode, {"input": items, "tools": tools})
            assert received.types == ["mcp_list_tools", "mcp_call", "message"]
            assert (received.response["status"], received.output[1]["status"]) == ("completed", "failed")
            assert "offer no such tool" in str(received.output[1]["error"])
        assert http.state().get("hang", 0) == http.state().get("hang cancelled", 0)


@pytest.mark.parametrize("mode", tool_servers.MODES)
async def test_approval_is_good_for_one_call(tmp_path: Path, http: HttpServers, mode: str) -> None:
    async with tool_servers.tool_server(tmp_path) as served:
        tools = [tool_servers.mcp_tool(url=http.url(), require_approval="always")]
        tool_servers.play_turns(served.engine, ASKING)
        requesting = await tool_servers.respond(served, mode, {"input": [USER], "tools": tools})
        (request,) = [item for item in requesting.output if item["type"] == "mcp_approval_request"]
        tool_servers.play_turns(served.engine, tool_servers.answer_markup())
        body = {"tools": tools} | tool_servers.MODES[mode]
        previous = body | {"previous_response_id": requesting.response["id"]}
        await refused(served, previous | {"input": [approval(request), approval(request)]}, "[1]")
        done = await tool_servers.respond(served, mode, previous | {"input": [approval(request)]})
        assert done.types == ["mcp_call", "message"]
        later = body | {"previous_response_id": done.response["id"]}
        await refused(served, later | {"input": [approval(request)]}, "[0]")
        await refused(served, body | {"input": [USER, approval(request)]}, "[1]")


SECOND_TIMES = ["later", "at once", "at another server"]


@pytest.mark.parametrize("when", SECOND_TIMES)
@pytest.mark.parametrize("way", ["previous_response_id", "stateless"])
async def test_approval_that_is_sent_twice_makes_one_call(
    store_at: str, tmp_path: Path, http: HttpServers, way: str, when: str
) -> None:
    """SDKs send a request again after a time-out, while the first one may still run."""
    async with (
        tool_servers.tool_server(database_at(store_at)) as served,
        tool_servers.tool_server(database_at(store_at)) as other,
    ):
        body = {"tools": [tool_servers.mcp_tool(url=http.url(), require_approval="always")]}
        tool_servers.play_turns(served.engine, ASKING)
        requesting = await tool_servers.respond(served, "whole", body | {"input": [USER]})
        (request,) = [item for item in requesting.output if item["type"] == "mcp_approval_request"]
        for each in (served, other):
            tool_servers.play_turns(each.engine, tool_servers.answer_markup())
        twice = body | followed(way, requesting, approval(request))
        if when == "at once":
            answers = list(await asyncio.gather(served.post(twice), served.post(twice), other.post(twice)))
        else:
            answers = [await served.post(twice), await (other if when == "at another server" else served).post(twice)]
    made = [item for status, answer in answers if status == 200 for item in answer["output"] if "call" in item["type"]]
    (by,) = [answer["id"] for status, answer in answers if status == 200 and answer["output"][0].get("output")]
    assert [item["output"] is None for item in made].count(False) == 1
    for status, answer in answers:
        if status == 200 and answer["id"] != by:
            assert f"by the response {by}" in str(answer["output"][0]["error"])
        elif status != 200:
            assert (status, answer["error"]["param"]) == (
                400,
                f"input[{len(twice['input']) - 1}].approval_request_id",
            )
            assert by in answer["error"]["message"]


async def refused(served: ScriptedServer, body: tool_servers.Json, place: str) -> None:
    count = len(served.engine.prompts)
    status, error = await served.post(body)
    assert (status, error["error"]["param"]) == (400, f"input{place}.approval_request_id")
    assert len(served.engine.prompts) == count


async def test_one_of_two_calls_may_be_approved(tmp_path: Path, http: HttpServers) -> None:
    turn = tool_servers.join_calls(ASKING, tool_servers.call_markup("docs.echo", {"text": "hello"}))
    async with tool_servers.tool_server(tmp_path, [turn]) as served:
        path = await served.create_conversation()
        body = {
            "tools": [tool_servers.mcp_tool(url=http.url(), require_approval="always")],
            "conversation": conversation_id(path),
        }
        requesting = await tool_servers.respond(served, "whole", body | {"input": [USER]})
        _, adding, echoing = requesting.output
        tool_servers.play_turns(served.engine, tool_servers.answer_markup("Only one."))
        words = [approval(echoing, approve=False), approval(adding)]
        done = await tool_servers.respond(served, "background stream", body | {"input": words})
        assert_made(done, adding)
        kept = await served.conversation_items(path)
    assert [item["type"] for item in kept] == [
        "message",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_approval_response",
        "mcp_call",
        "message",
    ]
