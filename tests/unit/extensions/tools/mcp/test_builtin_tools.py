"""A configured server in place of a built-in tool."""

from __future__ import annotations

import json

import pytest

from penstock.extensions.tools.mcp.builtin_tools import McpHost
from penstock.extensions.tools.mcp.listings import Listing
from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.pipeline.frames import CodeOutputs, McpError, ResolvedRequest, ShellOutput
from penstock.pipeline.protocol.tools import McpServer, Toolset
from penstock.pipeline.secret import Secret
from penstock.services.mcp_config import HttpServer
from penstock.services.tools import Acting, ServerUnavailable, ToolResult
from penstock.testing import ExampleCalls, check_host
from tests.support.mcp_servers import PATIENT, HttpServers, MakeServers, stdio_server
from tests.support.stored_responses import facts, response

pytestmark = pytest.mark.io


def conversation(response_id: str, *hosted: McpServer) -> ResolvedRequest:
    return ResolvedRequest(facts(response(response_id), tools=Toolset(hosted=hosted)))


async def test_host_keeps_all_rules(make: MakeServers, http: HttpServers) -> None:
    host = McpHost(make({"container": HttpServer(http.url("good"))}), "container")
    await check_host(host, ExampleCalls(("add", '{"a": 1, "b": 2}'), ("add", "{}"), ("hang", "{}")))


@pytest.mark.parametrize("over", ["stdio", "mcp"])
async def test_python_keeps_its_state_within_a_response(over: str, make: MakeServers, http: HttpServers) -> None:
    config = stdio_server("python") if over == "stdio" else HttpServer(http.url("python"))
    host = McpHost(make({"python": config}), "python")
    mine, other = host.session(conversation("resp_mine")), host.session(conversation("resp_other"))
    assert await mine.run("python", "x = 41", PATIENT) == ToolResult("")
    assert await mine.run("python", "print(x + 1)", PATIENT) == ToolResult(
        "42\n", data=CodeOutputs(({"type": "logs", "logs": "42\n"},))
    )
    failed = await other.run("python", "print(x)", PATIENT)
    assert failed.error == "Error executing tool python"
    assert failed.data == CodeOutputs(({"type": "logs", "logs": failed.error},))
    await mine.close()
    await other.close()
    await host.close()


async def test_shown_output_is_bounded(make: MakeServers) -> None:
    session = McpHost(make({"python": stdio_server("python")}), "python").session(conversation("resp_1"))
    outcome = await session.run("python", "print('a' + 'x' * 99_998)", PATIENT)
    assert outcome.data == CodeOutputs(({"type": "logs", "logs": outcome.result},))
    assert outcome.result.startswith("ax")
    assert outcome.result.endswith("x\n")
    assert "x\n[... 36000 characters left out ...]\nx" in outcome.result
    await session.close()


async def test_browser_and_container_take_json(make: MakeServers, http: HttpServers) -> None:
    kinds: tuple[str, ...] = ("browser", "container")
    servers = make({kind: HttpServer(http.url(kind)) for kind in kinds})
    browser, container = (McpHost(servers, kind).session(conversation("resp_1")) for kind in kinds)
    assert await browser.run("search", '{"query": "fjords", "topn": 3}', PATIENT) == ToolResult(
        "[0] 3 results for fjords"
    )
    assert await browser.run("open", '{"id": 7}', PATIENT) == ToolResult("[1] page 7")
    assert "not valid JSON" in str((await browser.run("find", "{", PATIENT)).error)
    ended = {"type": "exit", "exit_code": 0}
    shown = {"stdout": "ran ls -l", "stderr": "", "outcome": ended}
    assert await container.run("exec", json.dumps({"cmd": ["ls", "-l"]}), PATIENT) == ToolResult(
        "ran ls -l", data=ShellOutput((shown,))
    )
    failed = await container.run("exec", "{}", PATIENT)
    assert failed.data == ShellOutput(({"stdout": "", "stderr": failed.error, "outcome": ended | {"exit_code": 1}},))
    await browser.close()
    await container.close()


