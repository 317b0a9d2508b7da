"""Tools that are interrupted or die: a client leaves, a response ends, a server fails.  Nothing of them is left."""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.services.mcp_config import HttpServer
from tests.support.api_clients import StreamReader, wait_until
from tests.support.event_streams import final, read_sse
from tests.support.mcp_servers import HttpServers, stdio_server
from tests.support.processes import descendants
from tests.support.server import ScriptedServer
from tests.support.tool_servers import (
    CODE_TOOL,
    MODES,
    Json,
    answer_markup,
    call_markup,
    join_calls,
    mcp_tool,
    play_turns,
    python_markup,
    respond,
    running_tasks,
    tool_server,
)


async def leave(served: ScriptedServer, stream: StreamReader, response_id: str) -> None:
    stream.answer.close()


async def cancel(served: ScriptedServer, stream: StreamReader, response_id: str) -> None:
    status, answer = await served.cancel(response_id)
    assert (status, answer["status"], answer["output"][-1]["status"]) == (200, "cancelled", "incomplete")
    assert final(read_sse(await stream.rest())).status == "cancelled"
    assert await served.get_response(response_id) == answer


async def delete(served: ScriptedServer, stream: StreamReader, response_id: str) -> None:
    assert (await served.delete(f"/v1/responses/{response_id}"))[0] == 200
    assert final(read_sse(await stream.rest())).status == "cancelled"
    assert (await served.get(f"/v1/responses/{response_id}"))[0] == 404


async def drain(served: ScriptedServer, stream: StreamReader, response_id: str) -> None:
    """Stop the server as SIGTERM does, until the drain time is over."""
    reader = asyncio.create_task(stream.rest())
    await served.scheduler.drain(0.05)
    assert final(read_sse(await reader)).status == "failed"
    assert (await served.get_response(response_id))["status"] == "failed"


End = Callable[[ScriptedServer, StreamReader, str], Awaitable[None]]
ENDS: list[tuple[End, Json]] = [
    (leave, {}),
    (cancel, {}),
    (cancel, {"background": True}),
    (delete, {}),
    (delete, {"background": True}),
    (drain, {}),
    (drain, {"background": True}),
]
"""Ways to end a response during a tool call, each with the fields of the request."""
ending = pytest.mark.parametrize(("end", "way"), ENDS, ids=lambda part: getattr(part, "__name__", str(part)))


async def settled(before: Counter[str]) -> None:
    """Wait until this process runs only the tasks that it ran before."""
    await wait_until(lambda: running_tasks() <= before)


async def hung(http: HttpServers) -> tuple[int, int]:
    """Return the number of calls of the MCP servers that hang, and the number of them that were cancelled."""
    state = await asyncio.to_thread(http.state)
    return state.get("hang", 0), state.get("hang cancelled", 0)


async def reaches(http: HttpServers, begun: int, over: int) -> None:
    async with asyncio.timeout(120):
        while await hung(http) != (begun, over):
            await asyncio.sleep(0.02)


# Interrupted

HANG = call_markup("docs.hang", {})
STATE = call_markup("docs.state", {})


@pytest.mark.defect("30")
@ending
@pytest.mark.parametrize("owner", ["operator", "request"])
async def test_calls_end_with_their_response(
    tmp_path: Path, http: HttpServers, owner: str, end: End, way: Json
) -> None:
    tool, servers = (
        (mcp_tool(), {"docs": HttpServer(http.url())}) if owner == "operator" else (mcp_tool(url=http.url()), {})
    )
    async with tool_server(tmp_path, servers=servers) as served:
        play_turns(served.engine, STATE, answer_markup())
        await respond(served, "stream", {"tools": [tool]})
        before, (begun, over) = running_tasks(), await hung(http)
        play_turns(served.engine, join_calls(HANG, HANG), answer_markup())
        async with served.open_stream({"tools": [tool], **way}) as stream:
            response_id = await stream.response_id()
            await reaches(http, begun + 2, over)
            await end(served, stream, response_id)
        await reaches(http, begun + 2, over + 2)
        await settled(before)
        await wait_until(lambda: len(served.scheduler.runs) == 0)
        if end is not drain:
            play_turns(served.engine, STATE, answer_markup())
            again = await respond(served, "whole", {"tools": [tool]})
            assert [item["status"] for item in again.output if item["type"] == "mcp_call"] == ["completed"]


@pytest.mark.defect("30")
async def test_stdio_server_survives_an_abandoned_call(tmp_path: Path) -> None:
    async with tool_server(tmp_path, servers={"docs": stdio_server()}) as served:
        states = []
        for _ in range(2):
            play_turns(served.engine, STATE, answer_markup())
            received = await respond(served, "stream", {"tools": [mcp_tool()]})
            states.append(json.loads(received.output[-2]["output"]))
            play_turns(served.engine, HANG, answer_markup())
            before = running_tasks()
            async with served.open_stream({"tools": [mcp_tool()]}) as stream:
                await stream.upto(b"mcp_call_arguments.done")
            await settled(before)
    first, second = states
    assert second["pid"] == first["pid"]
    assert second.get("hang", 0) == second.get("hang cancelled", 0)


@pytest.mark.defect("30")
async def test_call_ends_with_its_unstreamed_client(tmp_path: Path, http: HttpServers) -> None:
    async with tool_server(tmp_path, [HANG, answer_markup()]) as served:
        before, (begun, over) = running_tasks(), await hung(http)
        responding = asyncio.create_task(served.post({"input": "Hi", "tools": [mcp_tool(url=http.url())]}))
        await reaches(http, begun + 1, over)
        responding.cancel()
        await reaches(http, begun + 1, over + 1)
        await settled(before)
        await wait_until(lambda: len(served.scheduler.runs) == 0)


