from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import AnnotationAdded
from penstock.pipeline.lifecycle.item_lifecycles import NOT_LISTED
from penstock.pipeline.lifecycle.stream_state import StreamState
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.events import (
    CodeInterpreterCallCodeDelta,
    CodeInterpreterCallInterpreting,
    Event,
    McpCallArgumentsDone,
    McpCallCompleted,
    McpCallFailed,
    McpListToolsCompleted,
    McpListToolsFailed,
    McpListToolsInProgress,
    OutputItemAdded,
    OutputTextDelta,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseQueued,
    ShellCallCommandDone,
    ShellCallOutputContentDelta,
    TerminalEvent,
    TextDelta,
    TextDone,
    WebSearchCallSearching,
)
from penstock.pipeline.protocol.response import ErrorDetails, Response
from tests.support import frames
from tests.support.event_streams import checked, final
from tests.support.examples import examples

BROKE = EngineFailed("It broke.")


def broken_off(events: Iterable[ResponseEvent], error: Exception | None = BROKE) -> list[ResponseEvent]:
    """An interrupted stream with the events that end it, checked."""
    stream, seen = StreamState(), []
    for event in events:
        stream.feed(event)
        seen.append(event)
    return checked([*seen, *stream.end(error)])


def upto_last_delta(sequence: frames.Frames) -> list[ResponseEvent]:
    events = frames.written_events(sequence)
    last = max(at for at, event in enumerate(events) if isinstance(event, TextDelta))
    return events[: last + 1]


@pytest.mark.parametrize(
    ("item", "fields", "last"),
    [
        (frames.reasoning("So", "."), {}, {"content": (items.ReasoningText("So."),), "summary": ()}),
        (
            frames.reasoning("So", "."),
            {"reasoning": frames.SUMMARY_OPTIONS},
            {"content": (), "summary": (items.SummaryText("So."),)},
        ),
        (frames.refusal("N", "o."), {}, {"content": (items.Refusal("No."),)}),
        (frames.function_call('{"', "a"), {}, {"arguments": '{"a'}),
        (frames.custom_tool_call("l", "s"), {}, {"input": "ls"}),
        (frames.mcp_call('{"', "a"), {}, {"arguments": '{"a', "output": None, "error": None}),
        (frames.code_call("1 ", "+"), {}, {"code": "1 +", "outputs": None}),
    ],
)
def test_open_item_keeps_its_text_as_incomplete(item: frames.Frames, fields: Any, last: Any) -> None:
    response = final(
        broken_off(upto_last_delta((frames.started(**fields), *frames.message("Hello!"), *item, frames.finished())))
    )
    first, cut = response.output
    assert (first.status, cut.status) == ("completed", "incomplete")
    assert {name: getattr(cut, name) for name in last} == last


def test_open_message_keeps_annotations_and_logprobs() -> None:
    tokens = frames.spelled_delta("Hé")
    events = upto_last_delta(
        (frames.started(), *frames.message(AnnotationAdded(frames.CITATION), tokens), frames.finished())
    )
    (cut,) = final(broken_off(events)).output
    assert cut == items.Message(
        "msg_10000",
        "incomplete",
        "assistant",
        (items.OutputText("Hé", (frames.CITATION,), tokens.logprobs),),
        "final_answer",
    )


def test_message_without_a_part_gets_an_empty_one() -> None:
    """Clients expect a message to have a first part."""
    (cut,) = final(
        broken_off(frames.written_events((frames.started(), *frames.message("Hello!"), frames.finished()))[:3])
    ).output
    assert cut == items.Message("msg_10000", "incomplete", "assistant", (items.OutputText(""),), "final_answer")


def test_queued_response_fails_with_one_event() -> None:
    events = frames.written_events(frames.whole_turn())
    assert isinstance(events[0], ResponseCreated)
    waiting = replace(events[0].response, status="queued")
    ended = broken_off([ResponseCreated(0, waiting), ResponseQueued(1, waiting)])
    assert [type(event) for event in ended] == [ResponseCreated, ResponseQueued, ResponseFailed]
    assert final(ended).error == ErrorDetails("server_error", "It broke.")


def test_stream_that_has_not_begun_cannot_end() -> None:
    """Without a response there is nothing to fail, so the error is the caller's."""
    with pytest.raises(RuntimeError, match="not begun"):
        list(StreamState().end(BROKE))


def upto(kind: type[Event], item: frames.Frames) -> list[ResponseEvent]:
    """The events of a turn up to the last one of that type."""
    events = frames.written_events((frames.started(), *item, frames.finished()))
    last = max(at for at, event in enumerate(events) if type(event) is kind)
    return events[: last + 1]


@pytest.mark.defect("V7")
@pytest.mark.parametrize(
    ("item", "at", "rest"),
    [
        (frames.mcp_call("{}"), OutputItemAdded, ["mcp_call.in_progress", "mcp_call_arguments.done"]),
        (frames.mcp_call("{}"), McpCallArgumentsDone, []),
        (frames.mcp_call("{}"), McpCallCompleted, []),
        (frames.mcp_call("{}", error="No."), McpCallFailed, []),
        (frames.code_call("1"), CodeInterpreterCallCodeDelta, ["code_interpreter_call_code.done"]),
        (frames.code_call("1"), CodeInterpreterCallInterpreting, []),
        (frames.web_call("{}"), OutputItemAdded, ["web_search_call.in_progress"]),
        (frames.web_call("{}"), WebSearchCallSearching, []),
        (frames.form_call("shell", '{"commands": ["a", "b"]}'), ShellCallCommandDone, []),
        (
            frames.shell_call('{"commands": ["a", "b"]}'),
            OutputItemAdded,
            [f"shell_call_command.{step}" for _ in range(2) for step in ("added", "delta", "done")],
        ),
        ((*frames.shell_call("{}"), *frames.shell_output(frames.SHELL_OUTPUT)), ShellCallOutputContentDelta, []),
        (frames.form_call("local_shell"), OutputItemAdded, []),
        (frames.form_call("apply_patch"), OutputItemAdded, []),
    ],
)
def test_interrupted_call_is_incomplete(item: frames.Frames, at: type[Event], rest: list[str]) -> None:
    events = upto(at, item)
    ended = broken_off(events)
    assert frames.event_types(ended[len(events) :]) == [*rest, "output_item.done", "failed"]
    cut = final(ended).output[-1]
    assert getattr(cut, "status", None) == "incomplete"
    assert not [getattr(cut, name, None) for name in ("output", "outputs", "error") if getattr(cut, name, None)]


