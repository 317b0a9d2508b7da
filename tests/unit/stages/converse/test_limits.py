"""What goes wrong with calls, what a limit ends, and what is said to tools that do not exist."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import aclosing

import pytest
from msgspec.structs import replace

from pipeline.errors import ContextTooLong, EngineOverloaded
from pipeline.frames import (
    CallFinished,
    CallStarted,
    FinishReason,
    ItemClosed,
)
from pipeline.protocol.items import (
    CodeInterpreterCall,
    FunctionCall,
    FunctionCallOutput,
    McpCall,
)
from pipeline.protocol.tools import Toolset
from pipeline.record import replay
from stages.converse.exchange import Limits
from stages.converse.tools import Outcome, Toolbox
from tests.support.scripted_tools import (
    DOCS,
    Servers,
    Table,
    Tool,
    answer,
    code,
    conversation,
    kinds,
    mcp,
    reasons,
    thought,
    turn,
)


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


@pytest.mark.defect("V23")
async def test_a_call_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
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
    async with asyncio.timeout(120):
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
    table = Table([turn(code()), turn(answer())], tool=Tool(seconds=600))
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
    table = Table([turn(code()), turn(answer())], tool=Tool(seconds=600))
    task = asyncio.create_task(table.talk())
    async with asyncio.timeout(120):
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