@pytest.mark.defect("30")
async def test_detached_response_keeps_its_call(tmp_path: Path, http: HttpServers) -> None:
    door = tmp_path / "door"
    turns = [call_markup("docs.wait", {"path": str(door)}), answer_markup()]
    async with tool_server(tmp_path, turns, detaches=True) as served:
        before = running_tasks()
        async with served.open_stream({"tools": [mcp_tool(url=http.url())]}) as stream:
            response_id = await stream.response_id()
            await stream.upto(b"mcp_call_arguments.done")
        door.touch()
        assert (await served.wait_for_end(response_id))["status"] == "completed"
        await settled(before)


@pytest.mark.parametrize("way", [{}, {"background": True}], ids=str)
async def test_response_can_be_cancelled_during_a_listing(tmp_path: Path, http: HttpServers, way: Json) -> None:
    tools = [mcp_tool("mute", http.url("mute")), mcp_tool(url=http.url())]
    async with tool_server(tmp_path) as served, served.open_stream({"tools": tools, **way}) as stream:
        response_id = await stream.response_id()
        await stream.upto(b"mcp_list_tools.in_progress")
        status, answer = await served.cancel(response_id)
        response = final(read_sse(await stream.rest()))
        assert (status, answer["status"], response.status) == (200, "cancelled", "cancelled")
        (listing,) = answer["output"]
        assert (listing["server_label"], listing["tools"], bool(listing["error"])) == ("mute", [], True)
        assert served.engine.prompts == []


@pytest.mark.defect("30")
@ending
async def test_processes_of_code_end_with_its_response(tmp_path: Path, sandbox: Sandbox, end: End, way: Json) -> None:
    async with tool_server(tmp_path, [python_markup("while True: pass")], sandbox=sandbox) as served:
        await respond(served, "stream", {"tools": [CODE_TOOL], "tool_choice": "none"})
        before, others = running_tasks(), descendants(os.getpid())
        async with served.open_stream({"tools": [CODE_TOOL], **way}) as stream:
            response_id = await stream.response_id()
            await stream.upto(b"code_interpreter_call.interpreting")
            await wait_until(lambda: descendants(os.getpid()) - others)
            await end(served, stream, response_id)
        await wait_until(lambda: not descendants(os.getpid()) - others)
        await settled(before)


@pytest.mark.defect("30")
async def test_ended_container_leaves_no_process(tmp_path: Path, sandbox: Sandbox) -> None:
    turns = [python_markup("x = 1"), python_markup("print(x)"), answer_markup()]
    async with tool_server(tmp_path, turns, sandbox=sandbox, resources=("containers",)) as served:
        others = descendants(os.getpid())
        received = await respond(
            served, "background", {"tools": [CODE_TOOL], "include": ["code_interpreter_call.outputs"]}
        )
        assert received.output[1]["outputs"] == [{"type": "logs", "logs": "1\n"}]
        assert descendants(os.getpid()) - others  # its container outlives the response
        container_id = received.output[1]["container_id"]
        assert (await served.delete(f"/v1/containers/{container_id}"))[0] == 200
        await wait_until(lambda: not descendants(os.getpid()) - others)


# Dead

NOBODY = "http://127.0.0.1:9/mcp"


@pytest.mark.defect("V7")
@pytest.mark.parametrize("mode", MODES)
async def test_unavailable_server_is_a_failed_item(tmp_path: Path, mode: str) -> None:
    async with tool_server(tmp_path, [answer_markup()], servers={"files": HttpServer(NOBODY)}) as served:
        received = await respond(served, mode, {"tools": [mcp_tool(url=NOBODY), mcp_tool("files")]})
        assert received.types == ["mcp_list_tools", "mcp_list_tools", "message"]
        assert received.response["status"] == "completed"
        for index in (0, 1):
            assert (received.output[index]["tools"], bool(received.output[index]["error"])) == ([], True)
            assert received.ladder(index) == [
                "output_item.added",
                "mcp_list_tools.in_progress",
                "mcp_list_tools.failed",
                "output_item.done",
            ]
        play_turns(served.engine, call_markup("docs.echo", {}), answer_markup())
        received = await respond(served, mode, {"tools": [mcp_tool(url=NOBODY)]})
        assert (received.types[0], received.types[-1], received.response["status"]) == (
            "mcp_list_tools",
            "message",
            "completed",
        )
        assert "mcp_call" not in received.types


@pytest.mark.defect("V7")
@pytest.mark.parametrize("mode", ["background stream"])
async def test_server_that_dies_in_a_call_is_restarted(tmp_path: Path, mode: str) -> None:
    turns = [STATE, call_markup("docs.die", {}), STATE, answer_markup()]
    async with tool_server(tmp_path, turns, servers={"docs": stdio_server()}) as served:
        received = await respond(served, mode, {"tools": [mcp_tool()]})
    assert received.types == ["mcp_list_tools", *["mcp_call"] * 3, "message"]
    assert [item["status"] for item in received.output[1:4]] == ["completed", "failed", "completed"]
    assert received.ladder(2)[-2:] == ["mcp_call.failed", "output_item.done"]
    assert received.output[2]["error"]
    first, second = (json.loads(received.output[index]["output"]) for index in (1, 3))
    assert first["pid"] != second["pid"]
    assert received.response["status"] == "completed"
