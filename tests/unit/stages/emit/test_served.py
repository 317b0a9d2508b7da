from __future__ import annotations

from contextlib import aclosing
from typing import Any

import pytest

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
from penstock.stages.emit.emit import ResponseWriter, emit
from tests.support.event_streams import checked, final
from tests.support.frames import (
    FOUND_PAGES,
    LISTED_TOOL,
    LOGS,
    SEARCH,
    SHELL_OUTPUT,
    SHELL_TIMEOUT,
    Frames,
    approval,
    client_events,
    code_call,
    event_types,
    finished,
    frame_source,
    mcp_call,
    mcp_list,
    message,
    server_item,
    server_turns,
    shell_call,
    shell_output,
    sse_json,
    started,
    web_call,
    written_events,
)


def told(*items: Frames) -> list[ResponseEvent]:
    """The checked events of a whole turn, without the response's own events."""
    return checked(written_events((started(), *(frame for frames in items for frame in frames), finished())))[2:-1]


def made(*items: Frames) -> Any:
    """The last item of a turn."""
    done = told(*items)[-1]
    assert isinstance(done, OutputItemDone)
    return done.item


def ladder(*between: str) -> list[str]:
    return ["output_item.added", *between, "output_item.done"]


ARGUMENTS = [f"mcp_call_arguments.{step}" for step in ("delta", "delta", "done")]
CODE = [f"code_interpreter_call_code.{step}" for step in ("delta", "delta", "done")]

LADDERS: list[tuple[Frames, list[str]]] = [
    (mcp_list(LISTED_TOOL), ladder("mcp_list_tools.in_progress", "mcp_list_tools.completed")),
    (mcp_list(error="It is down."), ladder("mcp_list_tools.in_progress", "mcp_list_tools.failed")),
    (mcp_call("{", "}"), ladder("mcp_call.in_progress", *ARGUMENTS, "mcp_call.completed")),
    (mcp_call("{", "}", error="No."), ladder("mcp_call.in_progress", *ARGUMENTS, "mcp_call.failed")),
    (mcp_call(error="No."), ladder("mcp_call.in_progress", ARGUMENTS[-1], "mcp_call.failed")),
    (approval("{", "}"), ladder()),
    (
        code_call("1", "+1"),
        ladder(
            "code_interpreter_call.in_progress",
            *CODE,
            "code_interpreter_call.interpreting",
            "code_interpreter_call.completed",
        ),
    ),
    (
        code_call("1", "/0", error="It hung."),
        ladder("code_interpreter_call.in_progress", *CODE, "code_interpreter_call.interpreting"),
    ),
    (
        web_call("{", "}"),
        ladder("web_search_call.in_progress", "web_search_call.searching", "web_search_call.completed"),
    ),
    (web_call("{", "}", error="It is down."), ladder("web_search_call.in_progress", "web_search_call.searching")),
    (
        shell_call('{"commands": ["ls", "pwd"]}'),
        ladder(*[f"shell_call_command.{step}" for _ in range(2) for step in ("added", "delta", "done")]),
    ),
]


@pytest.mark.defect("V9", "V18")
@pytest.mark.parametrize(("item", "steps"), LADDERS)
def test_every_item_has_the_events_of_its_kind(item: Frames, steps: list[str]) -> None:
    assert event_types(told(item)) == steps


@pytest.mark.defect("V9")
def test_items_have_their_own_indexes() -> None:
    events = told(web_call("{}"), mcp_call("{}"), web_call("{}"))
    added = [(event.output_index, event.item.id) for event in events if isinstance(event, OutputItemAdded)]
    assert added == [(0, "ws_10000"), (1, "mcp_10001"), (2, "ws_10002")]


@pytest.mark.defect("V8")
def test_final_items_equal_streamed_ones() -> None:
    events = checked(written_events(server_turns()))
    bodies = [sse_json(event) for event in events]
    done = [body["item"] for body in bodies if body["type"] == "response.output_item.done"]
    assert bodies[-1]["response"]["output"] == done
    kinds = [item["type"] for item in done]
    assert kinds.count("code_interpreter_call") == 2
    assert kinds.count("reasoning") == 1


# When events are sent


