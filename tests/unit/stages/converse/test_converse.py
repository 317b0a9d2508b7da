"""Turns of a response: server-side calls run between them, client-side calls end them."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.core import source_of
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.params.request import SOURCES
from penstock.services.tools import Source, ToolResult
from penstock.stages.converse.tool_loop import Limits
from tests.support.scripted_tools import (
    DOCS,
    ScriptedConverse,
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


async def test_turn_without_calls_passes_unchanged() -> None:
    table = ScriptedConverse([turn(thought(), function(), answer())])
    yielded = await table.talk()
    assert yielded[1:] == [*thought(), *function(), *answer(), yielded[-1]]
    assert isinstance(yielded[0], frames.GenerationStarted)
    assert len(table.model.read) == 1
    assert table.tool.opened == 0


async def test_call_runs_between_two_turns() -> None:
    table = ScriptedConverse([turn(thought(), code("1 + 1")), turn(answer())])
    yielded = await table.talk()
    assert frame_kinds(yielded) == [
        *("GenerationStarted", "ReasoningOpened", "ItemClosed"),
        *("CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed", "TurnFinished"),
        *("GenerationStarted", "MessageOpened", "ItemClosed", "TurnFinished"),
    ]
    reasoning, call = table.model.read[1].facts.input[1:]
    assert reasoning == items.Reasoning("rs_10000", content=(items.ReasoningText("Hm."),), status="completed")
    assert call == items.CodeInterpreterCall("ci_10001", "1 + 1", "", "completed")
    assert table.model.read[1].results == {"ci_10001": "2"}
    assert table.tool.calls == [("python", "1 + 1")]
    assert (table.tool.opened, table.tool.closed) == (1, 1)


def asynchronous() -> list[frames.ParsedFrame]:
    return item(frames.FunctionCallOpened("ask", is_async=True), "{}")


async def test_model_goes_on_after_an_asynchronous_call() -> None:
    table = ScriptedConverse([turn(thought(), asynchronous()), turn(answer())])
    assert finish_reasons(await table.talk()) == ["stop", "stop"]
    called = table.model.read[1].facts.input[-1]
    assert called == items.FunctionCall("fc_10001", "call_10001", "ask", "{}", "completed", is_async=True)


async def test_other_call_of_the_client_ends_a_turn_with_asynchronous_ones() -> None:
    table = ScriptedConverse([turn(asynchronous(), code(), function()), turn(answer())])
    assert finish_reasons(await table.talk()) == ["stop"]
    table = ScriptedConverse([turn(asynchronous(), code()), turn(answer())])
    assert finish_reasons(await table.talk()) == ["stop", "stop"]
    assert [type(read) for read in table.model.read[1].facts.input[1:]] == [
        items.FunctionCall,
        items.CodeInterpreterCall,
    ]


async def test_asynchronous_calls_end_at_the_limit_of_turns() -> None:
    table = ScriptedConverse([turn(asynchronous())], limits=Limits(turns=3))
    assert finish_reasons(await table.talk()) == ["stop", "stop", "max_turns"]


@pytest.mark.defect("V7")
async def test_call_frames_are_sent_as_the_call_runs() -> None:
    table = ScriptedConverse([turn(code()), turn(answer())], tool=ScriptedTool(turns=50))
    async with aclosing(table.converse(source_of([conversation()]))) as yielded:
        async for frame in yielded:
            if isinstance(frame, frames.CodeCallOpened | frames.CallStarted):
                assert not table.tool.calls  # it begins with the next step of the loop
            if isinstance(frame, frames.CallFinished):
                assert table.tool.calls
                assert not table.tool.running


async def test_shell_output_has_an_item_of_its_own() -> None:
    wrote = ({"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},)
    table = ScriptedConverse(
        [turn(shell()), turn(answer())], tool=ScriptedTool([ToolResult("a", data=frames.ShellOutput(wrote))])
    )
    yielded = await table.talk()
    assert frame_kinds(yielded)[1:8] == [
        *("ShellCallOpened", "ItemClosed"),
        *("ShellOutputOpened", "CallStarted", "CallFinished", "ItemClosed", "TurnFinished"),
    ]
    call, output = table.model.read[1].facts.input[1:]
    assert isinstance(call, items.ShellCall)
    assert call.runs_here
    assert output == items.ShellCallOutput("sho_10001", call.call_id, wrote, "completed")
    assert table.model.read[1].results == {"sho_10001": "a"}


async def test_shell_call_starts_without_an_action() -> None:
    """Only a call to the browser shows one, and the frame is written to recordings."""

    class Acting(ScriptedTool):
        def action(self, name: str, text: str) -> dict[str, Any]:
            return SEARCHED

    yielded = await ScriptedConverse([turn(shell()), turn(answer())], tool=Acting()).talk()
    assert [frame for frame in yielded if isinstance(frame, frames.CallStarted)] == [frames.CallStarted()]


def item_of_tokens(opening: frames.ItemOpened, text: str, *token_ids: int) -> list[frames.ParsedFrame]:
    """The frames of an item with these token ids."""
    return [*item(opening, text)[:-1], frames.ItemClosed(complete=True, token_ids=token_ids)]


async def test_tokens_and_results_are_kept_by_item_id() -> None:
    ran = item_of_tokens(frames.CodeCallOpened(), "1", 1, 2)
    spoken, listed = (
        item_of_tokens(frames.MessageOpened("commentary"), "So.", 4, 5),
        item_of_tokens(frames.ShellCallOpened(), '{"cmd": ["ls"]}', 3),
    )
    table = ScriptedConverse(
        [turn(ran), turn(spoken, listed), turn(answer())], tool=ScriptedTool([ToolResult("a"), ToolResult("b")])
    )
    await table.talk(replace(conversation(), tokens={"rs_0": (9,)}, results={"ci_0": "z"}))
    assert table.model.read[0].tokens == {"rs_0": (9,)}
    assert table.model.read[1].tokens == {"rs_0": (9,), "ci_10000": (1, 2)}
    assert table.model.read[1].results == {"ci_0": "z", "ci_10000": "a"}
    assert table.model.read[2].tokens == {"rs_0": (9,), "ci_10000": (1, 2), "msg_10001": (4, 5), "sh_10002": (3,)}
    assert table.model.read[2].results == {"ci_0": "z", "ci_10000": "a", "sho_10003": "b"}
    assert [given.id for given in table.model.read[2].facts.input[1:]] == [
        "ci_10000",
        "msg_10001",
        "sh_10002",
        "sho_10003",
    ]


async def test_items_before_a_call_are_part_of_the_conversation() -> None:
    waits, hopes = item(frames.MessageOpened("commentary"), "Wait."), item(frames.MessageOpened(), "Maybe.")
    spoken = [waits, hopes, item(frames.RefusalOpened(), "No."), code()]
    table = ScriptedConverse([turn(*spoken), turn(answer())], tool=ScriptedTool([ToolResult(error="It died.")]))
    await table.talk()
    assert table.model.read[1].facts.input[1:] == (
        items.Message("msg_10000", "completed", "assistant", (items.OutputText("Wait."),), "commentary"),
        items.Message("msg_10001", "completed", "assistant", (items.OutputText("Maybe."),)),
        items.Message("msg_10002", "completed", "assistant", (items.Refusal("No."),), "final_answer"),
        items.CodeInterpreterCall("ci_10003", "1 + 1", "", "failed"),
    )
    assert table.model.read[1].results == {"ci_10003": "Error: It died."}


async def test_browser_call_starts_with_its_action() -> None:
    table = ScriptedConverse([turn(item(frames.WebCallOpened("search"), "ferrets")), turn(answer())])
    yielded = await table.talk()
    assert frames.CallStarted({"type": "search", "query": "ferrets"}) in yielded
    found = table.model.read[1].facts.input[-1]
    assert found == items.WebSearchCall("ws_10000", "completed", {"type": "search", "query": "ferrets"})


class Browser(ScriptedTool):
    """A tool with one page that can be cited, at cursor 0."""

    def source(self, cursor: int) -> Source | None:
        return Source("Ferrets", "https://ferrets.example/all") if cursor == 0 else None


MARKED = "Yes【0†L3】【1†L3】"


async def test_pages_of_the_browser_are_cited() -> None:
    search = item(frames.WebCallOpened("search"), "ferrets")
    table = ScriptedConverse([turn(answer(MARKED), search), turn(answer(MARKED))], tool=Browser())
    yielded = await table.talk()
    begun = [at for at, frame in enumerate(yielded) if isinstance(frame, frames.GenerationStarted)]
    assert yielded[begun[0] + 1 : begun[0] + 4] == answer(MARKED)[:3]
    text = "".join(frame.text for frame in yielded[begun[1] :] if isinstance(frame, frames.ItemDelta))
    assert text == "Yes ([ferrets.example](https://ferrets.example/all))【1†L3】"
    (note,) = (frame.annotation for frame in yielded if isinstance(frame, frames.AnnotationAdded))
    assert text[note["start_index"] : note["end_index"]] == "([ferrets.example](https://ferrets.example/all))"
    assert frame_kinds(yielded)[-4:] == ["MessageOpened", "AnnotationAdded", "ItemClosed", "TurnFinished"]


async def test_pages_of_the_history_are_cited() -> None:
    table = ScriptedConverse([turn(answer(MARKED))], tool=Browser())
    history = (items.WebSearchCall("ws_1", "completed", {"type": "search", "query": "ferrets"}),)
    yielded = await table.talk(replace(conversation(), history=history))
    assert sum(isinstance(frame, frames.AnnotationAdded) for frame in yielded) == 1
    assert isinstance(yielded[0], frames.GenerationStarted)


LOGS: dict[str, Any] = {"type": "logs", "logs": "2"}
SEARCHED: dict[str, Any] = {"type": "search", "query": "ferrets"}
FOUND: dict[str, Any] = SEARCHED | {"sources": [{"type": "url", "url": "https://ferrets.example/all"}]}


@pytest.mark.parametrize(
    ("call", "data", "include", "shown"),
    [
        (code(), frames.CodeOutputs((LOGS,)), (), None),
        (code(), frames.CodeOutputs((LOGS,)), ("code_interpreter_call.outputs",), frames.CodeOutputs((LOGS,))),
        (item(frames.WebCallOpened("search")), frames.BrowserAction(FOUND), (), frames.BrowserAction(SEARCHED)),
        (item(frames.WebCallOpened("search")), frames.BrowserAction(FOUND), (SOURCES,), frames.BrowserAction(FOUND)),
        (shell(), frames.ShellOutput(({"stdout": "a"},)), (), frames.ShellOutput(({"stdout": "a"},))),
    ],
)
async def test_call_data_is_shown_if_included(
    call: list[frames.ParsedFrame], data: frames.CallData, include: tuple[str, ...], shown: frames.CallData | None
) -> None:
    table = ScriptedConverse([turn(call), turn(answer())], tool=ScriptedTool([ToolResult("2", data=data)]))
    yielded = await table.talk(conversation(include=include))
    assert [frame.data for frame in yielded if isinstance(frame, frames.CallFinished)] == [shown]
    assert list(table.model.read[1].results.values()) == ["2"]


# Several calls


@pytest.mark.parametrize(("parallel", "most"), [(True, 2), (False, 1)])
async def test_calls_of_one_turn_run_in_parallel_if_allowed(parallel: bool, most: int) -> None:
    table = ScriptedConverse([turn(code("a"), code("b")), turn(answer())], tool=ScriptedTool(turns=50))
    given = conversation()
    yielded = await table.talk(frames.with_facts(given, tools=replace(given.facts.tools, parallel=parallel)))
    assert table.tool.most == most
    assert frame_kinds(yielded)[1:10] == [
        *("CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed") * 2,
        "TurnFinished",
    ]
    assert [
        call.text for call in table.model.read[1].facts.input[1:] if isinstance(call, items.CodeInterpreterCall)
    ] == ["a", "b"]


async def test_mixed_turn_waits_for_the_client() -> None:
    table = ScriptedConverse([turn(code(), function(), thought())])
    yielded = await table.talk()
    assert frame_kinds(yielded)[4:] == [
        *("ItemClosed", "FunctionCallOpened", "ItemClosed", "ReasoningOpened", "ItemClosed", "TurnFinished")
    ]
    assert table.tool.calls == [("python", "1 + 1")]
    assert finish_reasons(yielded) == ["stop"]
    assert len(table.model.read) == 1


async def test_items_keep_the_order_of_the_model() -> None:
    yielded = await ScriptedConverse([turn(function(), code())]).talk()
    assert frame_kinds(yielded)[1:] == [
        *("FunctionCallOpened", "ItemClosed", "CodeCallOpened", "CallStarted", "CallFinished", "ItemClosed"),
        "TurnFinished",
    ]


async def test_required_choice_holds_until_a_call_was_made() -> None:
    """Otherwise it would demand calls without end."""
    table = ScriptedConverse([turn(code()), turn(answer())])
    given = conversation()
    await table.talk(frames.with_facts(given, tools=replace(given.facts.tools, choice="required")))
    assert [read.facts.tools.choice for read in table.model.read] == ["required", "auto"]


@pytest.mark.defect("V22")
async def test_later_turns_are_scheduled_like_the_first() -> None:
    table = ScriptedConverse([turn(code()), turn(answer())])
    await table.talk()
    assert table.model.read[0].facts.scheduling == table.model.read[1].facts.scheduling


async def test_turn_duration_includes_its_calls() -> None:
    yielded = await ScriptedConverse([turn(code()), turn(answer())]).talk()
    assert [frame.duration for frame in yielded if isinstance(frame, frames.TurnFinished)] == [2.0, 1.0]


async def test_first_turn_duration_includes_the_listing() -> None:
    yielded = await ScriptedConverse([turn(mcp()), turn(answer())]).talk(conversation(tools=DOCS))
    assert [frame.duration for frame in yielded if isinstance(frame, frames.TurnFinished)] == [3.0, 1.0]
