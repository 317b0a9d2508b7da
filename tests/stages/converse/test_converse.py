"""Turns: what goes on after a call, what waits for the client, and what a limit ends."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing
from typing import Any

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from pipeline.errors import ContextTooLong, EngineOverloaded
from pipeline.frames import (
    AnnotationAdded,
    CallFinished,
    CallStarted,
    CodeCallOpened,
    Conversation,
    ConversedFrame,
    FinishReason,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    McpCallOpened,
    McpListToolsOpened,
    MessageOpened,
    ParsedFrame,
    RefusalOpened,
    ResponseStarted,
    ShellCallOpened,
    TurnFinished,
    WebCallOpened,
)
from pipeline.protocol.items import (
    CodeInterpreterCall,
    FunctionCall,
    FunctionCallOutput,
    ListedTool,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from pipeline.protocol.tools import McpServer, McpTool, ToolFilter, Toolset
from pipeline.record import replay
from stages.converse.exchange import Limits
from stages.converse.tools import Outcome, Source, Toolbox
from tests.stages.converse.playing import (
    DOWN,
    Servers,
    Table,
    Tool,
    answer,
    approval,
    code,
    conversation,
    function,
    item,
    mcp,
    shell,
    thought,
    turn,
)

DOCS = Toolset(servers=(McpServer("docs", approves_rest=False),))


def kinds(frames: list[ConversedFrame]) -> list[str]:
    """The frames by name, text left out."""
    return [type(frame).__name__ for frame in frames if not isinstance(frame, ItemDelta)]


def reasons(frames: list[ConversedFrame]) -> list[FinishReason]:
    return [frame.reason for frame in frames if isinstance(frame, TurnFinished)]


# What passes


async def test_a_turn_without_calls_passes_as_it_came() -> None:
    """One turn of the model, frame by frame, is all there is."""
    table = Table([turn(thought(), function(), answer())])
    told = await table.talk()
    assert told[1:] == [*thought(), *function(), *answer(), told[-1]]
    assert isinstance(told[0], GenerationStarted)
    assert len(table.model.read) == 1
    assert table.tool.opened == 0


async def test_a_call_runs_between_two_turns() -> None:
    """The frames of a call surround its run, and the model reads what it returned."""
    table = Table([turn(thought(), code("1 + 1")), turn(answer())])
    told = await table.talk()
    assert kinds(told) == [
        *("GenerationStarted", "ReasoningOpened", "ItemClosed"),
        *("CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed", "TurnFinished"),
        *("GenerationStarted", "MessageOpened", "ItemClosed", "TurnFinished"),
    ]
    reasoning, call = table.model.read[1].input[1:]
    assert reasoning == Reasoning("rs_10000", content=(ReasoningText("Hm."),), status="completed")
    assert call == CodeInterpreterCall("ci_10001", "1 + 1", "", "completed")
    assert table.model.read[1].results == {"ci_10001": "2"}
    assert table.tool.calls == [("python", "1 + 1")]
    assert (table.tool.opened, table.tool.closed) == (1, 1)


async def test_v7_nothing_is_told_of_a_run_before_it_happens() -> None:
    """A call has started when that is told, and has finished when that is told."""
    table = Table([turn(code()), turn(answer())], tool=Tool(seconds=0.05))
    async with aclosing(table.converse(replay([conversation()]))) as frames:
        async for frame in frames:
            if isinstance(frame, CodeCallOpened | CallStarted):
                assert not table.tool.calls  # it begins with the next step of the loop
            if isinstance(frame, CallFinished):
                assert table.tool.calls
                assert not table.tool.running


async def test_the_shell_answers_in_an_item_of_its_own() -> None:
    """A shell call ends where it runs, and its output opens as it does."""
    wrote = ({"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},)
    table = Table([turn(shell()), turn(answer())], tool=Tool([Outcome("a", data=wrote)]))
    told = await table.talk()
    assert kinds(told)[1:8] == [
        *("ShellCallOpened", "ItemClosed"),
        *("ShellOutputOpened", "CallStarted", "CallFinished", "ItemClosed", "TurnFinished"),
    ]
    call, output = table.model.read[1].input[1:]
    assert isinstance(call, ShellCall)
    assert call.runs_here
    assert output == ShellCallOutput("sho_10001", call.call_id, wrote, "completed")
    assert table.model.read[1].results == {"sho_10001": "a"}


def written(opening: ItemOpened, text: str, *token_ids: int) -> list[ParsedFrame]:
    """An item in these tokens."""
    return [*item(opening, text)[:-1], ItemClosed(complete=True, token_ids=token_ids)]


async def test_tokens_and_results_go_with_their_items() -> None:
    """Each is known by its item's id, in later turns as well, beside those of the history."""
    ran = written(CodeCallOpened(), "1", 1, 2)
    spoken, listed = written(MessageOpened("commentary"), "So.", 4, 5), written(ShellCallOpened(), '{"cmd": ["ls"]}', 3)
    table = Table([turn(ran), turn(spoken, listed), turn(answer())], tool=Tool([Outcome("a"), Outcome("b")]))
    await table.talk(replace(conversation(), tokens={"rs_0": (9,)}, results={"ci_0": "z"}))
    assert table.model.read[0].tokens == {"rs_0": (9,)}
    assert table.model.read[1].tokens == {"rs_0": (9,), "ci_10000": (1, 2)}
    assert table.model.read[1].results == {"ci_0": "z", "ci_10000": "a"}
    assert table.model.read[2].tokens == {"rs_0": (9,), "ci_10000": (1, 2), "msg_10001": (4, 5), "sh_10002": (3,)}
    assert table.model.read[2].results == {"ci_0": "z", "ci_10000": "a", "sho_10003": "b"}
    assert [given.id for given in table.model.read[2].input[1:]] == ["ci_10000", "msg_10001", "sh_10002", "sho_10003"]