RUNS: list[tuple[Frames, list[str], list[str]]] = [
    (mcp_list(LISTED_TOOL), ["mcp_list_tools.in_progress"], ["mcp_list_tools.completed"]),
    (mcp_list(error="No."), ["mcp_list_tools.in_progress"], ["mcp_list_tools.failed"]),
    (mcp_call("{}"), ["mcp_call_arguments.done"], ["mcp_call.completed"]),
    (mcp_call("{}", error="No."), ["mcp_call_arguments.done"], ["mcp_call.failed"]),
    (
        code_call("1"),
        ["code_interpreter_call_code.done", "code_interpreter_call.interpreting"],
        ["code_interpreter_call.completed"],
    ),
    (
        code_call("1", error="No."),
        ["code_interpreter_call_code.done", "code_interpreter_call.interpreting"],
        [],
    ),
    (
        web_call("{}"),
        ["output_item.added", "web_search_call.in_progress", "web_search_call.searching"],
        ["web_search_call.completed"],
    ),
    (
        web_call("{}", error="No."),
        ["output_item.added", "web_search_call.in_progress", "web_search_call.searching"],
        [],
    ),
]


@pytest.mark.defect("V7", "B11")
@pytest.mark.parametrize(("item", "starts", "ends"), RUNS)
def test_events_are_sent_when_a_call_starts_and_ends(item: Frames, starts: list[str], ends: list[str]) -> None:
    writer = ResponseWriter()
    said = {type(frame): event_types(client_events(writer.feed(frame))) for frame in (started(), *item)}
    assert (said[CallStarted], said[CallFinished], said[ItemClosed]) == (starts, ends, ["output_item.done"])


@pytest.mark.defect("V7", "B11")
@pytest.mark.parametrize(
    ("item", "status"),
    [
        (mcp_call("{}"), "completed"),
        (mcp_call("{}", error="No."), "failed"),
        (code_call("1"), "completed"),
        (code_call("1", error="No."), "failed"),
        (web_call("{}"), "completed"),
        (web_call("{}", error="No."), "failed"),
        (shell_call("{}"), "completed"),
        ((*shell_call("{}"), *shell_output(SHELL_TIMEOUT)), "completed"),
        ((*shell_call("{}"), *shell_output(error="No.")), "completed"),
    ],
)
def test_item_status_is_the_outcome_of_the_call(item: Frames, status: str) -> None:
    assert made(item).status == status
    assert final(checked(written_events((started(), *item, *message("Hm."), finished())))).status == "completed"


@pytest.mark.defect("V7")
@pytest.mark.parametrize(
    "opening", [McpCallOpened("wiki", "ask"), CodeCallOpened(), WebCallOpened("search"), ShellOutputOpened()]
)
@pytest.mark.parametrize("finishes", [True, False])
def test_error_during_a_call_leaves_it_incomplete(opening: Any, finishes: bool) -> None:
    ran = (opening, CallStarted(SEARCH), *([CallFinished("ok")] if finishes else []))
    writer = ResponseWriter()
    events = [event for frame in (started(), *shell_call("{}"), *ran) for event in writer.feed(frame)]
    response = final(checked(client_events([*events, *writer.fail(EngineFailed("It broke."))])))
    assert response.output[-1].status == ("completed" if finishes else "incomplete")


@pytest.mark.defect("B11")
@pytest.mark.parametrize("ran", [(), (CallStarted(),)])
def test_interrupted_tool_list_has_an_error(ran: Frames) -> None:
    """The item has no status field for it."""
    writer = ResponseWriter()
    events = [event for frame in (started(), McpListToolsOpened("wiki"), *ran) for event in writer.feed(frame)]
    ended = checked(client_events([*events, *writer.fail(EngineFailed("It broke."))]))
    assert event_types(ended)[2:-1] == ladder("mcp_list_tools.in_progress", "mcp_list_tools.failed")
    assert final(ended).output == (McpListTools("mcpl_10000", "wiki", (), NOT_LISTED),)


# The fields of items


PROTOCOL_ERROR = {"type": "mcp_protocol_error", "code": -32601, "message": "No such tool."}
FAILED = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "No."}]}


