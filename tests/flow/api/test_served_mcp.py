from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.tools.mcp.builtin_tools import McpHost
from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.services.mcp_config import HttpServer, ServerConfig
from penstock.services.tools import ToolAccess, Toolbox
from penstock.stages.converse.tool_loop import Limits
from tests.support import tool_servers
from tests.support.event_streams import final, read_sse
from tests.support.mcp_servers import LOCAL, HttpServers, stdio_server


def assert_echoed(received: tool_servers.ClientResponse, label: str) -> None:
    """Assert that a server was listed and called once, and that the model read the result."""
    assert received.response["status"] == "completed"
    assert received.types == ["mcp_list_tools", "mcp_call", "message"]
    listing, called, _ = received.output
    assert (listing["server_label"], [tool["name"] for tool in listing["tools"]][:1]) == (label, ["echo"])
    assert {key: called[key] for key in ("name", "server_label", "arguments", "output", "error", "status")} == {
        "name": "echo",
        "server_label": label,
        "arguments": '{"text": "hello"}',
        "output": "hello",
        "error": None,
        "status": "completed",
    }
    if received.events:
        assert received.ladder(0) == [
            "output_item.added",
            "mcp_list_tools.in_progress",
            "mcp_list_tools.completed",
            "output_item.done",
        ]
        assert received.ladder(1) == [
            "output_item.added",
            "mcp_call.in_progress",
            "mcp_call_arguments.delta",
            "mcp_call_arguments.done",
            "mcp_call.completed",
            "output_item.done",
        ]


@pytest.mark.defect("B24", "29")
@pytest.mark.parametrize("owner", ["operator", "request"])
async def test_servers_are_called_in_every_mode(tmp_path: Path, http: HttpServers, owner: str) -> None:
    tool, servers = (
        (tool_servers.mcp_tool(), {"docs": stdio_server()})
        if owner == "operator"
        else (tool_servers.mcp_tool(url=http.url()), {})
    )
    turns = [tool_servers.call_markup("docs.echo", {"text": "hello"}), tool_servers.answer_markup()]
    async with tool_servers.tool_server(tmp_path, turns, servers=servers) as served:
        for mode, store in tool_servers.STORED_MODES:
            assert_echoed(await tool_servers.respond(served, mode, {"tools": [tool], "store": store}), "docs")
        assert (
            "<|start|>docs.echo to=assistant<|channel|>commentary<|message|>hello<|end|>"
            in tool_servers.prompts_read(served)[-1]
        )


@pytest.mark.defect("V7", "V24")
@pytest.mark.parametrize("way", [{}, {"background": True}], ids=str)
async def test_running_call_has_not_completed(tmp_path: Path, http: HttpServers, way: tool_servers.Json) -> None:
    door = tmp_path / "door"
    turns = [tool_servers.call_markup("docs.wait", {"path": str(door)}), tool_servers.answer_markup()]
    async with (
        tool_servers.tool_server(tmp_path, turns) as served,
        served.open_stream({"tools": [tool_servers.mcp_tool(url=http.url())], **way}) as stream,
    ):
        read = await stream.upto(b"response.mcp_call_arguments.done")
        assert tool_servers.ClientResponse({}, read, []).ladder(1)[-1] == "mcp_call_arguments.done"
        await tool_servers.expect_silence(stream)
        assert (await served.get_response(await stream.response_id()))["status"] == "in_progress"
        door.touch()
        received = tool_servers.ClientResponse({}, await stream.rest(), [])
    assert received.ladder(1)[-3:] == ["mcp_call_arguments.done", "mcp_call.completed", "output_item.done"]


