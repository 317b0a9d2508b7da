"""Servers of tools: what they offer, what needs approval, and what is done with it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from pipeline.frames import (
    CallFinished,
    CallStarted,
    Conversation,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    McpCallOpened,
    McpListToolsOpened,
    ResponseStarted,
)
from pipeline.protocol.items import (
    ListedTool,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
)
from pipeline.protocol.tools import McpServer, McpTool, ToolFilter, Toolset
from stages.converse.exchange import Limits
from tests.support.scripted_tools import (
    DOCS,
    DOWN,
    Servers,
    Table,
    answer,
    approval,
    conversation,
    kinds,
    mcp,
    reasons,
    turn,
)


async def test_servers_are_asked_once_and_first() -> None:
    """What they offer is told ahead of the model's first turn, and is in its prompt."""
    tool = ListedTool("add", {"type": "object"}, "Adds.")
    table = Table([turn(mcp()), turn(answer())], servers=Servers([tool]))
    started, *told = await table.talk(conversation(tools=DOCS))
    assert isinstance(started, ResponseStarted)
    assert told[:4] == [
        McpListToolsOpened("docs"),
        CallStarted(),
        CallFinished(data=(msgspec.to_builtins(tool),)),
        ItemClosed(complete=True),
    ]
    assert table.model.read[0].tools.tools == (McpTool("docs", "add", "Adds.", {"type": "object"}),)
    assert table.servers.asked == 1
    assert table.model.read[1].input[-1] == McpCall("mcp_10001", "docs", "add", "{}", "completed", "2")


async def test_a_server_that_is_down_fails_as_an_item() -> None:
    """The model goes on without it."""
    table = Table([turn(answer())], servers=Servers(DOWN))
    told = await table.talk(conversation(tools=DOCS))
    assert CallFinished(error=str(DOWN)) in told
    assert table.model.read[0].tools.tools == ()
    assert reasons(told) == ["stop"]


async def test_a_server_that_hangs_fails_as_an_item() -> None:
    """So does one that does not answer in time."""

    class Hanging(Servers):
        async def tools(self, server: McpServer, seconds: float) -> tuple[ListedTool, ...]:
            await asyncio.sleep(60)
            return ()

    table = Table([turn(answer())], servers=Hanging(), limits=Limits(listing_seconds=0.01))
    assert CallFinished(error="The server did not answer within 0.01 seconds.") in await table.talk(
        conversation(tools=DOCS)
    )


async def test_a_server_that_was_asked_earlier_is_not_asked_again() -> None:
    """What the conversation knows of it counts."""
    table = Table([turn(answer())])
    history = (McpListTools("mcpl_1", "docs", (ListedTool("add", {}),)),)
    told = await table.talk(replace(conversation(tools=DOCS), history=history))
    assert isinstance(told[0], GenerationStarted)
    assert table.servers.asked == 0
    assert table.model.read[0].tools.tools == (McpTool("docs", "add", None, {}),)


async def test_a_server_that_could_not_be_asked_earlier_is_asked_again() -> None:
    """It may be up by now."""
    table = Table([turn(answer())])
    history = (McpListTools("mcpl_1", "docs", (), "It was down."),)
    await table.talk(replace(conversation(tools=DOCS), history=history))
    assert table.servers.asked == 1
    assert len(table.model.read[0].tools.tools) == 1


async def test_the_model_reads_what_a_server_is_for() -> None:
    """The client's words on a server are those on its namespace, beside those on other ones."""
    given = Toolset(servers=(McpServer("docs", description="The manual."),), descriptions={"crm": "Customers."})
    table = Table([turn(answer())])
    await table.talk(conversation(tools=given))
    assert table.model.read[0].tools.descriptions == {"crm": "Customers.", "docs": "The manual."}


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
async def test_the_request_says_what_may_be_called_and_what_needs_approval(
    server: McpServer, offered: dict[str, bool]
) -> None:
    """Names and read-only hints decide, and where two rules disagree the careful one does."""
    listed = [
        ListedTool("read", {}, UNSET, {"readOnlyHint": True}),
        ListedTool("write", {}),
        ListedTool("not a name", {}),
    ]
    if server.allowed is None:
        listed.pop()
    table = Table([turn(answer())], servers=Servers(listed))
    await table.talk(conversation(tools=Toolset(servers=(server,))))
    tools = table.model.read[0].tools.tools
    assert {tool.name: tool.needs_approval for tool in tools if isinstance(tool, McpTool)} == offered


