from __future__ import annotations

from pathlib import Path

import pytest

from penstock.stages.converse.tool_loop import Limits
from penstock.stages.services.sandbox.probe import Sandbox
from tests.support import tool_servers
from tests.support.event_streams import final, read_sse
from tests.support.mcp_servers import HttpServers, stdio_server


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


@pytest.mark.defect("B24", "B25", "29")
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
