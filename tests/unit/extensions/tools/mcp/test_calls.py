"""Listings and calls of real servers, over every transport."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec import UNSET

from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.pipeline.frames import McpError
from penstock.pipeline.protocol.items import ListedTool
from penstock.pipeline.protocol.tools import McpServer
from penstock.pipeline.secret import Secret
from penstock.services.mcp_config import HttpServer, StdioServer
from penstock.services.tools import ServerUnavailable, Session, ToolResult
from tests.support.mcp_servers import PATIENT, HttpServers, MakeServers, server_over, stdio_server
from tests.support.mcp_tools import MANY, PIXEL, TOKEN

pytestmark = pytest.mark.io

WAYS = ("stdio", "mcp", "sse", "legacy")


async def called(session: Session, tool: str, /, seconds: float = PATIENT, **arguments: Any) -> ToolResult:
    return await session.run(tool, json.dumps(arguments), seconds)


async def state(session: Session) -> dict[str, int]:
    counts: dict[str, int] = json.loads((await called(session, "state")).result)
    return counts


async def until(session: Session, name: str, more_than: int) -> None:
    async with asyncio.timeout(PATIENT):
        while (await state(session)).get(name, 0) <= more_than:
            await asyncio.sleep(0.01)


@pytest.mark.defect("29")
@pytest.mark.parametrize("over", WAYS)
async def test_every_transport_lists_and_calls(
    over: str, make: MakeServers, http: HttpServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers = make({"good": server_over(over, http)})
    monkeypatch.setenv("PENSTOCK_API_KEYS", "sk-ours")
    tools = {tool.name: tool for tool in await servers.tools(McpServer("good"), PATIENT)}
    assert tools["echo"].description == "Say it again."
    assert tools["echo"].input_schema["required"] == ["text"]
    assert tools["echo"].annotations == {"readOnlyHint": True}
    assert tools["add"].annotations is UNSET
    session = servers.session(McpServer("good"))
    assert await called(session, "add", a=2, b=3) == ToolResult("5")
    assert await called(session, "echo", text="Grüße\n你好") == ToolResult("Grüße\n你好")
    assert await called(session, "environment", name="PENSTOCK_API_KEYS") == ToolResult("")
    assert await called(session, "environment", name="GIVEN") == ToolResult("to it" if over == "stdio" else "")
    assert await called(session, "record") == ToolResult('{"n":1,"who":"Zoë"}')
    media = await called(session, "media")
    assert media.images == (f"data:image/png;base64,{PIXEL}",)
    assert media.result.splitlines() == [
        "See:",
        "[image: image/png]",
        "[audio: audio/wav]",
        "[resource: memo://one]",
        "Remember the milk.",
        "[resource: notes, memo://two]",
    ]
    failed = "Error executing tool boom: It went boom."
    content = [{"type": "text", "text": failed}]
    assert await called(session, "boom") == ToolResult(
        error=failed, data=McpError({"type": "mcp_tool_execution_error", "content": content})
    )
    assert (await called(session, "unheard_of")).error == "Unknown tool: unheard_of"
    assert "valid integer" in str((await called(session, "add", a="x", b=1)).error)


@pytest.mark.defect("V23", "30")
@pytest.mark.parametrize("over", WAYS)
async def test_call_ends_at_its_timeout_and_when_it_is_cancelled(
    over: str, make: MakeServers, http: HttpServers
) -> None:
    servers = make({"good": server_over(over, http)})
    session = servers.session(McpServer("good"))
    before = (await state(session)).get("hang cancelled", 0)
    late = "The server did not answer within 2 seconds."  # a busy one begins late, and what has not begun cannot end
    form = {"type": "mcp_protocol_error", "code": -32001, "message": late}
    assert await called(session, "hang", seconds=2) == ToolResult(error=late, data=McpError(form))
    await until(session, "hang cancelled", before)
    begun = (await state(session))["hang"]
    call = asyncio.create_task(called(session, "hang"))
    await until(session, "hang", begun)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(call, PATIENT / 2)
    await until(session, "hang cancelled", before + 1)


@pytest.mark.defect("30")
@pytest.mark.parametrize("over", ["mcp", "sse"])
async def test_abandoned_response_closes_its_connection(over: str, make: MakeServers, http: HttpServers) -> None:
    servers = make({"good": server_over("mcp", http)})
    watcher = servers.session(McpServer("good"))
    before = await state(watcher)
    session = servers.session(McpServer("x", http.url("good", over)))
    call = asyncio.create_task(called(session, "hang"))
    await until(watcher, "hang", before.get("hang", 0))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.create_task(session.close())
    await until(watcher, "hang cancelled", before.get("hang cancelled", 0))


async def test_calls_of_one_session_run_concurrently(make: MakeServers, http: HttpServers) -> None:
    servers = make()
    session = servers.session(McpServer("x", http.url()))
    before = (await state(session)).get("hang", 0)
    calls = [asyncio.create_task(called(session, "hang")) for _ in range(30)]
    await until(session, "hang", before + 29)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await session.close()


@pytest.mark.defect("B24")
async def test_session_outlives_the_task_that_opened_it(make: MakeServers, http: HttpServers) -> None:
    servers = make()
    before = http.state()["requests"]
    session = servers.session(McpServer("x", http.url()))
    assert http.state()["requests"] == before
    for text in ("one", "two"):
        assert await asyncio.create_task(called(session, "echo", text=text)) == ToolResult(text)
    await asyncio.create_task(session.close())
    assert (await called(session, "echo", text="three")).error == "The response has ended."


async def test_all_pages_of_a_listing_are_read(make: MakeServers, http: HttpServers) -> None:
    tools = await make().tools(McpServer("x", http.url("many")), PATIENT)
    assert [tool.name for tool in tools] == [f"tool_{n}" for n in range(MANY)]


async def test_endless_listing_is_refused(make: MakeServers, http: HttpServers) -> None:
    with pytest.raises(ServerUnavailable, match="more tools than the limit"):
        await make().tools(McpServer("x", http.url("endless")), PATIENT)


async def test_listing_is_fetched_once(make: MakeServers, http: HttpServers) -> None:
    servers = make()

    async def listed(**headers: str) -> tuple[ListedTool, ...]:
        return await servers.tools(McpServer("x", http.url("browser"), Secret(headers)), PATIENT)

    def posts() -> int:
        count: int = http.state()["requests"].get("POST /browser/mcp", 0)
        return count

    at_once = await asyncio.gather(*(listed() for _ in range(5)))
    before = posts()
    assert at_once.count(await listed()) == 5
    assert posts() == before
    await listed(authorization="Bearer another one")
    assert posts() > before


async def test_changed_tools_are_listed_again(make: MakeServers, http: HttpServers) -> None:
    servers = make({"good": HttpServer(http.url("legacy"))})
    before = await servers.tools(McpServer("good"), PATIENT)
    session = servers.session(McpServer("good"))
    assert (await called(session, "grow")).result == "grown"
    async with asyncio.timeout(PATIENT):
        while "grown" not in {tool.name for tool in await servers.tools(McpServer("good"), PATIENT)}:
            await asyncio.sleep(0.01)
    assert "grown" not in {tool.name for tool in before}


async def test_headers_are_sent_and_never_mixed(make: MakeServers, http: HttpServers) -> None:
    servers = make({"ours": HttpServer(http.url(), {"X-Ours": "operators-own"})})

    def named(value: str, *, of_operator: bool = False) -> Session:
        headers = Secret({"X-Who": value, "x-ours": "overwritten", "Host": "elsewhere"})
        return servers.session(McpServer("ours", None if of_operator else http.url(), headers))

    sessions = [named("client-0001"), named("client-0002"), named("client-0003", of_operator=True)]
    for _ in range(2):
        seen = await asyncio.gather(*(called(session, "header", name="x-who") for session in sessions))
        assert [outcome.result[::-1] for outcome in seen] == ["client-0001", "client-0002", "client-0003"]
    ours = [(await called(session, "header", name="x-ours")).result[::-1] for session in sessions]
    assert ours == ["overwritten", "overwritten", "operators-own"]
    plain = servers.session(McpServer("ours"))
    assert (await called(plain, "header", name="x-who")).result == ""
    await asyncio.gather(*(session.close() for session in sessions))


async def test_sse_only_server_is_detected(make: MakeServers, http: HttpServers) -> None:
    servers = make()
    server = McpServer("x", http.url("events"))
    assert await servers.tools(server, PATIENT)
    session = servers.session(server)
    assert await called(session, "add", a=1, b=1) == ToolResult("2")
    await session.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", "not a JSON object"),
        ("text", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
    ids=["open", "list", "text", "deep"],
)
async def test_arguments_that_are_no_json_are_explained_to_the_model(text: str, says: str, make: MakeServers) -> None:
    outcome = await make({"good": stdio_server()}).session(McpServer("good")).run("echo", text, PATIENT)
    assert says in str(outcome.error)
    assert outcome.data == McpError({"type": "mcp_protocol_error", "code": -32602, "message": outcome.error})


async def test_unreachable_servers_have_their_own_messages(make: MakeServers, http: HttpServers) -> None:
    servers = make({"lost": StdioServer("false"), "gone": StdioServer("/no/such/program")})

    async def why(server: McpServer, seconds: float = PATIENT) -> str:
        with pytest.raises(ServerUnavailable) as raised:
            await servers.tools(server, seconds)
        return str(raised.value)

    assert await why(McpServer("nobody")) == "There is no MCP server nobody here."
    assert await why(McpServer("x", http.url("guarded"))) == "The server answered with HTTP 401 (Unauthorized)."
    assert await why(McpServer("x", http.url("guarded", "sse"))) == "The server answered with HTTP 401 (Unauthorized)."
    assert await why(McpServer("x", http.url("broken"))) == "The server answered with HTTP 500 (Internal Server Error)."
    assert await why(McpServer("x", "http://127.0.0.1:1/mcp")) == "No connection to the server could be made."
    assert await why(McpServer("x", http.url("mute")), 0.2) == "The server did not answer within 0.2 seconds."
    assert await why(McpServer("x", "ftp://127.0.0.1/mcp")) == "The server's URL must begin with http:// or https://."
    assert "not followed" in await why(McpServer("x", http.url("away") + "?to=http://10.0.0.1/"))
    assert await why(McpServer("lost")) == "Connection closed"
    assert await why(McpServer("gone")) == "The server could not be started (FileNotFoundError)."
    assert await servers.tools(McpServer("x", http.url("guarded"), Secret({"Authorization": TOKEN})), PATIENT)
    refused = await called(servers.session(McpServer("x", http.url("guarded"))), "echo", text="hi")
    assert refused.data == McpError(
        {"type": "http_error", "code": 401, "message": "The server answered with HTTP 401 (Unauthorized)."}
    )


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        ("http://127.0.0.1:99999/mcp", {}),
        ("http://[::1/mcp", {}),
        ("http:///mcp", {}),
        ("http://exa mple/mcp", {}),
        ("http://a..b/mcp", {}),
        (f"http://{'a' * 300}/mcp", {}),
        ("http://127.0.0.1:1/mcp", {"X-Key": "two\r\nlines: here"}),
        ("http://127.0.0.1:1/mcp", {"X-Key": "ключ-от-квартиры"}),
        ("http://127.0.0.1:1/mcp", {"no name": "value"}),
    ],
)
async def test_unsendable_request_is_an_unavailable_server(
    url: str, headers: dict[str, str], make: MakeServers
) -> None:
    with pytest.raises(ServerUnavailable, match=r"^(The server|No connection|The communication)"):
        await make().tools(McpServer("x", url, Secret(headers)), PATIENT)


def test_labels_are_known_before_connecting(make: MakeServers) -> None:
    assert McpServers({"a": stdio_server(), "b": stdio_server()}).labels == {"a", "b"}
