from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest
from msgspec import UNSET

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import (
    CallFinished,
    CallStarted,
    CodeCallOpened,
    ItemClosed,
    ItemDelta,
    ItemResult,
    ItemTokens,
    McpCallOpened,
    McpError,
    McpListToolsOpened,
    ShellCallOpened,
    ShellOutputOpened,
    WebCallOpened,
)
from penstock.pipeline.lifecycle.item_lifecycles import NOT_LISTED
from penstock.pipeline.protocol.events import OutputItemAdded, OutputItemDone, ResponseEvent
from penstock.pipeline.protocol.items import (
    CodeInterpreterCall,
    ListedTool,
    McpApprovalRequest,
    McpCall,
    McpListTools,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from penstock.pipeline.protocol.response import ToolUsage, WebSearchUsage
from penstock.stages.emit.emit import Emit, ResponseWriter
from tests.support import frames
from tests.support.event_streams import checked, final


def item_events(*items: frames.Frames) -> list[ResponseEvent]:
    """The checked events of a whole turn, without the response's own events."""
    return checked(
        frames.written_events(
            (frames.started(), *(frame for sequence in items for frame in sequence), frames.finished())
        )
    )[2:-1]


def last_item(*items: frames.Frames) -> Any:
    """The last item of a turn."""
    done = item_events(*items)[-1]
    assert isinstance(done, OutputItemDone)
    return done.item


def whole_item(*between: str) -> list[str]:
    return ["output_item.added", *between, "output_item.done"]


ARGUMENTS = [f"mcp_call_arguments.{step}" for step in ("delta", "delta", "done")]
CODE = [f"code_interpreter_call_code.{step}" for step in ("delta", "delta", "done")]

EVENTS: list[tuple[frames.Frames, list[str]]] = [
    (frames.mcp_list(frames.LISTED_TOOL), whole_item("mcp_list_tools.in_progress", "mcp_list_tools.completed")),
    (frames.mcp_list(error="It is down."), whole_item("mcp_list_tools.in_progress", "mcp_list_tools.failed")),
    (frames.mcp_call("{", "}"), whole_item("mcp_call.in_progress", *ARGUMENTS, "mcp_call.completed")),
    (frames.mcp_call("{", "}", error="No."), whole_item("mcp_call.in_progress", *ARGUMENTS, "mcp_call.failed")),
    (frames.mcp_call(error="No."), whole_item("mcp_call.in_progress", ARGUMENTS[-1], "mcp_call.failed")),
    (frames.approval("{", "}"), whole_item()),
    (
        frames.code_call("1", "+1"),
        whole_item(
            "code_interpreter_call.in_progress",
            *CODE,
            "code_interpreter_call.interpreting",
            "code_interpreter_call.completed",
        ),
    ),
    (
        frames.code_call("1", "/0", error="It hung."),
        whole_item("code_interpreter_call.in_progress", *CODE, "code_interpreter_call.interpreting"),
    ),
    (
        frames.web_call("{", "}"),
        whole_item("web_search_call.in_progress", "web_search_call.searching", "web_search_call.completed"),
    ),
    (
        frames.web_call("{", "}", error="It is down."),
        whole_item("web_search_call.in_progress", "web_search_call.searching"),
    ),
    (
        frames.shell_call('{"commands": ["ls", "pwd"]}'),
        whole_item(*[f"shell_call_command.{step}" for _ in range(2) for step in ("added", "delta", "done")]),
    ),
]


@pytest.mark.defect("V9", "V18")
@pytest.mark.parametrize(("item", "steps"), EVENTS)
def test_every_item_has_the_events_of_its_kind(item: frames.Frames, steps: list[str]) -> None:
    assert frames.event_types(item_events(item)) == steps


@pytest.mark.defect("V9", "B12")
def test_items_have_their_own_indexes_and_ids() -> None:
    events = item_events(frames.web_call("{}"), frames.mcp_call("{}"), frames.web_call("{}"))
    added = [(event.output_index, event.item.id) for event in events if isinstance(event, OutputItemAdded)]
    assert added == [(0, "ws_10000"), (1, "mcp_10001"), (2, "ws_10002")]


@pytest.mark.defect("V8")
def test_final_items_equal_streamed_ones() -> None:
    events = checked(frames.written_events(frames.server_turns()))
    bodies = [frames.sse_json(event) for event in events]
    done = [body["item"] for body in bodies if body["type"] == "response.output_item.done"]
    assert bodies[-1]["response"]["output"] == done
    kinds = [item["type"] for item in done]
    assert kinds.count("code_interpreter_call") == 2
    assert kinds.count("reasoning") == 1


# When events are sent


RUNS: list[tuple[frames.Frames, list[str], list[str]]] = [
    (frames.mcp_list(frames.LISTED_TOOL), ["mcp_list_tools.in_progress"], ["mcp_list_tools.completed"]),
    (frames.mcp_list(error="No."), ["mcp_list_tools.in_progress"], ["mcp_list_tools.failed"]),
    (frames.mcp_call("{}"), ["mcp_call_arguments.done"], ["mcp_call.completed"]),
    (frames.mcp_call("{}", error="No."), ["mcp_call_arguments.done"], ["mcp_call.failed"]),
    (
        frames.code_call("1"),
        ["code_interpreter_call_code.done", "code_interpreter_call.interpreting"],
        ["code_interpreter_call.completed"],
    ),
    (frames.code_call("1", error="No."), ["code_interpreter_call_code.done", "code_interpreter_call.interpreting"], []),
    (
        frames.web_call("{}"),
        ["output_item.added", "web_search_call.in_progress", "web_search_call.searching"],
        ["web_search_call.completed"],
    ),
    (
        frames.web_call("{}", error="No."),
        ["output_item.added", "web_search_call.in_progress", "web_search_call.searching"],
        [],
    ),
]


@pytest.mark.defect("V7")
@pytest.mark.parametrize(("item", "starts", "ends"), RUNS)
def test_events_are_sent_when_a_call_starts_and_ends(item: frames.Frames, starts: list[str], ends: list[str]) -> None:
    writer = ResponseWriter()
    sent = {
        type(frame): frames.event_types(frames.client_events(writer.feed(frame))) for frame in (frames.started(), *item)
    }
    assert (sent[CallStarted], sent[CallFinished], sent[ItemClosed]) == (starts, ends, ["output_item.done"])


@pytest.mark.defect("V7")
@pytest.mark.parametrize(
    ("item", "status"),
    [
        (frames.mcp_call("{}"), "completed"),
        (frames.mcp_call("{}", error="No."), "failed"),
        (frames.code_call("1"), "completed"),
        (frames.code_call("1", error="No."), "failed"),
        (frames.web_call("{}"), "completed"),
        (frames.web_call("{}", error="No."), "failed"),
        (frames.shell_call("{}"), "completed"),
        ((*frames.shell_call("{}"), *frames.shell_output(frames.SHELL_TIMEOUT)), "completed"),
        ((*frames.shell_call("{}"), *frames.shell_output(error="No.")), "completed"),
        (frames.server_item(McpCallOpened("wiki", "a"), "{}", outcome=CallFinished("No.", ran=False)), "in_progress"),
        (frames.server_item(CodeCallOpened(), "1", outcome=CallFinished("No.", ran=False)), "in_progress"),
        (frames.server_item(WebCallOpened("open"), "{}", outcome=CallFinished("No.", ran=False)), "in_progress"),
    ],
)
def test_item_status_is_the_outcome_of_the_call(item: frames.Frames, status: str) -> None:
    assert last_item(item).status == status
    assert (
        final(
            checked(frames.written_events((frames.started(), *item, *frames.message("Hm."), frames.finished())))
        ).status
        == "completed"
    )


@pytest.mark.defect("V7")
@pytest.mark.parametrize(
    "opening", [McpCallOpened("wiki", "ask"), CodeCallOpened(), WebCallOpened("search"), ShellOutputOpened()]
)
@pytest.mark.parametrize("finishes", [True, False])
def test_error_during_a_call_leaves_it_incomplete(opening: Any, finishes: bool) -> None:
    ran = (opening, CallStarted(frames.SEARCH), *([CallFinished("ok")] if finishes else []))
    writer = ResponseWriter()
    events = [event for frame in (frames.started(), *frames.shell_call("{}"), *ran) for event in writer.feed(frame)]
    response = final(checked(frames.client_events([*events, *writer.fail(EngineFailed("It broke."))])))
    assert response.output[-1].status == ("completed" if finishes else "incomplete")


@pytest.mark.defect("V7")
@pytest.mark.parametrize("ran", [(), (CallStarted(),)])
def test_interrupted_tool_list_has_an_error(ran: frames.Frames) -> None:
    writer = ResponseWriter()
    events = [event for frame in (frames.started(), McpListToolsOpened("wiki"), *ran) for event in writer.feed(frame)]
    ended = checked(frames.client_events([*events, *writer.fail(EngineFailed("It broke."))]))
    assert frames.event_types(ended)[2:-1] == whole_item("mcp_list_tools.in_progress", "mcp_list_tools.failed")
    assert final(ended).output == (McpListTools("mcpl_10000", "wiki", (), NOT_LISTED),)


# The fields of items


PROTOCOL_ERROR = {"type": "mcp_protocol_error", "code": -32601, "message": "No such tool."}
FAILED = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "No."}]}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (
            frames.mcp_list(frames.LISTED_TOOL),
            McpListTools("mcpl_10000", "wiki", (ListedTool("ask", {"type": "object"}, "Asks."),)),
        ),
        (frames.mcp_list(error="It is down."), McpListTools("mcpl_10000", "wiki", (), "It is down.")),
        (frames.mcp_call("{", "}"), McpCall("mcp_10000", "wiki", "ask", "{}", "completed", "Fine.")),
        (frames.mcp_call(result=""), McpCall("mcp_10000", "wiki", "ask", "", "completed", "")),
        (frames.mcp_call("{}", error="No."), McpCall("mcp_10000", "wiki", "ask", "{}", "failed", error=FAILED)),
        (
            frames.server_item(McpCallOpened("wiki", "a"), outcome=CallFinished("", "No.", McpError(PROTOCOL_ERROR))),
            McpCall("mcp_10000", "wiki", "a", "", "failed", error=PROTOCOL_ERROR),
        ),
        (
            frames.server_item(McpCallOpened("wiki", "a", "mcpr_1"), "{}", outcome=CallFinished("ok")),
            McpCall("mcp_10000", "wiki", "a", "{}", "completed", "ok", approval_request_id="mcpr_1"),
        ),
        (frames.approval("{", "}"), McpApprovalRequest("mcpr_10000", "wiki", "ask", "{}")),
        (frames.code_call("1", "+1"), CodeInterpreterCall("ci_10000", "1+1", "cntr_1", "completed")),
        (
            frames.code_call("1", outputs=(frames.LOGS,)),
            CodeInterpreterCall("ci_10000", "1", "cntr_1", "completed", (frames.LOGS,)),
        ),
        (
            frames.code_call("1", outputs=(frames.LOGS,), error="It hung."),
            CodeInterpreterCall("ci_10000", "1", "cntr_1", "failed", (frames.LOGS,)),
        ),
        (frames.web_call("{}"), WebSearchCall("ws_10000", "completed", frames.SEARCH)),
        (
            frames.web_call("{}", found=(frames.FOUND_PAGES,)),
            WebSearchCall("ws_10000", "completed", frames.FOUND_PAGES),
        ),
        (
            frames.shell_call('{"cmd": ["bash", "-lc", "ls | wc"], "timeout": 500}'),
            ShellCall(
                "sh_10000",
                "call_10000",
                {"commands": ["ls | wc"], "timeout_ms": 500},
                "completed",
                {"type": "container_reference", "container_id": "cntr_1"},
            ),
        ),
    ],
)
def test_item_has_the_result_of_its_call(item: frames.Frames, expected: object) -> None:
    assert last_item(item) == expected


