"""Tools of MCP servers: listing, filters and approvals."""

from __future__ import annotations

import asyncio

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.protocol.items import ListedTool, McpApprovalRequest, McpApprovalResponse, McpCall, McpListTools
from penstock.pipeline.protocol.tools import FunctionTool, HostedTool, McpServer, McpTool, ToolFilter, Toolset
from penstock.services.tools import Declaration
from penstock.stages.converse.tool_loop import Limits
from tests.support import scripted_tools


async def test_servers_are_listed_once_before_the_first_turn() -> None:
    tool = ListedTool("add", {"type": "object"}, "Adds.")
    table = scripted_tools.ScriptedConverse(
        [scripted_tools.turn(scripted_tools.mcp()), scripted_tools.turn(scripted_tools.answer())],
        servers=scripted_tools.ScriptedServers([tool]),
    )
    started, *yielded = await table.talk(scripted_tools.conversation(tools=scripted_tools.DOCS))
    assert isinstance(started, frames.ResponseStarted)
    assert yielded[:4] == [
        frames.McpListToolsOpened("docs"),
        frames.CallStarted(),
        frames.CallFinished(data=frames.ListedTools((tool,))),
        frames.ItemClosed(complete=True),
    ]
    assert table.model.read[0].facts.tools.tools == (McpTool("docs", "add", "Adds.", {"type": "object"}),)
    assert table.servers.listings == 1
    assert table.model.read[1].facts.input[-1] == McpCall("mcp_10001", "docs", "add", "{}", "completed", "2")


async def test_allowed_tool_that_a_server_does_not_have_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    table = scripted_tools.ScriptedConverse(
        [scripted_tools.turn(scripted_tools.answer())], servers=scripted_tools.ScriptedServers([ListedTool("add", {})])
    )
    docs = replace(scripted_tools.DOCS, servers=(McpServer("docs", allowed=ToolFilter(("ad", "add"))),))
    await table.talk(scripted_tools.conversation(tools=docs))
    assert [line for line in caplog.messages if "allowed" in line] == [
        "The MCP server docs has none of these allowed tools: ad"
    ]


async def test_unavailable_server_fails_as_an_item() -> None:
    table = scripted_tools.ScriptedConverse(
        [scripted_tools.turn(scripted_tools.answer())],
        servers=scripted_tools.ScriptedServers(scripted_tools.SERVER_DOWN),
    )
    yielded = await table.talk(scripted_tools.conversation(tools=scripted_tools.DOCS))
    assert frames.CallFinished(error=str(scripted_tools.SERVER_DOWN)) in yielded
    assert table.model.read[0].facts.tools.tools == ()
    assert scripted_tools.finish_reasons(yielded) == ["stop"]


async def test_hanging_server_fails_as_an_item() -> None:

    class Hanging(scripted_tools.ScriptedServers):
        async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
            await asyncio.Event().wait()
            return ()

    table = scripted_tools.ScriptedConverse(
        [scripted_tools.turn(scripted_tools.answer())], servers=Hanging(), limits=Limits(listing_seconds=0.01)
    )
    assert frames.CallFinished(error="The server did not answer within 0.01 seconds.") in await table.talk(
        scripted_tools.conversation(tools=scripted_tools.DOCS)
    )


async def test_server_listed_earlier_is_not_listed_again() -> None:
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    history = (McpListTools("mcpl_1", "docs", (ListedTool("add", {}),)),)
    yielded = await table.talk(replace(scripted_tools.conversation(tools=scripted_tools.DOCS), history=history))
    assert isinstance(yielded[0], frames.GenerationStarted)
    assert table.servers.listings == 0
    assert table.model.read[0].facts.tools.tools == (McpTool("docs", "add", None, {}),)


async def test_server_that_failed_earlier_is_listed_again() -> None:
    """It may be up by now."""
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    history = (McpListTools("mcpl_1", "docs", (), "It was down."),)
    await table.talk(replace(scripted_tools.conversation(tools=scripted_tools.DOCS), history=history))
    assert table.servers.listings == 1
    assert len(table.model.read[0].facts.tools.tools) == 1


async def test_server_description_is_that_of_its_namespace() -> None:
    given = Toolset(servers=(McpServer("docs", description="The manual."),), descriptions={"crm": "Customers."})
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    await table.talk(scripted_tools.conversation(tools=given))
    assert table.model.read[0].facts.tools.descriptions == {"crm": "Customers.", "docs": "The manual."}


async def test_programs_are_described_with_the_tools_that_were_listed() -> None:
    given = Toolset(
        (HostedTool("program", "program"), FunctionTool("ping")),
        servers=(McpServer("docs", approves_rest=False, callers="both"),),
        in_programs=(FunctionTool("ping"),),
    )
    table = scripted_tools.ScriptedConverse(
        [scripted_tools.turn(scripted_tools.mcp()), scripted_tools.turn(scripted_tools.answer())],
    )
    await table.talk(scripted_tools.conversation(tools=given))
    told = [request.facts.tools.descriptions["program"] for request in table.model.read]
    assert "async def ping()" in told[0]
    assert "async def add()" in told[0]
    assert told[1] == told[0]