async def test_all_that_was_said_is_read_again() -> None:
    """What stands ahead of a call is part of the conversation, as it was said."""
    said = [item(MessageOpened("commentary"), "Wait."), item(RefusalOpened(), "No."), code()]
    table = Table([turn(*said), turn(answer())], tool=Tool([Outcome(error="It died.")]))
    await table.talk()
    assert table.model.read[1].input[1:] == (
        Message("msg_10000", "completed", "assistant", (OutputText("Wait."),), "commentary"),
        Message("msg_10001", "completed", "assistant", (Refusal("No."),), "final_answer"),
        CodeInterpreterCall("ci_10002", "1 + 1", "", "failed"),
    )
    assert table.model.read[1].results == {"ci_10002": "Error: It died."}


async def test_the_browser_tells_what_it_does() -> None:
    """The action of a call to the browser comes with its start."""
    table = Table([turn(item(WebCallOpened("search"), "ferrets")), turn(answer())])
    told = await table.talk()
    assert CallStarted({"type": "search", "query": "ferrets"}) in told
    found = table.model.read[1].input[-1]
    assert found == WebSearchCall("ws_10000", {"type": "search", "query": "ferrets"}, "completed")


class Browser(Tool):
    """A tool whose pages may be cited: there is one, behind cursor 0."""

    def source(self, cursor: int) -> Source | None:
        return Source("Ferrets", "https://ferrets.example/all") if cursor == 0 else None


MARKED = "Yes【0†L3】【1†L3】"


async def test_what_the_browser_showed_is_cited() -> None:
    """From the turn behind its first call on, marks of pages become links with notes."""
    search = item(WebCallOpened("search"), "ferrets")
    table = Table([turn(answer(MARKED), search), turn(answer(MARKED))], tool=Browser())
    told = await table.talk()
    begun = [at for at, frame in enumerate(told) if isinstance(frame, GenerationStarted)]
    assert told[begun[0] + 1 : begun[0] + 4] == answer(MARKED)[:3]
    text = "".join(frame.text for frame in told[begun[1] :] if isinstance(frame, ItemDelta))
    assert text == "Yes ([ferrets.example](https://ferrets.example/all))【1†L3】"
    (note,) = (frame.annotation for frame in told if isinstance(frame, AnnotationAdded))
    assert text[note["start_index"] : note["end_index"]] == "([ferrets.example](https://ferrets.example/all))"
    assert kinds(told)[-4:] == ["MessageOpened", "AnnotationAdded", "ItemClosed", "TurnFinished"]


async def test_what_the_browser_showed_earlier_is_cited() -> None:
    """Pages of the history are known as well, ahead of any call."""
    table = Table([turn(answer(MARKED))], tool=Browser())
    history = (WebSearchCall("ws_1", {"type": "search", "query": "ferrets"}, "completed"),)
    told = await table.talk(replace(conversation(), history=history))
    assert sum(isinstance(frame, AnnotationAdded) for frame in told) == 1
    assert isinstance(told[0], GenerationStarted)


LOGS: dict[str, Any] = {"type": "logs", "logs": "2"}
SEARCHED: dict[str, Any] = {"type": "search", "query": "ferrets"}
FOUND: dict[str, Any] = SEARCHED | {"sources": [{"type": "url", "url": "https://ferrets.example/all"}]}