@pytest.mark.parametrize(
    ("outputs", "error", "shown"),
    [
        ((frames.SHELL_OUTPUT, frames.SHELL_TIMEOUT), None, (frames.SHELL_OUTPUT, frames.SHELL_TIMEOUT)),
        ((), None, ()),
        ((frames.SHELL_TIMEOUT,), "It hung.", (frames.SHELL_TIMEOUT,)),
        ((), "No.", ({"stdout": "", "stderr": "No.", "outcome": {"type": "exit", "exit_code": 126}},)),
    ],
)
def test_shell_output_belongs_to_the_latest_call(outputs: Any, error: str | None, shown: Any) -> None:
    calls = (frames.shell_call("{}"), frames.shell_call('{"cmd": ["ls"]}'))
    assert last_item(*calls, frames.shell_output(*outputs, error=error)) == ShellCallOutput(
        "sho_10002", "call_10001", shown, "completed"
    )


def test_shell_output_is_sent_per_command() -> None:
    silent = {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}
    both = {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}
    events = item_events(frames.shell_call("{}"), frames.shell_output(frames.SHELL_OUTPUT, silent, both))
    bodies = [frames.sse_json(event) for event in events if "shell_call_output" in frames.sse_json(event)["type"]]
    assert [(body["command_index"], body.get("delta", body.get("output"))) for body in bodies] == [
        (0, {"stdout": "a\n"}),
        (0, [frames.SHELL_OUTPUT]),
        (1, [silent]),
        (2, {"stdout": "a", "stderr": "b"}),
        (2, [both]),
    ]