def test_browser_actions_are_read_from_arguments(make: MakeServers) -> None:
    session = McpHost(make({"browser": stdio_server("browser")}), "browser").session(conversation("resp_1"))
    assert isinstance(session, Acting)
    assert session.action("search", '{"query": "fjords"}') == {"type": "search", "query": "fjords"}
    assert session.action("search", "{") == {"type": "search", "query": ""}
    assert session.action("open", '{"id": "https://a.example/"}') == {"type": "open_page", "url": "https://a.example/"}
    assert session.action("open", '{"id": 3}') == {"type": "open_page", "url": None}
    assert session.action("find", '{"pattern": "x"}') == {"type": "find_in_page", "pattern": "x", "url": ""}


async def test_headers_of_the_request_reach_the_server_of_a_built_in_tool(make: MakeServers, http: HttpServers) -> None:
    """They name the user to it; the id of the session and the operator's own headers cannot be replaced."""
    host = McpHost(make({"python": HttpServer(http.url("python"), {"X-Ours": "operators-own"})}), "python")
    sent = Secret({"X-Who": "client-0001", "X-Session-Id": "resp_other", "x-ours": "overwritten"})
    session = host.session(conversation("resp_mine_0001", McpServer("python", headers=sent)))

    async def received(name: str) -> str:
        return (await session.run("header", json.dumps({"name": name}), PATIENT)).result[::-1]

    assert [await received(name) for name in ("x-who", "x-session-id", "x-ours")] == [
        "client-0001",
        "resp_mine_0001",
        "operators-own",
    ]
    await session.close()


async def test_server_declares_its_functions(make: MakeServers, http: HttpServers) -> None:
    kinds: tuple[str, ...] = ("python", "container")
    servers = make({kind: HttpServer(http.url(kind)) for kind in kinds})
    python, container = [await McpHost(servers, kind).declaration(conversation("resp_1"), PATIENT) for kind in kinds]
    assert (python.description, [tool.name for tool in python.tools]) == ("Python with numpy.", ["python", "header"])
    assert container.description == "A container with a terminal."
    assert [(tool.namespace, tool.name, tool.description) for tool in container.tools] == [
        ("container", "exec", "Pretend to run it."),
        ("container", "feed_chars", "Type into the terminal."),
    ]
    assert (container.tools[1].parameters or {})["required"] == ["chars"]


async def test_failed_call_of_a_further_function_has_the_error_of_mcp(make: MakeServers, http: HttpServers) -> None:
    servers = make({"container": HttpServer(http.url("container"))})
    session = McpHost(servers, "container").session(conversation("resp_1"))
    assert await session.run("feed_chars", '{"chars": "ls"}', PATIENT) == ToolResult("typed ls")
    failed = await session.run("feed_chars", "{}", PATIENT)
    assert isinstance(failed.data, McpError)
    await session.close()


class Down(McpServers):
    """An operator's servers that cannot be listed."""

    listings = 0

    async def listing(self, server: McpServer, seconds: float) -> Listing:
        self.listings += 1
        raise ServerUnavailable("down")


async def test_server_that_is_down_holds_up_one_response_at_a_time() -> None:
    servers, now = Down({"python": stdio_server("python")}), [100.0]
    host = McpHost(servers, "python", lambda: now[0])
    own = conversation("resp_1", McpServer("python", headers=Secret({"X-Who": "client-0001"})))
    for request, listings in ((own, 1), (own, 2), (conversation("resp_2"), 3), (conversation("resp_3"), 3), (own, 4)):
        with pytest.raises(ServerUnavailable):
            await host.declaration(request, PATIENT)
        assert servers.listings == listings
    now[0] += 60
    with pytest.raises(ServerUnavailable, match="down"):
        await host.declaration(conversation("resp_4"), PATIENT)
