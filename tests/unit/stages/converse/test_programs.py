"""Programs: their calls are items between them and their output, and those of the client put them to sleep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.frame_order import ConversedOrder
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.events import TerminalEvent
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, HostedTool, McpServer, McpTool, Toolset
from penstock.services.tools import NestedCall, PastCall, Toolbox, ToolResult
from penstock.stages.converse.converse import Converse
from penstock.stages.converse.programs import open_programs, past_calls
from penstock.stages.converse.sessions import Sessions
from penstock.stages.converse.turn import ToolCall
from penstock.stages.emit.emit import ResponseWriter
from tests.support.scripted_tools import (
    ScriptedConverse,
    ScriptedProgram,
    ScriptedTool,
    answer,
    conversation,
    finish_reasons,
    frame_kinds,
    function,
    item,
    turn,
)

ASK, TEXT = NestedCall((None, "ask"), '{"a": 1}'), NestedCall((None, "write"), "hello")
ADD, LOOK = NestedCall(("docs", "add"), '{"b": 2}'), NestedCall(("browser", "search"), '{"query": "x"}')

PROGRAM = HostedTool("program", "program")
LISTING = items.McpListTools("mcpl_1", "docs", (items.ListedTool("add", {}), items.ListedTool("drop", {})))
HELLO = items.Message("msg_0", "completed", "user", (items.InputText("Hello."),))
TOOLS = Toolset(
    tools=(PROGRAM,),
    servers=(McpServer("docs", approves_rest=False),),
    in_programs=(
        FunctionTool("ask"),
        CustomTool("write"),
        McpTool("docs", "add"),
        McpTool("docs", "drop", needs_approval=True),
        HostedTool("browser", "search"),
        HostedTool("python", "python"),
        HostedTool("container", "exec"),
    ),
)


@dataclass
class ProgramTable(ScriptedConverse):
    """A table at which the model writes a program, and then answers."""

    program: ScriptedProgram = field(default_factory=lambda: ScriptedProgram(()))

    def __post_init__(self) -> None:
        super().__post_init__()
        toolbox = replace_hosts(self.converse, {"program": self.program})
        self.converse = Converse(self.converse.inner, toolbox, self.limits, self.steering, self.converse.clock)


def replace_hosts(converse: Converse, hosts: dict[str, Any]) -> Toolbox:
    return Toolbox({**converse.toolbox.hosts, **hosts}, converse.toolbox.mcp)


def program(text: str = "run()") -> list[frames.ParsedFrame]:
    return item(frames.ProgramOpened(), text)


def table(*rounds: tuple[NestedCall, ...], tool: ScriptedTool | None = None) -> ProgramTable:
    scripted = ScriptedProgram(rounds)
    made = ProgramTable([turn(program()), turn(answer())], tool=tool or ScriptedTool(), program=scripted)
    made.servers.tool = made.tool
    return made


def order_of(yielded: Sequence[frames.ConversedFrame]) -> None:
    order = ConversedOrder()
    for frame in yielded:
        order.feed(frame)


async def test_program_without_calls_has_its_result_in_an_item_of_its_own() -> None:
    at = table()
    yielded = await at.talk(conversation(HELLO, LISTING, tools=TOOLS))
    assert frame_kinds(yielded)[:8] == [
        *("GenerationStarted", "ProgramOpened", "ItemClosed"),
        *("ProgramOutputOpened", "CallStarted", "CallFinished", "ItemClosed", "TurnFinished"),
    ]
    assert finish_reasons(yielded) == ["stop", "stop"]
    called, output = at.model.read[1].facts.input[2:]
    assert isinstance(called, items.Program)
    assert called.fingerprint == items.fingerprint_of("run()")
    assert output == items.ProgramOutput("progo_10001", called.call_id, "", "completed")


async def test_calls_of_this_server_run_between_a_program_and_its_output() -> None:
    at = table((ADD, LOOK), (ADD,), tool=ScriptedTool([ToolResult("2"), ToolResult(error="no"), ToolResult("4")]))
    yielded = await at.talk(conversation(HELLO, LISTING, tools=TOOLS))
    opened = [frame for frame in yielded if isinstance(frame, frames.McpCallOpened | frames.WebCallOpened)]
    [call_id] = {frame.caller for frame in opened}
    assert opened == [
        frames.McpCallOpened("docs", "add", caller=call_id),
        frames.WebCallOpened("search", call_id),
        frames.McpCallOpened("docs", "add", caller=call_id),
    ]
    assert at.tool.calls == [("add", ADD.arguments), ("search", LOOK.arguments), ("add", ADD.arguments)]
    assert at.tool.most == 2  # a round runs at once
    assert at.program.past[-1] == (PastCall(ADD, "2"), PastCall(LOOK, "Error: no", "no"), PastCall(ADD, "4"))
    output = at.model.read[1].facts.input[-1]
    assert output == items.ProgramOutput("progo_10004", call_id, "2, no, 4", "completed")
    assert not at.program.kept


async def test_call_of_the_client_ends_the_response_and_its_output_lets_the_program_go_on() -> None:
    at = table((ASK, TEXT), (ADD, ASK))
    given = conversation(HELLO, LISTING, tools=TOOLS)
    yielded = await at.talk(given)
    assert frame_kinds(yielded)[3:] == [
        *("FunctionCallOpened", "ItemClosed", "CustomToolCallOpened", "ItemClosed", "TurnFinished"),
    ]
    assert (finish_reasons(yielded), len(at.model.read)) == (["stop"], 1)
    made = written(yielded)
    call, asked, wrote = made
    assert isinstance(call, items.Program)
    assert at.program.kept == [call.call_id]
    assert [items.caller_of(each) for each in made] == ["", call.call_id, call.call_id]

    outputs = (
        items.FunctionCallOutput("fco_1", asked.call_id, "7", "completed"),
        items.CustomToolCallOutput("ctco_1", wrote.call_id, "ok", "completed"),
    )
    again = frames.with_facts(replace(given, history=(*given.facts.input, *made)), input=outputs)
    yielded = await at.talk(again)
    assert frame_kinds(yielded) == [
        *("ResponseStarted", "McpCallOpened", "CallStarted", "CallFinished", "ItemClosed"),
        *("FunctionCallOpened", "ItemClosed", "GenerationStarted", "TurnFinished"),
    ]
    order_of(yielded)
    assert len(at.model.read) == 1  # the model has nothing to say
    assert at.program.past[1] == (PastCall(ASK, "7"), PastCall(TEXT, "ok"))

    added, asked = written(yielded, "2")
    last = (*outputs, added, asked)
    output = items.FunctionCallOutput("fco_2", asked.call_id, "8", "completed")
    yielded = await at.talk(frames.with_facts(replace(again, history=(*again.history, *last)), input=(output,)))
    assert frame_kinds(yielded)[:5] == [
        *("ResponseStarted", "ProgramOutputOpened", "CallStarted", "CallFinished", "ItemClosed"),
    ]
    order_of(yielded)
    assert at.program.past[-1][2:] == (PastCall(ADD, "2"), PastCall(ASK, "8"))
    assert at.model.read[1].facts.input[-1] == items.ProgramOutput(
        "progo_10000", call.call_id, "7, ok, 2, 8", "completed"
    )


def written(yielded: Sequence[frames.ConversedFrame], suffix: str = "1") -> list[Any]:
    """The items of a response, as a client has them, with ids of their own."""
    *_, last = emitted(yielded)
    assert isinstance(last, TerminalEvent)
    return [renamed(each, suffix) for each in last.response.output]


def emitted(yielded: Sequence[frames.ConversedFrame]) -> list[Any]:
    writer = ResponseWriter(None)
    started = yielded[0]
    assert isinstance(started, frames.GenerationStarted | frames.ResponseStarted)
    return [*(each for frame in yielded for each in writer.feed(frame)), *writer.finish()]


def hidden(yielded: Sequence[frames.ConversedFrame]) -> dict[str, str]:
    """The results of calls of a response that its items do not show, by the ids of `written`."""
    return {f"{each.item_id}1": each.result for each in emitted(yielded) if isinstance(each, frames.ItemResult)}


def renamed(each: Any, suffix: str) -> Any:
    known = {"call_id": f"{each.call_id}{suffix}"} if suffix != "1" and hasattr(each, "call_id") else {}
    return replace(each, id=f"{each.id}{suffix}", **known)


async def test_calls_beyond_the_limit_are_refused_inside_the_program() -> None:
    at = table((ADD, ADD, ADD))
    yielded = await at.talk(conversation(HELLO, LISTING, tools=TOOLS, max_tool_calls=3))  # the program itself is one
    assert len(at.tool.calls) == 2
    assert [past.error is None for past in at.program.past[-1]] == [True, True, False]
    assert finish_reasons(yielded) == ["stop", "stop"]


RUN, EXEC = NestedCall(("python", "python"), "f()"), NestedCall(("container", "exec"), '{"cmd": ["ls"]}')
PRINTED: dict[str, Any] = {"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 126}}


@pytest.mark.parametrize(
    ("call", "outcome", "error"),
    [
        (ADD, ToolResult("Error: 2"), None),
        (ADD, ToolResult(error="Error: no\n"), "Error: no"),
        (ADD, ToolResult("2", "no"), "no"),
        (LOOK, ToolResult("no", "no"), "no"),
        (RUN, ToolResult("2\n"), None),
        (RUN, ToolResult("2", "no"), "2\nError: no"),
        (EXEC, ToolResult("Error: a", data=frames.ShellOutput((PRINTED,))), None),
        (EXEC, ToolResult("a", "no", frames.ShellOutput((PRINTED,))), None),
        (EXEC, ToolResult(error="no"), "no"),
    ],
)
@pytest.mark.parametrize("is_refused", [False, True])
async def test_program_that_runs_again_gets_the_outcomes_that_it_got(
    call: NestedCall, outcome: ToolResult, error: str | None, is_refused: bool
) -> None:
    at = table((call,), (ASK,), tool=ScriptedTool([outcome]))
    given = conversation(HELLO, LISTING, tools=TOOLS, max_tool_calls=1 if is_refused else None)
    yielded = await at.talk(given)
    got, made = at.program.past[-1][0], written(yielded)
    asked = items.FunctionCallOutput("fco_1", made[-1].call_id, "7", "completed")
    known = replace(given, history=(*given.facts.input, *made), results=hidden(yielded))
    again, _ = past_calls(frames.with_facts(known, input=(asked,)), made[0].call_id)
    assert (got.error, again.error) == ((again.error,) * 2 if is_refused else (error, error))
    assert got.error or got.result == again.result


async def test_calls_run_one_by_one_if_the_request_says_so() -> None:
    at = table((ADD, ADD, ADD))
    await at.talk(conversation(HELLO, LISTING, tools=replace(TOOLS, parallel=False)))
    assert (len(at.tool.calls), at.tool.most) == (3, 1)


async def test_calls_of_the_client_leave_one_by_one_if_the_request_says_so() -> None:
    at = table((ASK, TEXT, ADD))
    given = conversation(HELLO, LISTING, tools=replace(TOOLS, parallel=False))
    made = written(await at.talk(given))
    assert [each.type for each in made] == ["program", "function_call"]
    output = items.FunctionCallOutput("fco_1", made[1].call_id, "7", "completed")
    history = (*given.facts.input, *made)
    made = written(await at.talk(frames.with_facts(replace(given, history=history), input=(output,))), "2")
    assert [each.type for each in made] == ["custom_tool_call"]


async def test_long_round_runs_a_few_calls_at_a_time() -> None:
    at = table((ADD,) * 40, tool=ScriptedTool(turns=5))
    await at.talk(conversation(HELLO, LISTING, tools=TOOLS))
    assert (len(at.tool.calls), at.tool.most) == (40, 16)


async def test_call_that_needs_approval_puts_the_program_to_sleep() -> None:
    drop = NestedCall(("docs", "drop"), "{}")
    at = table((drop, ADD))
    given = conversation(HELLO, LISTING, tools=TOOLS)
    made = written(await at.talk(given))
    call, asked, added = made
    assert isinstance(asked, items.McpApprovalRequest)
    assert (asked.caller, added.output) == (items.Caller("program", call.call_id), "2")
    for is_approved in (True, False):
        response = items.McpApprovalResponse("mcpa_1", asked.id, is_approved)
        again = frames.with_facts(replace(given, history=(*given.facts.input, *made)), input=(response,))
        assert open_programs(again) == [call]
        at.program.past.clear()
        await at.talk(again)
        first, second = at.program.past[0]
        assert (first.call, second) == (drop, PastCall(ADD, "2"))
        assert (first.result, first.error) == (
            ("2", None) if is_approved else ("", "The user did not approve of this call.")
        )


@pytest.mark.parametrize("ends", [True, False])
async def test_program_beside_a_direct_call_waits_with_it(ends: bool) -> None:
    at = table() if ends else table((ASK,))
    at.model.turns = [turn(program(), function()), turn(answer())]
    yielded = await at.talk(conversation(HELLO, LISTING, tools=TOOLS))
    assert frame_kinds(yielded)[-3:] == ["FunctionCallOpened", "ItemClosed", "TurnFinished"]
    assert len(at.model.read) == 1
    assert bool(at.program.kept) is not ends


def test_program_whose_calls_have_no_new_output_is_not_open() -> None:
    call = items.Program("prog_1", "call_p", "run()", items.fingerprint_of("run()"))
    asked = items.FunctionCall("fc_1", "call_1", "ask", ASK.arguments, "completed", caller=items.caller_named("call_p"))
    output = items.FunctionCallOutput("fco_1", "call_1", "7", "completed")
    given = conversation(HELLO, LISTING, tools=TOOLS)
    history = (*given.facts.input, call, asked)
    hello = given.facts.input[0]
    old = frames.with_facts(replace(given, history=(*history, output)), input=(hello,))
    new = frames.with_facts(replace(given, history=history), input=(output, hello))
    assert (open_programs(old), open_programs(new)) == ([], [call])
    assert past_calls(new, "call_p") == [PastCall(ASK, "7")]
    failed = frames.with_facts(new, input=(replace(output, status="incomplete"), hello))
    assert past_calls(failed, "call_p") == [PastCall(ASK, "7", "7")]
    searched = items.WebSearchCall("ws_1", "completed", caller=items.caller_named("call_p"))
    forgotten = frames.with_facts(new, input=(output, searched, replace(searched, id="ws_2", status="failed"), hello))
    search = NestedCall(("browser", "search"), "")
    assert past_calls(forgotten, "call_p")[1:] == [PastCall(search, None)] * 2
    known = replace(forgotten, results={"ws_1": "found", "ws_2": "Error: no"})
    assert past_calls(known, "call_p")[1:] == [PastCall(search, "found"), PastCall(search, error="no")]
    ended = items.ProgramOutput("progo_1", "call_p", "", "completed")
    assert open_programs(frames.with_facts(new, input=(output, ended))) == []


async def test_program_fails_as_a_tool_does_if_nothing_runs_it() -> None:
    at = table()
    sessions = Sessions(
        replace_hosts(at.converse, {"program": ScriptedTool()}),
        conversation(HELLO, LISTING, tools=TOOLS),
        1.0,
        99,
        cited=(),
    )
    with sessions.program(ToolCall("program", "program", "run()"), "call_p") as program:
        advanced = await sessions.advance(program, ())
    assert advanced.finished.error == "This server runs no programs."