def test_added_item_has_empty_fields() -> None:
    items = (
        frames.mcp_list(frames.LISTED_TOOL),
        frames.mcp_call("{}"),
        frames.code_call("1"),
        frames.web_call("{}", found=(frames.FOUND_PAGES,)),
        frames.shell_call("{}"),
    )
    events = item_events(*items, frames.shell_output(frames.SHELL_OUTPUT))
    added = [frames.sse_json(event)["item"] for event in events if isinstance(event, OutputItemAdded)]
    call = {"arguments": "", "output": None, "error": None, "approval_request_id": None}
    code = {"code": "", "container_id": "cntr_1", "outputs": None}
    assert added[:4] == [
        {"type": "mcp_list_tools", "id": "mcpl_10000", "server_label": "wiki", "tools": []},
        {"type": "mcp_call", "id": "mcp_10001", "server_label": "wiki", "name": "ask", "status": "in_progress", **call},
        {"type": "code_interpreter_call", "id": "ci_10002", "status": "in_progress", **code},
        {"type": "web_search_call", "id": "ws_10003", "status": "in_progress", "action": frames.SEARCH},
    ]
    assert (added[4]["status"], added[5]["output"]) == ("in_progress", [])


# Arguments of the model


@pytest.mark.defect("B12")
@pytest.mark.parametrize(
    "arguments", ['{"query": "Oslo"', '{"cursor": 1}', "", "\x00", "[" * 100_000, '{"query": ["Oslo"], "topn": "x"}']
)
@pytest.mark.parametrize("opening", [WebCallOpened("search"), WebCallOpened("peek"), ShellCallOpened()])
def test_any_arguments_make_an_item(opening: Any, arguments: str) -> None:
    pieces = [arguments] if arguments else []
    ran = (CallStarted(), CallFinished(error="No.")) if isinstance(opening, WebCallOpened) else ()
    item = (opening, *map(ItemDelta, pieces), *ran, ItemClosed(complete=True))
    assert last_item(item).id in ("ws_10000", "sh_10000")