@pytest.mark.defect("V24")
async def test_stream_sends_comments_during_a_call(tmp_path: Path, http: HttpServers) -> None:
    """A proxy does not take the stream for dead, and its events are the same."""
    turns = [tool_servers.call_markup("docs.slow", {"seconds": 0.3}), tool_servers.answer_markup()]
    async with tool_servers.tool_server(tmp_path, turns, keep_alive=0.05) as served:
        raw = await served.stream({"input": "Hi", "tools": [tool_servers.mcp_tool(url=http.url())]})
    _, _, behind = raw.partition(b"event: response.mcp_call_arguments.done")
    assert b"\n\n:" in behind.partition(b"event: response.mcp_call.completed")[0]
    assert final(read_sse(raw)).status == "completed"


@pytest.mark.defect("V7")
@pytest.mark.parametrize("mode", tool_servers.MODES)
async def test_failed_call_is_a_failed_item(tmp_path: Path, http: HttpServers, mode: str) -> None:
    turns = [
        tool_servers.call_markup("docs.boom", {}),
        tool_servers.call_markup("docs.add", {"a": "x"}),
        tool_servers.call_markup("docs.add", '{"a":'),
        tool_servers.answer_markup(),
    ]
    async with tool_servers.tool_server(tmp_path, turns) as served:
        received = await tool_servers.respond(served, mode, {"tools": [tool_servers.mcp_tool(url=http.url())]})
        read = tool_servers.prompts_read(served)[-1]
    assert received.types == ["mcp_list_tools"] + ["mcp_call"] * 3 + ["message"]
    for index in (1, 2, 3):
        item = received.output[index]
        assert (item["status"], item["output"]) == ("failed", None)
        assert item["error"]["type"]
        assert received.ladder(index)[-2:] == ["mcp_call.failed", "output_item.done"]
    assert "It went boom." in read


@pytest.mark.defect("V23")
@pytest.mark.parametrize("mode", tool_servers.MODES)
async def test_hanging_call_times_out(tmp_path: Path, http: HttpServers, sandbox: Sandbox, mode: str) -> None:
    turns = [tool_servers.call_markup("docs.hang", {}), tool_servers.answer_markup()]
    async with tool_servers.tool_server(tmp_path, turns, sandbox=sandbox, limits=Limits(call_seconds=0.3)) as served:
        hanging = await tool_servers.respond(served, mode, {"tools": [tool_servers.mcp_tool(url=http.url())]})
        tool_servers.play_turns(
            served.engine, tool_servers.python_markup("while True: pass"), tool_servers.answer_markup()
        )
        looping = await tool_servers.respond(served, mode, {"tools": [tool_servers.CODE_TOOL]})
    for received in (hanging, looping):
        assert (received.response["status"], received.output[-2]["status"]) == ("completed", "failed")
    assert hanging.ladder(1)[-2:] == ["mcp_call.failed", "output_item.done"]
    assert looping.ladder(0)[-2:] == ["code_interpreter_call.interpreting", "output_item.done"]


@pytest.mark.defect("V22")
async def test_all_turns_have_the_priority_of_the_request(tmp_path: Path, http: HttpServers) -> None:
    """Later turns keep priority 0 by default, so they need no priority scheduling."""
    turns = [tool_servers.call_markup("docs.add", {"a": 1, "b": 2})] * 2 + [tool_servers.answer_markup()]
    async with tool_servers.tool_server(tmp_path, turns) as served:
        for priority in (0, 3):
            served.engine.prompts.clear()
            await tool_servers.respond(
                served, "stream", {"tools": [tool_servers.mcp_tool(url=http.url())], "priority": priority}
            )
            assert [prompt.facts.scheduling.priority for prompt in served.engine.prompts] == [priority] * 3


def replaced(kind: str, config: ServerConfig) -> Toolbox:
    """A toolbox in which an operator's server runs a built-in tool."""
    servers = McpServers({kind: config}, LOCAL)
    return Toolbox({kind: McpHost(servers, kind)}, servers)


