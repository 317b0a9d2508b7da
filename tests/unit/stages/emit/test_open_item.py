from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline import frames
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.items import (
    CustomToolCall,
    FunctionCall,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)
from tests.support.event_streams import checked, final
from tests.support.frames import (
    CITATION,
    SUMMARY_OPTIONS,
    Frames,
    custom_tool_call,
    event_types,
    finished,
    function_call,
    item,
    message,
    reasoning,
    refusal,
    spelled_delta,
    sse_json,
    started,
    whole_turn,
    written_events,
)

BEGIN = ["created", "in_progress"]


def emitted(*items: Frames, **fields: Any) -> list[events.ResponseEvent]:
    """The events of a whole turn, checked."""
    return checked(
        written_events((started(**fields), *(frame for sequence in items for frame in sequence), finished()))
    )


def text_events(kind: str, deltas: int, part: str = "content_part") -> list[str]:
    grow = [f"{kind}.delta"] * deltas
    return ["output_item.added", f"{part}.added", *grow, f"{kind}.done", f"{part}.done", "output_item.done"]


def summary_events(deltas: int) -> list[str]:
    return text_events("reasoning_summary_text", deltas, "reasoning_summary_part")


def call_events(kind: str, deltas: int) -> list[str]:
    return ["output_item.added", *[f"{kind}.delta"] * deltas, f"{kind}.done", "output_item.done"]


EVENTS: list[tuple[Frames, list[str]]] = [
    (reasoning("Let me ", "think."), text_events("reasoning_text", 2)),
    (message("Hello!"), text_events("output_text", 1)),
    (message("Wait.", phase="commentary"), text_events("output_text", 1)),
    (refusal("No", "."), text_events("refusal", 2)),
    (function_call('{"city":', '"Oslo"', "}"), call_events("function_call_arguments", 3)),
    (custom_tool_call("ls", " -l"), call_events("custom_tool_call_input", 2)),
    (reasoning(), text_events("reasoning_text", 0)),
    (message(), text_events("output_text", 0)),
    (refusal(), text_events("refusal", 0)),
    (function_call(), call_events("function_call_arguments", 0)),
    (custom_tool_call(), call_events("custom_tool_call_input", 0)),
]


@pytest.mark.defect("V18")
@pytest.mark.parametrize(("item", "between"), EVENTS)
def test_every_item_has_all_its_events(item: Frames, between: list[str]) -> None:
    assert event_types(emitted(item)) == [*BEGIN, *between, "completed"]


@pytest.mark.parametrize("texts", [("Let me ", "think."), ()])
def test_summary_replaces_raw_reasoning(texts: tuple[str, ...]) -> None:
    stream = emitted(reasoning(*texts), message("Hello!"), reasoning=SUMMARY_OPTIONS)
    assert event_types(stream) == [*BEGIN, *summary_events(len(texts)), *text_events("output_text", 1), "completed"]
    thought = final(stream).output[0]
    assert thought == Reasoning("rs_10000", (SummaryText("".join(texts)),), (), status="completed")
    assert sse_json(stream[-1])["response"]["output"][0]["content"] == []


def test_items_follow_one_another() -> None:
    stream = checked(written_events(whole_turn()))
    assert event_types(stream) == [
        *BEGIN,
        *text_events("reasoning_text", 2),
        *text_events("output_text", 2),
        *call_events("function_call_arguments", 2),
        "completed",
    ]
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    assert [event.output_index for event in stream if isinstance(event, events.OutputItemAdded)] == [0, 1, 2]


CALL = {"call_id": "call_10000", "name": "clock"}