@pytest.mark.defect("V10", "B12")
def test_search_item_has_the_real_action() -> None:
    """The action comes from the start or end of the call, never from the model's arguments."""
    opened = {"type": "open_page", "url": "https://a.example/"}
    item = frames.server_item(WebCallOpened("open"), '{"cursor": 0, "id": 3}', action=opened)
    assert last_item(item) == WebSearchCall("ws_10000", "completed", opened)
    assert not [event for event in item_events(item) if "cursor" in str(frames.sse_json(event))]


def test_completed_searches_are_counted() -> None:
    pages = (
        frames.server_item(WebCallOpened("open"), "{}", action={"type": "open_page", "url": "https://a.example/"}),
        frames.web_call('{"query": "Os', complete=False),
    )
    searches = [frames.web_call("{}"), frames.web_call("{}")]
    for number in range(3):
        sequence = (frames.started(), *(frame for item in (*searches[:number], *pages) for frame in item))
        counted = final(checked(frames.written_events((*sequence, frames.finished("length"))))).tool_usage
        assert counted == (ToolUsage(WebSearchUsage(number)) if number else UNSET)


@pytest.mark.defect("V7", "V10")
@pytest.mark.parametrize(
    ("item", "expected"),
    [
        # Approval is never requested for half a call.
        (frames.approval('{"q', complete=False), McpCall("mcp_10000", "wiki", "ask", '{"q', "incomplete")),
        (
            frames.web_call('{"query": "Os', complete=False),
            WebSearchCall("ws_10000", "incomplete", {"type": "search", "query": ""}),
        ),
    ],
)
def test_truncated_call_is_incomplete(item: frames.Frames, expected: object) -> None:
    sequence = (frames.started(), *item, frames.finished("length"))
    assert final(checked(frames.written_events(sequence))).output == (expected,)


# Frames for the store


async def test_results_follow_their_item() -> None:
    """Results that the item does not show go to the store, after the item and its tokens."""
    read = (
        *frames.code_call("1"),
        *frames.web_call("{}", error="No."),
        *frames.shell_call("{}"),
        *frames.shell_output(frames.SHELL_OUTPUT),
        *frames.mcp_list(),
        *frames.mcp_call("{}"),
        *frames.code_call("1", complete=False),
    )
    async with aclosing(Emit()(frames.frame_source((frames.started(), *read, frames.finished("length"))))) as out:
        sequence = [frame async for frame in out]
    results = [frame for frame in sequence if isinstance(frame, ItemResult)]
    assert results == [
        ItemResult("ci_10000", "2\n"),
        ItemResult("ws_10001", "Oslo is a city."),
        ItemResult("sho_10003", "a\n"),
    ]
    for result in results:
        before = sequence[sequence.index(result) - 1]
        assert isinstance(before, OutputItemDone)
        assert before.item.id == result.item_id


def test_item_may_have_tokens_and_a_result() -> None:
    writer = ResponseWriter()
    item = (CodeCallOpened(), ItemDelta("1"), CallStarted(), CallFinished("1"), ItemClosed(True, token_ids=(1, 2)))
    sent = [event for frame in (frames.started(), *item) for event in writer.feed(frame)]
    assert {type(frame) for frame in sent[-2:]} == {ItemTokens, ItemResult}