@pytest.mark.parametrize("choice", ["auto", {"type": "mcp", "server_label": "container"}], ids=str)
async def test_all_functions_of_an_operators_container_can_be_called(
    tmp_path: Path, http: HttpServers, choice: Any
) -> None:
    turns = [
        "<|channel|>analysis to=container.exec code<|message|>" + '{"cmd": ["ls"]}<|call|>',
        "<|channel|>analysis to=container.feed_chars code<|message|>" + '{"chars": "ls"}<|call|>',
        tool_servers.answer_markup(),
    ]
    tool = {"type": "mcp", "server_label": "container", "server_url": "http://localhost:8888"}
    toolbox = replaced("container", HttpServer(http.url("container")))
    async with tool_servers.tool_server(tmp_path, turns, toolbox=toolbox) as served:
        body = {"tools": [tool], "tool_choice": choice}
        received = await tool_servers.respond(served, "stream", body)
        prompts = tool_servers.prompts_read(served)
    assert received.types == ["shell_call", "shell_call_output", "mcp_call", "message"]
    assert (received.output[2]["server_label"], received.output[2]["output"]) == ("container", "typed ls")
    assert "## container\n\n// A container with a terminal.\nnamespace container {" in prompts[0]
    assert "// Type into the terminal.\ntype feed_chars = (_: {" in prompts[0]
    assert "workdir" not in prompts[0]
    assert "cleanup_session" not in prompts[0]
    assert prompts[2].endswith(
        '<|start|>assistant<|channel|>analysis to=container.feed_chars code<|message|>{"chars": "ls"}<|call|>'
        "<|start|>container.feed_chars to=assistant<|channel|>analysis<|message|>typed ls<|end|><|start|>assistant"
    )


async def test_allowed_tools_limit_a_built_in_tool(tmp_path: Path, http: HttpServers) -> None:
    tool = {"type": "mcp", "server_label": "container", "allowed_tools": ["feed_chars"]}
    turns = ["<|channel|>analysis to=container.exec code<|message|>{}<|call|>", tool_servers.answer_markup()]
    toolbox = replaced("container", HttpServer(http.url("container")))
    async with tool_servers.tool_server(tmp_path, turns, toolbox=toolbox) as served:
        received = await tool_servers.respond(served, "whole", {"tools": [tool]})
        prompt = tool_servers.prompts_read(served)[0]
    assert "type feed_chars" in prompt
    assert "type exec" not in prompt
    assert "shell_call" not in received.types


async def test_server_that_declares_nothing_is_offered_as_trained(tmp_path: Path) -> None:
    toolbox = replaced("container", HttpServer("http://127.0.0.1:1/mcp"))
    async with tool_servers.tool_server(tmp_path, toolbox=toolbox) as served:
        tool = {"type": "mcp", "server_label": "container"}
        received = await tool_servers.respond(served, "whole", {"tools": [tool]})
        assert "type exec" in tool_servers.prompts_read(served)[0]
    assert received.response["status"] == "completed"


async def test_tool_that_a_client_may_not_use_is_refused(tmp_path: Path, http: HttpServers) -> None:
    toolbox = replace(replaced("container", HttpServer(http.url("container"))), access=ToolAccess(frozenset()))
    async with tool_servers.tool_server(tmp_path, toolbox=toolbox) as served:
        status, body = await served.post({"input": "Hi", "tools": [{"type": "mcp", "server_label": "container"}]})
    assert (status, body["error"]["param"]) == (400, "tools[0].server_label")


async def test_chosen_function_of_an_operators_container_is_called(tmp_path: Path, http: HttpServers) -> None:
    turns = [
        "<|channel|>analysis to=container.feed_chars code<|message|>" + '{"chars": "ls"}<|call|>',
        tool_servers.answer_markup(),
    ]
    body = {
        "tools": [{"type": "mcp", "server_label": "container"}],
        "tool_choice": {"type": "mcp", "server_label": "container", "name": "feed_chars"},
    }
    toolbox = replaced("container", HttpServer(http.url("container")))
    async with tool_servers.tool_server(tmp_path, turns, toolbox=toolbox) as served:
        received = await tool_servers.respond(served, "whole", body)
    assert received.types == ["mcp_call", "message"]