@pytest.mark.parametrize(
    ("call", "data", "include", "shown"),
    [
        (code(), LOGS, (), ()),
        (code(), LOGS, ("code_interpreter_call.outputs",), (LOGS,)),
        (item(WebCallOpened("search")), FOUND, (), (SEARCHED,)),
        (item(WebCallOpened("search")), FOUND, ("web_search_call.action.sources",), (FOUND,)),
        (shell(), {"stdout": "a"}, (), ({"stdout": "a"},)),
    ],
)
async def test_some_of_what_calls_show_has_to_be_asked_for(
    call: list[ParsedFrame], data: dict[str, Any], include: tuple[str, ...], shown: tuple[dict[str, Any], ...]
) -> None:
    """The model reads it all the same."""
    table = Table([turn(call), turn(answer())], tool=Tool([Outcome("2", data=(data,))]))
    told = await table.talk(conversation(include=include))
    assert [frame.data for frame in told if isinstance(frame, CallFinished)] == [shown]
    assert list(table.model.read[1].results.values()) == ["2"]


# Several calls


@pytest.mark.parametrize(("parallel", "most"), [(True, 2), (False, 1)])
async def test_calls_of_one_turn_run_together_where_they_may(parallel: bool, most: int) -> None:
    """Each item is told whole before the next, whether they run at the same time or not."""
    table = Table([turn(code("a"), code("b")), turn(answer())], tool=Tool(seconds=0.02))
    given = conversation()
    told = await table.talk(replace(given, tools=replace(given.tools, parallel=parallel)))
    assert table.tool.most == most
    assert kinds(told)[1:10] == [*("CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed") * 2, "TurnFinished"]
    assert [call.text for call in table.model.read[1].input[1:] if isinstance(call, CodeInterpreterCall)] == ["a", "b"]


async def test_a_mixed_turn_waits_for_the_client() -> None:
    """Calls of the server run, and the response ends for the client to run its own."""
    table = Table([turn(code(), function(), thought())])
    told = await table.talk()
    assert kinds(told)[4:] == [
        *("ItemClosed", "FunctionCallOpened", "ItemClosed", "ReasoningOpened", "ItemClosed", "TurnFinished")
    ]
    assert table.tool.calls == [("python", "1 + 1")]
    assert reasons(told) == ["stop"]
    assert len(table.model.read) == 1


async def test_the_clients_call_ahead_of_the_servers_stays_ahead() -> None:
    """Items keep the order in which the model wrote them."""
    told = await Table([turn(function(), code())]).talk()
    assert kinds(told)[1:] == [
        *("FunctionCallOpened", "ItemClosed", "CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed"),
        "TurnFinished",
    ]


async def test_required_holds_until_a_call_was_made() -> None:
    """A choice that demands a call would demand one for ever."""
    table = Table([turn(code()), turn(answer())])
    given = conversation()
    await table.talk(replace(given, tools=replace(given.tools, choice="required")))
    assert [read.tools.choice for read in table.model.read] == ["required", "auto"]


async def test_v22_later_turns_are_scheduled_like_the_first() -> None:
    """No turn gets ahead of other requests, or needs a scheduler that knows priorities."""
    table = Table([turn(code()), turn(answer())])
    await table.talk()
    assert table.model.read[0].scheduling == table.model.read[1].scheduling


async def test_turns_take_as_long_as_their_tools() -> None:
    """The time of a turn is that of the engine and that of the calls behind it."""
    told = await Table([turn(code()), turn(answer())]).talk()
    assert [frame.duration for frame in told if isinstance(frame, TurnFinished)] == [2.0, 1.0]


async def test_the_first_turn_takes_as_long_as_what_came_ahead_of_it() -> None:
    """So a response is completed when it is, also where servers had to be asked first."""
    told = await Table([turn(mcp()), turn(answer())]).talk(conversation(tools=DOCS))
    assert [frame.duration for frame in told if isinstance(frame, TurnFinished)] == [3.0, 1.0]


# What goes wrong


@pytest.mark.parametrize(
    ("outcome", "told"),
    [
        (Outcome(error="no such page"), CallFinished("Error: no such page", "no such page")),
        (Outcome("half", "it died"), CallFinished("half\nError: it died", "it died")),
        (RuntimeError("bug"), CallFinished("Error: Internal error.", "Internal error.")),
    ],
)
async def test_a_failed_call_is_read_by_the_model(outcome: Outcome | Exception, told: CallFinished) -> None:
    """A fault of a tool ends its call, not the response."""
    table = Table([turn(mcp()), turn(answer())], servers=Servers(tool=Tool([outcome])))
    frames = await table.talk(conversation(tools=DOCS))
    assert told in frames
    failed = table.model.read[1].input[-1]
    assert isinstance(failed, McpCall)
    assert failed.status == "failed"
    assert failed.error is not None
    assert reasons(frames) == ["stop", "stop"]