@pytest.mark.parametrize(
    ("opening", "fields"),
    [
        (frames.ReasoningOpened(), {"id": "rs_10000", "type": "reasoning", "summary": [], "content": []}),
        (
            frames.MessageOpened("commentary"),
            {"id": "msg_10000", "type": "message", "role": "assistant", "content": [], "phase": "commentary"},
        ),
        (frames.MessageOpened(), {"id": "msg_10000", "type": "message", "role": "assistant", "content": []}),
        (
            frames.RefusalOpened(),
            {"id": "msg_10000", "type": "message", "role": "assistant", "content": [], "phase": "final_answer"},
        ),
        (frames.FunctionCallOpened("clock"), {"id": "fc_10000", "type": "function_call", **CALL, "arguments": ""}),
        (
            frames.FunctionCallOpened("clock", "home"),
            {"id": "fc_10000", "type": "function_call", **CALL, "arguments": "", "namespace": "home"},
        ),
        (frames.CustomToolCallOpened("clock"), {"id": "ctc_10000", "type": "custom_tool_call", **CALL, "input": ""}),
        (
            frames.CustomToolCallOpened("clock", "home"),
            {"id": "ctc_10000", "type": "custom_tool_call", **CALL, "input": "", "namespace": "home"},
        ),
    ],
)
def test_added_item_has_empty_fields(opening: frames.ItemOpened, fields: dict[str, Any]) -> None:
    added = emitted((opening, frames.ItemClosed(complete=True)))[2]
    assert sse_json(added)["item"] == {**fields, "status": "in_progress"}


def test_final_output_has_whole_texts() -> None:
    stream = emitted(
        reasoning("Let me ", "think."),
        message("Hel", "lo!"),
        refusal("N", "o."),
        item(frames.FunctionCallOpened("get_weather", "home"), '{"city":', '"Oslo"'),
        item(frames.CustomToolCallOpened("shell", "home"), "ls", " -l"),
    )
    assert final(stream).output == (
        Reasoning("rs_10000", content=(ReasoningText("Let me think."),), status="completed"),
        Message("msg_10001", "completed", "assistant", (OutputText("Hello!"),), "final_answer"),
        Message("msg_10002", "completed", "assistant", (Refusal("No."),), "final_answer"),
        FunctionCall("fc_10003", "call_10003", "get_weather", '{"city":"Oslo"', "completed", "home"),
        CustomToolCall("ctc_10004", "call_10004", "shell", "ls -l", "completed", "home"),
    )


def test_parallel_calls_have_unique_ids() -> None:
    stream = emitted(function_call("{}"), function_call("{}"), custom_tool_call("{}"), function_call())
    calls = [item for item in final(stream).output if isinstance(item, FunctionCall | CustomToolCall)]
    assert [call.id for call in calls] == ["fc_10000", "fc_10001", "ctc_10002", "fc_10003"]
    assert [call.call_id for call in calls] == ["call_10000", "call_10001", "call_10002", "call_10003"]


def test_annotations_have_events_and_are_kept() -> None:
    other = {**CITATION, "title": "B"}
    stream = emitted(message("Hel", frames.AnnotationAdded(CITATION), "lo!", frames.AnnotationAdded(other)))
    assert [event for event in stream if isinstance(event, events.OutputTextAnnotationAdded)] == [
        events.OutputTextAnnotationAdded(5, "msg_10000", 0, 0, 0, CITATION),
        events.OutputTextAnnotationAdded(7, "msg_10000", 0, 0, 1, other),
    ]
    (part,) = [event.part for event in stream if isinstance(event, events.ContentPartDone)]
    assert part == OutputText("Hello!", (CITATION, other))


@pytest.mark.defect("B27")
def test_logprobs_accompany_their_text() -> None:
    first, second = spelled_delta("Hé", 2), spelled_delta("y", 2)
    stream = emitted(reasoning("So."), message(first, second), top_logprobs=2)
    tokens = first.logprobs + second.logprobs
    assert [event.logprobs for event in stream if isinstance(event, events.OutputTextDelta)] == [
        first.logprobs,
        second.logprobs,
    ]
    assert [event.logprobs for event in stream if isinstance(event, events.OutputTextDone)] == [tokens]
    message_item = final(stream).output[1]
    assert isinstance(message_item, Message)
    assert message_item.content == (OutputText("Héy", logprobs=tokens),)
    assert [token.token for token in tokens] == ["H", "\\xc3", "\\xa9", "y"]