@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (mcp_list(LISTED_TOOL), McpListTools("mcpl_10000", "wiki", (ListedTool("ask", {"type": "object"}, "Asks."),))),
        (mcp_list(error="It is down."), McpListTools("mcpl_10000", "wiki", (), "It is down.")),
        (mcp_call("{", "}"), McpCall("mcp_10000", "wiki", "ask", "{}", "completed", "Fine.")),
        (mcp_call(result=""), McpCall("mcp_10000", "wiki", "ask", "", "completed", "")),
        (mcp_call("{}", error="No."), McpCall("mcp_10000", "wiki", "ask", "{}", "failed", error=FAILED)),
        (
            server_item(McpCallOpened("wiki", "a"), outcome=CallFinished("", "No.", McpError(PROTOCOL_ERROR))),
            McpCall("mcp_10000", "wiki", "a", "", "failed", error=PROTOCOL_ERROR),
        ),
        (
            server_item(McpCallOpened("wiki", "a", "mcpr_1"), "{}", outcome=CallFinished("ok")),
            McpCall("mcp_10000", "wiki", "a", "{}", "completed", "ok", approval_request_id="mcpr_1"),
        ),
        (approval("{", "}"), McpApprovalRequest("mcpr_10000", "wiki", "ask", "{}")),
        (code_call("1", "+1"), CodeInterpreterCall("ci_10000", "1+1", "cntr_1", "completed")),
        (code_call("1", outputs=(LOGS,)), CodeInterpreterCall("ci_10000", "1", "cntr_1", "completed", (LOGS,))),
        (
            code_call("1", outputs=(LOGS,), error="It hung."),
            CodeInterpreterCall("ci_10000", "1", "cntr_1", "failed", (LOGS,)),
        ),
        (web_call("{}"), WebSearchCall("ws_10000", SEARCH, "completed")),
        (web_call("{}", found=(FOUND_PAGES,)), WebSearchCall("ws_10000", FOUND_PAGES, "completed")),
        (
            shell_call('{"cmd": ["bash", "-lc", "ls | wc"], "timeout": 500}'),
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
def test_item_has_the_result_of_its_call(item: Frames, expected: object) -> None:
    assert made(item) == expected


@pytest.mark.parametrize(
    ("outputs", "error", "shown"),
    [
        ((SHELL_OUTPUT, SHELL_TIMEOUT), None, (SHELL_OUTPUT, SHELL_TIMEOUT)),
        ((), None, ()),
        ((SHELL_TIMEOUT,), "It hung.", (SHELL_TIMEOUT,)),
        ((), "No.", ({"stdout": "", "stderr": "No.", "outcome": {"type": "exit", "exit_code": 126}},)),
    ],
)
def test_shell_output_belongs_to_the_latest_call(outputs: Any, error: str | None, shown: Any) -> None:
    calls = (shell_call("{}"), shell_call('{"cmd": ["ls"]}'))
    assert made(*calls, shell_output(*outputs, error=error)) == ShellCallOutput(
        "sho_10002", "call_10001", shown, "completed"
    )


def test_shell_output_is_sent_per_command() -> None:
    silent = {"stdout": "", "stderr": "", "outcome": {"type": "exit", "exit_code": 1}}
    both = {"stdout": "a", "stderr": "b", "outcome": {"type": "exit", "exit_code": 0}}
    events = told(shell_call("{}"), shell_output(SHELL_OUTPUT, silent, both))
    bodies = [sse_json(event) for event in events if "shell_call_output" in sse_json(event)["type"]]
    assert [(body["command_index"], body.get("delta", body.get("output"))) for body in bodies] == [
        (0, {"stdout": "a\n"}),
        (0, [SHELL_OUTPUT]),
        (1, [silent]),
        (2, {"stdout": "a", "stderr": "b"}),
        (2, [both]),
    ]


def test_added_item_has_empty_fields() -> None:
    items = (
        mcp_list(LISTED_TOOL),
        mcp_call("{}"),
        code_call("1"),
        web_call("{}", found=(FOUND_PAGES,)),
        shell_call("{}"),
    )
    events = told(*items, shell_output(SHELL_OUTPUT))
    added = [sse_json(event)["item"] for event in events if isinstance(event, OutputItemAdded)]
    call = {"arguments": "", "output": None, "error": None, "approval_request_id": None}
    code = {"code": "", "container_id": "cntr_1", "outputs": None}
    assert added[:4] == [
        {"type": "mcp_list_tools", "id": "mcpl_10000", "server_label": "wiki", "tools": []},
        {
            "type": "mcp_call",
            "id": "mcp_10001",
            "server_label": "wiki",
            "name": "ask",
            "status": "in_progress",
            **call,
        },
        {"type": "code_interpreter_call", "id": "ci_10002", "status": "in_progress", **code},
        {"type": "web_search_call", "id": "ws_10003", "action": SEARCH, "status": "in_progress"},
    ]
    assert (added[4]["status"], added[5]["output"]) == ("in_progress", [])


# Arguments of the model


@pytest.mark.defect("B12")
@pytest.mark.parametrize(
    "said", ['{"query": "Oslo"', '{"cursor": 1}', "", "\x00", "[" * 100_000, '{"query": ["Oslo"], "topn": "x"}']
)
@pytest.mark.parametrize("opening", [WebCallOpened("search"), WebCallOpened("peek"), ShellCallOpened()])
def test_any_arguments_make_an_item(opening: Any, said: str) -> None:
    """Unreadable arguments and unknown functions do not end the response."""
    pieces = [said] if said else []
    ran = (CallStarted(), CallFinished(error="No.")) if isinstance(opening, WebCallOpened) else ()
    item = (opening, *map(ItemDelta, pieces), *ran, ItemClosed(complete=True))
    assert made(item).id in ("ws_10000", "sh_10000")


@pytest.mark.defect("V10", "B12")
def test_search_item_has_the_real_action() -> None:
    """The action comes from the start or end of the call, never from the model's arguments."""
    opened = {"type": "open_page", "url": "https://a.example/"}
    item = server_item(WebCallOpened("open"), '{"cursor": 0, "id": 3}', action=opened)
    assert made(item) == WebSearchCall("ws_10000", opened, "completed")
    assert not [event for event in told(item) if "cursor" in str(sse_json(event))]


@pytest.mark.defect("B12")
def test_items_have_unique_ids() -> None:
    events = told(web_call("{}"), web_call("{}"), web_call())
    assert {event.item.id for event in events if isinstance(event, OutputItemDone)} == {
        "ws_10000",
        "ws_10001",
        "ws_10002",
    }


@pytest.mark.defect("B11")
def test_truncated_approval_request_is_an_incomplete_call() -> None:
    """Approval is never requested for half a call."""
    frames = (started(), *approval('{"q', complete=False), finished("length"))
    (cut,) = final(checked(written_events(frames))).output
    assert cut == McpCall("mcp_10000", "wiki", "ask", '{"q', "incomplete")


@pytest.mark.defect("V10")
def test_truncated_search_has_an_action() -> None:
    frames = (started(), *web_call('{"query": "Os', complete=False), finished("length"))
    (cut,) = final(checked(written_events(frames))).output
    assert cut == WebSearchCall("ws_10000", {"type": "search", "query": ""}, "incomplete")


# Frames for the store


async def test_results_follow_their_item() -> None:
    """Results that the item does not show go to the store, after the item and its tokens."""
    read = (
        *code_call("1"),
        *web_call("{}", error="No."),
        *shell_call("{}"),
        *shell_output(SHELL_OUTPUT),
        *mcp_list(),
        *mcp_call("{}"),
        *code_call("1", complete=False),
    )
    async with aclosing(emit(frame_source((started(), *read, finished("length"))))) as out:
        frames = [frame async for frame in out]
    results = [frame for frame in frames if isinstance(frame, ItemResult)]
    assert results == [
        ItemResult("ci_10000", "2\n"),
        ItemResult("ws_10001", "Oslo is a city."),
        ItemResult("sho_10003", "a\n"),
    ]
    for result in results:
        before = frames[frames.index(result) - 1]
        assert isinstance(before, OutputItemDone)
        assert before.item.id == result.item_id


def test_item_may_have_tokens_and_a_result() -> None:
    writer = ResponseWriter()
    item = (CodeCallOpened(), ItemDelta("1"), CallStarted(), CallFinished("1"), ItemClosed(True, token_ids=(1, 2)))
    said = [event for frame in (started(), *item) for event in writer.feed(frame)]
    assert {type(frame) for frame in said[-2:]} == {ItemTokens, ItemResult}
