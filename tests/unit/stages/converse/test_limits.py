"""Failed calls, limits, and calls of tools that do not exist."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from penstock.pipeline.core import source_of
from penstock.pipeline.errors import ContextTooLong, EngineOverloaded
from penstock.pipeline.frames import (
    CallFinished,
    CallStarted,
    FinishReason,
    FunctionCallOpened,
    ItemClosed,
    ParsedFrame,
    ReasoningOpened,
    WebCallOpened,
    with_facts,
)
from penstock.pipeline.protocol.items import (
    CodeInterpreterCall,
    FunctionCall,
    FunctionCallOutput,
    McpCall,
    WebSearchCall,
)
from penstock.pipeline.protocol.tools import Toolset
from penstock.services.tools import Toolbox, ToolResult
from penstock.stages.converse.tool_loop import Limits
from tests.support.scripted_tools import (
    DOCS,
    ScriptedConverse,
    ScriptedServers,
    ScriptedTool,
    answer,
    code,
    conversation,
    finish_reasons,
    frame_kinds,
    function,
    item,
    mcp,
    shell,
    thought,
    turn,
)


@pytest.mark.parametrize(
    ("outcome", "yielded"),
    [
        (ToolResult(error="no such page"), CallFinished("Error: no such page", "no such page")),
        (ToolResult("half", "it died"), CallFinished("half\nError: it died", "it died")),
        (RuntimeError("bug"), CallFinished("Error: Internal error.", "Internal error.")),
    ],
)
async def test_failed_call_is_read_by_the_model(outcome: ToolResult | Exception, yielded: CallFinished) -> None:
    table = ScriptedConverse([turn(mcp()), turn(answer())], servers=ScriptedServers(tool=ScriptedTool([outcome])))
    frames = await table.talk(conversation(tools=DOCS))
    assert yielded in frames
    failed = table.model.read[1].facts.input[-1]
    assert isinstance(failed, McpCall)
    assert failed.status == "failed"
    assert failed.error is not None
    assert finish_reasons(frames) == ["stop", "stop"]


async def test_missing_tool_fails_as_an_item() -> None:
    """Another server, which has the tool, may have accepted the response."""
    table = ScriptedConverse([turn(code()), turn(answer())])
    converse = dataclasses.replace(table.converse, toolbox=Toolbox())
    frames = [frame async for frame in converse(source_of([conversation()]))]
    assert [frame.error for frame in frames if isinstance(frame, CallFinished)] == [
        "There is no tool python.python here."
    ]
    assert finish_reasons(frames) == ["stop", "stop"]


@pytest.mark.defect("V23")
async def test_hanging_call_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stages.converse.sessions.GRACE_SECONDS", 0.0)
    table = ScriptedConverse(
        [turn(code()), turn(answer())], tool=ScriptedTool(turns=None), limits=Limits(call_seconds=0.02)
    )
    (finished,) = (frame for frame in await table.talk() if isinstance(frame, CallFinished))
    assert finished.error == "The call took longer than 0.02 seconds."
    assert table.tool.cancelled == 1


async def test_long_result_keeps_both_ends() -> None:
    table = ScriptedConverse(
        [turn(code()), turn(answer())], tool=ScriptedTool([ToolResult("x" * 600)]), limits=Limits(result_characters=100)
    )
    await table.talk()
    (result,) = table.model.read[1].results.values()
    assert result == "x" * 50 + "\n[... 500 characters left out ...]\n" + "x" * 50


async def test_error_of_a_later_turn_is_raised() -> None:
    table = ScriptedConverse([turn(code())], error=ContextTooLong(9, 8))
    yielded = []
    with pytest.raises(ContextTooLong):
        async with aclosing(table.converse(source_of([conversation()]))) as frames:
            yielded = [frame async for frame in frames]
    assert not yielded
    assert table.tool.closed == 1


async def test_full_engine_refuses_a_new_response() -> None:
    """Before the first frame the client can be turned away."""
    with pytest.raises(EngineOverloaded):
        await ScriptedConverse([], error=EngineOverloaded("Full.")).talk()


async def test_started_response_waits_for_a_full_engine() -> None:
    table = ScriptedConverse([turn(code())], error=EngineOverloaded("Full."), limits=Limits(retry_seconds=0.0))
    task = asyncio.create_task(table.talk())
    async with asyncio.timeout(120):
        while len(table.model.read) < 4:
            await asyncio.sleep(0)
    table.model.turns, table.model.error = [turn(answer())], None
    assert frame_kinds(await task)[1:] == [
        *("CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed", "TurnFinished"),
        *("GenerationStarted", "MessageOpened", "ItemClosed", "TurnFinished"),
    ]
    assert len(table.tool.calls) == 1


class Lingering(ScriptedTool):
    """A tool that takes a moment to end a call."""

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        try:
            return await super().run(name, text, seconds)
        finally:
            self.running += 1
            for _ in range(50):
                await asyncio.sleep(0)
            self.running -= 1

    async def close(self) -> None:
        assert not self.running
        await super().close()


async def test_leaving_cancels_a_call_and_then_closes_its_session() -> None:
    table = ScriptedConverse([turn(code()), turn(answer())], tool=Lingering(turns=None))
    frames = table.converse(source_of([conversation()]))
    async for frame in frames:
        if isinstance(frame, CallStarted):
            break
    await asyncio.sleep(0)
    await frames.aclose()
    assert (table.tool.running, table.tool.cancelled, table.tool.closed) == (0, 1, 1)


async def test_cancelling_cancels_a_call_and_then_closes_its_session() -> None:
    table = ScriptedConverse([turn(code()), turn(answer())], tool=Lingering(turns=None))
    task = asyncio.create_task(table.talk())
    async with asyncio.timeout(120):
        while not table.tool.running:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (table.tool.running, table.tool.cancelled, table.tool.closed) == (0, 1, 1)


@pytest.mark.parametrize("reason", ["length", "content_filter", "cancelled"])
async def test_call_of_an_interrupted_turn_is_incomplete_and_not_run(reason: FinishReason) -> None:
    table = ScriptedConverse([turn(code("a"), answer(), reason=reason)])
    frames = await table.talk()
    assert frame_kinds(frames)[1:] == ["CodeCallOpened", "ItemClosed", "TurnFinished"]
    assert frames[-2:] == [ItemClosed(complete=False), frames[-1]]
    assert finish_reasons(frames) == [reason]
    assert not table.tool.calls


async def test_truncated_call_is_not_run() -> None:
    table = ScriptedConverse([turn(code("a", complete=False), reason="length")])
    assert frame_kinds(await table.talk())[1:] == ["CodeCallOpened", "ItemClosed", "TurnFinished"]
    assert not table.tool.calls


# Limits


@pytest.mark.parametrize(("most", "ran"), [(1, 1), (2, 2), (3, 3), (4, 3)])
async def test_call_beyond_the_limit_is_refused_and_the_model_answers(most: int, ran: int) -> None:
    table = ScriptedConverse([turn(code("a")), turn(code("b"), code("c")), turn(answer())])
    frames = await table.talk(conversation(max_tool_calls=most))
    assert [text for _, text in table.tool.calls] == ["a", "b", "c"][:ran]
    assert finish_reasons(frames) == ["stop", "stop", "stop"]
    refused = [frame.result for frame in frames if isinstance(frame, CallFinished) and not frame.ran]
    assert refused == [
        f"Error: all {most} calls of tools that this response may make were made. Answer without them."
    ] * (3 - ran)
    calls = [read for read in table.model.read[2].facts.input if isinstance(read, CodeInterpreterCall)]
    assert [call.status for call in calls] == ["completed"] * ran + ["in_progress"] * (3 - ran)
    assert list(table.model.read[2].results.values())[ran:] == refused


async def test_model_that_calls_on_beyond_the_limit_is_stopped() -> None:
    table = ScriptedConverse([turn(code("a")), turn(code("b")), turn(code("c"), code("d"))])
    frames = await table.talk(conversation(max_tool_calls=1))
    assert finish_reasons(frames) == ["stop", "stop", "max_tool_calls"]
    assert len(table.tool.calls) == 1
    assert frames[-2] == ItemClosed(complete=False)


async def test_refused_browser_call_keeps_its_action() -> None:
    """Else the model would read a call that it did not make."""
    search = item(WebCallOpened("search"), "ferrets")
    table = ScriptedConverse([turn(search, search), turn(answer())])
    await table.talk(conversation(max_tool_calls=1))
    calls = [read for read in table.model.read[1].facts.input if isinstance(read, WebSearchCall)]
    assert [(call.status, call.action) for call in calls] == [
        ("completed", {"type": "search", "query": "ferrets"}),
        ("in_progress", {"type": "search", "query": "ferrets"}),
    ]


async def test_refused_shell_call_has_an_output_that_says_why() -> None:
    table = ScriptedConverse([turn(shell(), shell()), turn(answer())], tool=ScriptedTool([ToolResult("a")]))
    frames = await table.talk(conversation(max_tool_calls=1))
    (_, refused) = (frame for frame in frames if isinstance(frame, CallFinished))
    assert refused.error == refused.result == list(table.model.read[1].results.values())[1]
    assert refused.ran


async def test_refused_call_beside_one_of_the_client_ends_the_turn() -> None:
    table = ScriptedConverse([turn(code("a")), turn(code("b"), function())])
    frames = await table.talk(conversation(max_tool_calls=1))
    assert finish_reasons(frames) == ["stop", "stop"]
    assert frame_kinds(frames)[-7:] == [
        *("CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed"),
        *("FunctionCallOpened", "ItemClosed", "TurnFinished"),
    ]
    assert len(table.tool.calls) == 1


async def test_call_at_the_turn_limit_is_not_run() -> None:
    table = ScriptedConverse([turn(code())], limits=Limits(turns=3))
    frames = await table.talk()
    assert finish_reasons(frames) == ["stop", "stop", "max_turns"]
    assert len(table.tool.calls) == 2


async def test_turns_share_the_token_limit() -> None:
    given = conversation()
    table = ScriptedConverse([turn(code())])
    frames = await table.talk(with_facts(given, sampling=replace(given.facts.sampling, max_tokens=12)))
    assert [read.facts.sampling.max_tokens for read in table.model.read] == [12, 7, 2]
    assert finish_reasons(frames) == ["stop", "stop", "length"]
    assert len(table.tool.calls) == 2


# Tools that do not exist


@pytest.mark.parametrize(
    ("recipient", "read"),
    [
        ("browser.search", (FunctionCall("fc_10000", "call_10000", "search", "{}", "completed", "browser"),)),
        ("python", (CodeInterpreterCall("ci_10000", "{}", "", "completed"),)),
    ],
)
async def test_first_call_of_an_undeclared_tool_is_answered_and_a_second_ends_the_response(
    recipient: str, read: tuple[object, ...]
) -> None:
    table = ScriptedConverse([turn(thought("{}", recipient))])
    frames = await table.talk(conversation(tools=Toolset()))
    assert frame_kinds(frames) == ["GenerationStarted", "ReasoningOpened", "ItemClosed", "TurnFinished"] * 2
    assert table.model.read[1].facts.input[1:2] == read
    outputs = [given.text for given in table.model.read[1].facts.input if isinstance(given, FunctionCallOutput)]
    assert [*outputs, *table.model.read[1].results.values()] == [
        f"Error: there is no tool '{recipient}'. Go on without it."
    ]


async def test_undeclared_tool_is_not_answered_without_tokens_left() -> None:
    given = conversation(tools=Toolset())
    table = ScriptedConverse([turn(thought("{}", "python"))])
    frames = await table.talk(with_facts(given, sampling=replace(given.facts.sampling, max_tokens=5)))
    assert finish_reasons(frames) == ["stop"]


async def test_undeclared_call_is_not_answered_before_an_answer() -> None:
    table = ScriptedConverse([turn(thought("{}", "browser.search"), answer())])
    await table.talk(conversation(tools=Toolset()))
    assert len(table.model.read) == 1


# Calls that the model cannot make


def refused(text: str = "{}", recipient: str = "functions.g") -> list[ParsedFrame]:
    return item(ReasoningOpened(recipient, "Error: no."), text)


BAD_SHELL = item(FunctionCallOpened("shell", form="shell"), '{"commands": ["rm -rf build')
GOOD_SHELL = item(FunctionCallOpened("shell", form="shell"), '{"commands": ["ls"]}')


def read_by(table: ScriptedConverse, turn: int) -> list[tuple[str, str]]:
    """The calls that the model reads in a turn, each with the name of its function or the text of its output."""
    given = table.model.read[turn].facts.input
    names = [(call.name, call.arguments) for call in given if isinstance(call, FunctionCall)]
    return [*names, *((output.call_id, output.text) for output in given if isinstance(output, FunctionCallOutput))]


async def test_error_of_the_parser_is_read_by_the_model() -> None:
    table = ScriptedConverse([turn(refused()), turn(answer())])
    assert finish_reasons(await table.talk()) == ["stop", "stop"]
    assert read_by(table, 1) == [("g", "{}"), ("call_10000", "Error: no.")]


async def test_call_without_an_action_is_answered_with_an_error() -> None:
    table = ScriptedConverse([turn(BAD_SHELL), turn(GOOD_SHELL)])
    assert finish_reasons(await table.talk()) == ["stop", "stop"]
    (call, (call_id, error)) = read_by(table, 1)
    assert (call, call_id) == (("shell", '{"commands": ["rm -rf build'), "call_10000")
    assert error.startswith("Error: the call was not made. ")


async def test_second_call_that_cannot_be_made_ends_the_response() -> None:
    table = ScriptedConverse([turn(refused()), turn(BAD_SHELL)])
    assert finish_reasons(await table.talk()) == ["stop", "stop"]


@pytest.mark.parametrize("calls", [(function(), refused()), (refused(), function()), (BAD_SHELL, GOOD_SHELL)])
async def test_call_of_the_client_ends_a_turn_with_one_that_cannot_be_made(
    calls: tuple[list[ParsedFrame], list[ParsedFrame]],
) -> None:
    table = ScriptedConverse([turn(*calls)])
    assert finish_reasons(await table.talk()) == ["stop"]
    assert len(table.model.read) == 1


async def test_errors_are_read_beside_the_results_of_calls() -> None:
    table = ScriptedConverse([turn(refused("1"), code(), refused("2"), BAD_SHELL), turn(answer())])
    assert finish_reasons(await table.talk()) == ["stop", "stop"]
    assert [name for name, _ in read_by(table, 1)] == [
        *("g", "g", "shell"),
        *("call_10000", "call_10002", "call_10003"),
    ]