@pytest.mark.parametrize(
    ("server", "offered"),
    [
        (McpServer("docs", allowed=ToolFilter(("read",))), {"read": True}),
        (McpServer("docs", allowed=ToolFilter(read_only=True), approves_rest=False), {"read": False}),
        (McpServer("docs", never=ToolFilter(read_only=True)), {"read": False, "write": True}),
        (McpServer("docs", always=ToolFilter(("write",)), approves_rest=False), {"read": False, "write": True}),
        (McpServer("docs", always=ToolFilter(("read",)), never=ToolFilter(("read",))), {"read": True, "write": True}),
    ],
)
async def test_filters_decide_what_is_offered_and_needs_approval(server: McpServer, offered: dict[str, bool]) -> None:
    listed = [
        ListedTool("read", {}, UNSET, {"readOnlyHint": True}),
        ListedTool("write", {}),
        ListedTool("not a name", {}),
    ]
    if server.allowed is None:
        listed.pop()
    table = scripted_tools.ScriptedConverse(
        [scripted_tools.turn(scripted_tools.answer())], servers=scripted_tools.ScriptedServers(listed)
    )
    await table.talk(scripted_tools.conversation(tools=Toolset(servers=(server,))))
    tools = table.model.read[0].facts.tools.tools
    assert {tool.name: tool.needs_approval for tool in tools if isinstance(tool, McpTool)} == offered


# Approval

REQUEST = McpApprovalRequest("mcpr_1", "docs", "add", '{"a": 1}')


def approving(*, approve: bool = True, request: McpApprovalRequest = REQUEST) -> frames.ResolvedRequest:
    given = scripted_tools.conversation(McpApprovalResponse("mcpa_1", "mcpr_1", approve), tools=scripted_tools.DOCS)
    return replace(given, history=(McpListTools("mcpl_1", "docs", (ListedTool("add", {}),)), request))


async def test_call_that_needs_approval_waits_for_the_client() -> None:
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.approval())])
    yielded = await table.talk(scripted_tools.conversation(tools=scripted_tools.DOCS))
    assert scripted_tools.finish_reasons(yielded) == ["stop"]
    assert not table.servers.tool.calls


async def test_approved_call_is_made_first() -> None:
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    yielded = await table.talk(approving())
    assert yielded[1:3] == [frames.McpCallOpened("docs", "add", "mcpr_1"), frames.ItemDelta('{"a": 1}')]
    assert table.servers.tool.calls == [("add", '{"a": 1}')]
    assert table.model.read[0].facts.input[-1] == McpCall(
        "mcp_10000", "docs", "add", '{"a": 1}', "completed", "2", approval_request_id="mcpr_1"
    )


async def test_approved_call_counts_for_the_limit() -> None:
    given = approving()
    table = scripted_tools.ScriptedConverse(
        [scripted_tools.turn(scripted_tools.mcp()), scripted_tools.turn(scripted_tools.answer())]
    )
    yielded = await table.talk(frames.with_facts(given, response=replace(given.facts.response, max_tool_calls=1)))
    assert [frame.ran for frame in yielded if isinstance(frame, frames.CallFinished)] == [True, False]
    assert len(table.servers.tool.calls) == 1


async def test_approved_calls_beyond_the_limit_are_refused() -> None:
    given = approving()
    more = replace(given.facts.input[0], id="mcpa_2", approval_request_id="mcpr_2")
    given = replace(given, history=(*given.history, replace(REQUEST, id="mcpr_2")))
    begun = replace(given.facts.response, max_tool_calls=1)
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    yielded = await table.talk(frames.with_facts(given, response=begun, input=(*given.facts.input, more)))
    assert [frame.ran for frame in yielded if isinstance(frame, frames.CallFinished)] == [True, False]
    assert len(table.servers.tool.calls) == 1
    assert scripted_tools.finish_reasons(yielded) == ["stop"]


async def test_refused_call_is_not_made() -> None:
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    assert isinstance((await table.talk(approving(approve=False)))[0], frames.GenerationStarted)
    assert not table.servers.tool.calls


@pytest.mark.parametrize(("label", "name"), [("python", "python"), ("browser", "open"), ("container", "exec")])
async def test_approval_cannot_run_built_in_tools(label: str, name: str) -> None:
    """A client cannot run code by a made-up call."""
    request = replace(REQUEST, server_label=label, name=name, arguments='{"cmd": ["ls"]}')
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    given = scripted_tools.conversation(request, McpApprovalResponse("mcpa_1", request.id, True))
    yielded = await table.talk(given)
    assert frames.CallFinished(error="The servers of this request offer no such tool.") in yielded
    assert not table.tool.calls


async def test_approved_call_is_made_once() -> None:
    given = approving()
    made = McpCall("mcp_1", "docs", "add", "{}", "completed", "2", approval_request_id="mcpr_1")
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    await table.talk(replace(given, history=(*given.history, made)))
    assert not table.servers.tool.calls


async def test_approval_is_limited_to_tools_of_the_request() -> None:
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())])
    yielded = await table.talk(approving(request=replace(REQUEST, name="drop")))
    assert scripted_tools.frame_kinds(yielded)[1:5] == ["McpCallOpened", "CallStarted", "CallFinished", "ItemClosed"]
    assert frames.CallFinished(error="The servers of this request offer no such tool.") in yielded
    assert not table.servers.tool.calls


# Built-in tools that their host declares


class Declarer(scripted_tools.ScriptedTool):
    """A host of Python that declares functions of its own."""

    async def declaration(self, request: frames.ResolvedRequest, seconds: float) -> Declaration:
        names = ("python", "reset", "reset", "not a name")
        return Declaration(tuple(HostedTool("python", name) for name in names))


async def test_host_offers_only_names_that_the_model_can_write() -> None:
    table = scripted_tools.ScriptedConverse([scripted_tools.turn(scripted_tools.answer())], tool=Declarer())
    given = Toolset(tools=(HostedTool("python", "python"),))
    await table.talk(scripted_tools.conversation(tools=given))
    assert [tool.name for tool in table.model.read[0].facts.tools.tools] == ["python", "reset"]