# Approval

REQUEST = McpApprovalRequest("mcpr_1", "docs", "add", '{"a": 1}')


def approving(*, approve: bool = True, request: McpApprovalRequest = REQUEST) -> Conversation:
    given = conversation(McpApprovalResponse("mcpa_1", "mcpr_1", approve), tools=DOCS)
    return replace(given, history=(McpListTools("mcpl_1", "docs", (ListedTool("add", {}),)), request))


async def test_a_call_that_needs_approval_waits_for_the_client() -> None:
    """Nothing runs before somebody has agreed."""
    table = Table([turn(approval())])
    told = await table.talk(conversation(tools=DOCS))
    assert reasons(told) == ["stop"]
    assert not table.servers.tool.calls


async def test_an_approved_call_is_made_first() -> None:
    """With the very arguments that were approved of, and the model reads what it returned."""
    table = Table([turn(answer())])
    told = await table.talk(approving())
    assert told[1:3] == [McpCallOpened("docs", "add", "mcpr_1"), ItemDelta('{"a": 1}')]
    assert table.servers.tool.calls == [("add", '{"a": 1}')]
    assert table.model.read[0].input[-1] == McpCall(
        "mcp_10000", "docs", "add", '{"a": 1}', "completed", "2", approval_request_id="mcpr_1"
    )


async def test_an_approved_call_counts_among_those_of_its_response() -> None:
    """With it the response may have made all that it may."""
    given = approving()
    table = Table([turn(mcp())])
    told = await table.talk(replace(given, response=replace(given.response, max_tool_calls=1)))
    assert reasons(told) == ["max_tool_calls"]
    assert len(table.servers.tool.calls) == 1


async def test_a_refused_call_is_not_made() -> None:
    """The model reads of the refusal in the history."""
    table = Table([turn(answer())])
    assert isinstance((await table.talk(approving(approve=False)))[0], GenerationStarted)
    assert not table.servers.tool.calls


@pytest.mark.parametrize(("label", "name"), [("python", "python"), ("browser", "open"), ("container", "exec")])
async def test_the_client_s_word_runs_no_built_in_tool(label: str, name: str) -> None:
    """Their calls are the model's: what a client makes up runs no code."""
    request = replace(REQUEST, server_label=label, name=name, arguments='{"cmd": ["ls"]}')
    table = Table([turn(answer())])
    given = conversation(request, McpApprovalResponse("mcpa_1", request.id, True))
    told = await table.talk(given)
    assert CallFinished(error="The servers of this request offer no such tool.") in told
    assert not table.tool.calls


async def test_an_approved_call_is_made_once() -> None:
    """An approval that was used up earlier is worth nothing."""
    given = approving()
    made = McpCall("mcp_1", "docs", "add", "{}", "completed", "2", approval_request_id="mcpr_1")
    table = Table([turn(answer())])
    await table.talk(replace(given, history=(*given.history, made)))
    assert not table.servers.tool.calls


async def test_approval_reaches_no_further_than_the_tools_of_the_request() -> None:
    """A call of anything else fails, whoever approves of it."""
    table = Table([turn(answer())])
    told = await table.talk(approving(request=replace(REQUEST, name="drop")))
    assert kinds(told)[1:5] == ["McpCallOpened", "CallStarted", "CallFinished", "ItemClosed"]
    assert CallFinished(error="The servers of this request offer no such tool.") in told
    assert not table.servers.tool.calls