async def test_a_tool_that_this_server_does_not_have_fails_as_an_item() -> None:
    """A response may have been accepted by another server, which has it."""
    table = Table([turn(code()), turn(answer())])
    converse = dataclasses.replace(table.converse, toolbox=Toolbox())
    told = [frame async for frame in converse(replay([conversation()]))]
    assert [frame.error for frame in told if isinstance(frame, CallFinished)] == [
        "There is no tool python.python here."
    ]
    assert reasons(told) == ["stop", "stop"]


async def test_v23_a_call_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that never answers holds a response only for the time that a call may take."""
    monkeypatch.setattr("stages.converse.sessions.GRACE", 0.0)
    table = Table([turn(code()), turn(answer())], tool=Tool(seconds=60), limits=Limits(call_seconds=0.02))
    (finished,) = (frame for frame in await table.talk() if isinstance(frame, CallFinished))
    assert finished.error == "The call took longer than 0.02 seconds."
    assert table.tool.cancelled == 1


async def test_what_a_call_returns_is_bounded() -> None:
    """Of a long result the model reads both ends, and how much is missing."""
    table = Table([turn(code()), turn(answer())], tool=Tool([Outcome("x" * 600)]), limits=Limits(result_characters=100))
    await table.talk()
    (result,) = table.model.read[1].results.values()
    assert result == "x" * 50 + "\n[... 500 characters left out ...]\n" + "x" * 50


async def test_an_error_of_a_later_turn_is_raised_behind_what_was_told() -> None:
    """Whoever comes behind ends the response: here the sessions are closed."""
    table = Table([turn(code())], error=ContextTooLong(9, 8))
    told = []
    with pytest.raises(ContextTooLong):
        async with aclosing(table.converse(replay([conversation()]))) as frames:
            told = [frame async for frame in frames]
    assert not told
    assert table.tool.closed == 1


async def test_a_full_engine_refuses_what_has_not_begun() -> None:
    """Before the first frame the client can be told to come again."""
    with pytest.raises(EngineOverloaded):
        await Table([], error=EngineOverloaded("Full.")).talk()


async def test_a_response_that_has_begun_waits_for_a_full_engine() -> None:
    """It goes on where it was, and nothing runs twice."""
    table = Table([turn(code())], error=EngineOverloaded("Full."), limits=Limits(retry_seconds=0.0))
    task = asyncio.create_task(table.talk())
    async with asyncio.timeout(5):
        while len(table.model.read) < 4:
            await asyncio.sleep(0)
    table.model.turns, table.model.error = [turn(answer())], None
    assert kinds(await task)[1:] == [
        *("CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed", "TurnFinished"),
        *("GenerationStarted", "MessageOpened", "ItemClosed", "TurnFinished"),
    ]
    assert len(table.tool.calls) == 1


async def test_leaving_ends_a_running_call_at_once() -> None:
    """A reader that goes takes the call along, and the session is closed."""
    table = Table([turn(code()), turn(answer())], tool=Tool(seconds=60))
    frames = table.converse(replay([conversation()]))
    async for frame in frames:
        if isinstance(frame, CallStarted):
            break
    await asyncio.sleep(0)
    await frames.aclose()
    assert (table.tool.running, table.tool.cancelled, table.tool.closed) == (0, 1, 1)


class Lingering(Tool):
    """A tool that takes a moment to end a call."""

    async def run(self, name: str, text: str, seconds: float) -> Outcome:
        try:
            return await super().run(name, text, seconds)
        finally:
            self.running += 1
            await asyncio.sleep(0.01)
            self.running -= 1

    async def close(self) -> None:
        assert not self.running
        await super().close()


async def test_a_session_is_closed_when_its_calls_have_ended() -> None:
    """What still uses it is waited for."""
    table = Table([turn(code()), turn(answer())], tool=Lingering(seconds=60))
    async with aclosing(table.converse(replay([conversation()]))) as frames:
        async for frame in frames:
            if isinstance(frame, CallStarted):
                break
        await asyncio.sleep(0)
    assert (table.tool.running, table.tool.cancelled, table.tool.closed) == (0, 1, 1)


async def test_cancelling_ends_a_running_call_at_once() -> None:
    """So does whoever cancels the task that waits for it."""
    table = Table([turn(code()), turn(answer())], tool=Tool(seconds=60))
    task = asyncio.create_task(table.talk())
    async with asyncio.timeout(5):
        while not table.tool.running:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (table.tool.running, table.tool.cancelled, table.tool.closed) == (0, 1, 1)


@pytest.mark.parametrize("reason", ["length", "content_filter", "cancelled"])
async def test_a_turn_that_did_not_end_by_itself_runs_nothing(reason: FinishReason) -> None:
    """What nobody would read is not run: its item is left incomplete, and is the last."""
    table = Table([turn(code("a"), answer(), reason=reason)])
    told = await table.talk()
    assert kinds(told)[1:] == ["CodeCallOpened", "ItemClosed", "TurnFinished"]
    assert told[-2:] == [ItemClosed(complete=False), told[-1]]
    assert reasons(told) == [reason]
    assert not table.tool.calls


async def test_a_call_that_was_cut_is_not_run() -> None:
    """Half the arguments are none."""
    table = Table([turn(code("a", complete=False), reason="length")])
    assert kinds(await table.talk())[1:] == ["CodeCallOpened", "ItemClosed", "TurnFinished"]
    assert not table.tool.calls


# Limits


@pytest.mark.parametrize(("most", "ran"), [(1, 1), (2, 2), (3, 3), (4, 3)])
async def test_a_response_makes_so_many_calls_and_no_more(most: int, ran: int) -> None:
    """The call that is one too many is left incomplete, and ends the response."""
    table = Table([turn(code("a")), turn(code("b"), code("c")), turn(answer())])
    told = await table.talk(conversation(max_tool_calls=most))
    assert len(table.tool.calls) == ran
    assert reasons(told)[-1] == ("stop" if most >= 3 else "max_tool_calls")
    if most < 3:
        assert told[-2] == ItemClosed(complete=False)


async def test_a_response_takes_so_many_turns_and_no_more() -> None:
    """A model that calls for ever is stopped, and what it still asks for is not run."""
    table = Table([turn(code())], limits=Limits(turns=3))
    told = await table.talk()
    assert reasons(told) == ["stop", "stop", "max_turns"]
    assert len(table.tool.calls) == 2


async def test_all_turns_share_the_tokens_of_the_response() -> None:
    """Each turn may write what those before it have left, and where they left nothing there is none."""
    given = conversation()
    table = Table([turn(code())])
    told = await table.talk(replace(given, sampling=replace(given.sampling, max_tokens=12)))
    assert [read.sampling.max_tokens for read in table.model.read] == [12, 7, 2]
    assert reasons(told) == ["stop", "stop", "length"]
    assert len(table.tool.calls) == 2


# Tools that do not exist


@pytest.mark.parametrize(
    ("recipient", "read"),
    [
        ("browser.search", (FunctionCall("fc_10000", "call_10000", "search", "{}", "completed", "browser"),)),
        ("python", (CodeInterpreterCall("ci_10000", "{}", "", "completed"),)),
    ],
)
async def test_an_undeclared_tool_is_answered_once(recipient: str, read: tuple[object, ...]) -> None:
    """The model learns that there is none, and goes on; when it tries again, that is all."""
    table = Table([turn(thought("{}", recipient))])
    told = await table.talk(conversation(tools=Toolset()))
    assert kinds(told) == ["GenerationStarted", "ReasoningOpened", "ItemClosed", "TurnFinished"] * 2
    assert table.model.read[1].input[1:2] == read
    outputs = [given.text for given in table.model.read[1].input if isinstance(given, FunctionCallOutput)]
    assert [*outputs, *table.model.read[1].results.values()] == [
        f"Error: there is no tool '{recipient}'. Go on without it."
    ]


async def test_an_undeclared_tool_is_not_answered_where_no_turn_is_left() -> None:
    """A limit holds for the answer to that as well."""
    given = conversation(tools=Toolset())
    table = Table([turn(thought("{}", "python"))])
    told = await table.talk(replace(given, sampling=replace(given.sampling, max_tokens=5)))
    assert reasons(told) == ["stop"]


async def test_words_to_nobody_ahead_of_an_answer_need_no_answer() -> None:
    """Only where the turn ends with them does the model wait for something."""
    table = Table([turn(thought("{}", "browser.search"), answer())])
    await table.talk(conversation(tools=Toolset()))
    assert len(table.model.read) == 1


# Servers of tools


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