@pytest.mark.defect("V7")
@pytest.mark.parametrize(
    ("item", "at", "rest"),
    [
        (frames.mcp_list(frames.LISTED_TOOL), OutputItemAdded, ["mcp_list_tools.in_progress", "mcp_list_tools.failed"]),
        (frames.mcp_list(frames.LISTED_TOOL), McpListToolsInProgress, ["mcp_list_tools.failed"]),
        (frames.mcp_list(error="It is down."), McpListToolsFailed, []),
        (frames.mcp_list(frames.LISTED_TOOL), McpListToolsCompleted, []),
    ],
)
def test_interrupted_tool_list_has_an_error(item: frames.Frames, at: type[Event], rest: list[str]) -> None:
    """The item has no status, and must not look like the list of a server without tools."""
    events = upto(at, item)
    ended = broken_off(events)
    assert frames.event_types(ended[len(events) :]) == [*rest, "output_item.done", "failed"]
    assert final(ended).output == (items.McpListTools("mcpl_10000", "wiki", (), NOT_LISTED),)


def test_interrupted_approval_request_is_done() -> None:
    events = upto(OutputItemAdded, frames.approval("{}"))
    assert final(broken_off(events)).output == (items.McpApprovalRequest("mcpr_10000", "wiki", "ask", "{}"),)


@pytest.mark.defect("11", "V2")
@given(sequence=frames.response_frames(), error=st.sampled_from([BROKE, None]), data=st.data())
def test_stream_can_end_after_any_event(sequence: frames.Frames, error: Exception | None, data: st.DataObject) -> None:
    events = frames.written_events(sequence)
    at = data.draw(st.integers(1, len(events) - 1))
    ended = broken_off(events[:at], error)
    assert ended[:at] == events[:at]
    assert sum(isinstance(event, TerminalEvent) for event in ended) == 1
    assert isinstance(ended[-1], ResponseFailed if error else ResponseIncomplete)
    added = [event.item.id for event in events[:at] if isinstance(event, OutputItemAdded)]
    assert [item.id for item in final(ended).output] == added


@pytest.mark.defect("V17", "B22")
def test_cancelled_response_has_neither_error_nor_reason() -> None:
    response = final(
        broken_off(upto_last_delta((frames.started(), *frames.message("Hel", "lo!"), frames.finished())), None)
    )
    assert (response.status, response.error, response.incomplete_details) == ("cancelled", None, None)
    assert [item.status for item in response.output] == ["incomplete"]
    assert (response.usage, response.completed_at) == (None, None)


@examples(50)
@given(sequence=frames.response_frames())
def test_predictable_events_are_predicted(sequence: frames.Frames) -> None:
    stream = StreamState()
    events = frames.written_events(sequence)
    for event in events:
        if isinstance(event, TextDelta):
            logprobs = event.logprobs if isinstance(event, OutputTextDelta) else ()
            assert stream.deltas([event.delta], logprobs) == [event]
        elif not frames.is_unforeseen(event):
            assert event in stream.predict(final(events))
        stream.feed(event)


@pytest.mark.parametrize(
    "turn",
    [frames.whole_turn(), frames.rare_turn(), frames.summary_turn(), frames.server_turns(), frames.client_turn()],
)
def test_deltas_are_taken_many_at_once(turn: frames.Frames) -> None:
    stream, events, at = StreamState(), frames.written_events(turn), 0
    while at < len(events):
        at += len(stream.take_run(events, at))
        event = events[at]
        assert not isinstance(event, TextDelta) or (isinstance(event, OutputTextDelta) and event.logprobs)
        assert not isinstance(event, TextDone) or event in stream.predict(final(events))
        stream.feed(event)
        at += 1


@pytest.mark.parametrize("changed", [{"sequence_number": 99}, {"item_id": "rs_other"}, {"output_index": 7}])
def test_deltas_of_another_place_are_not_taken(changed: dict[str, Any]) -> None:
    events = frames.written_events((frames.started(), *frames.message("one", " two", " three"), frames.finished()))
    first = next(at for at, event in enumerate(events) if isinstance(event, TextDelta))
    events[first + 1] = replace(events[first + 1], **changed)
    stream = StreamState()
    for event in events[:first]:
        stream.feed(event)
    assert stream.take_run(events, first) == ["one"]
    assert stream.take_run(events, first + 1) == []


@examples(50)
@given(sequence=frames.response_frames())
def test_stream_state_notices_the_end(sequence: frames.Frames) -> None:
    stream = StreamState()
    events = frames.written_events(sequence)
    for event in events:
        assert not stream.ended
        stream.feed(event)
        assert isinstance(stream.response, Response)
    assert stream.ended
