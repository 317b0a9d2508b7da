from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client import REGISTRY

from penstock.pipeline import frames
from penstock.pipeline.errors import (
    ContextTooLong,
    EngineDead,
    EngineFailed,
    EngineOverloaded,
    InvalidRequest,
    StageError,
)
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol.events import Event, ResponseEvent, ResponseFailed, TextDelta, to_sse
from penstock.pipeline.protocol.items import (
    CodeInterpreterCall,
    CustomToolCall,
    FunctionCall,
    McpCall,
    Message,
    OutputItem,
    Phase,
    Reasoning,
)
from penstock.pipeline.protocol.response import (
    ErrorDetails,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Usage,
)
from penstock.stages.emit.emit import Emit
from tests.support.event_streams import checked, final
from tests.support.frames import (
    Frames,
    client_events,
    custom_tool_call,
    event_types,
    finished,
    frame_source,
    function_call,
    message,
    reasoning,
    refusal,
    response_frames,
    sse_json,
    started,
    whole_turn,
)


async def emitted(sequence: Iterable[frames.ConversedFrame], error: BaseException | None = None) -> list[ResponseEvent]:
    """The checked events of a stream; asserts that a ``ResponseStarted`` for the store precedes them."""
    sequence = tuple(sequence)
    async with aclosing(Emit()(frame_source(sequence, error))) as out:
        first, *rest = [frame async for frame in out]
    begun = sequence[0]
    assert isinstance(begun, frames.GenerationStarted | frames.ResponseStarted)
    assert first == frames.ResponseStarted(begun.facts)
    return checked(client_events(rest))


BEGIN = ["created", "in_progress"]


async def test_same_frames_give_same_bytes() -> None:
    first, second = [list(map(to_sse, await emitted(whole_turn()))) for _ in range(2)]
    assert first == second
    other = await emitted((started("resp_2"), *whole_turn()[1:]))
    assert {item.id for item in final(other).output} == {"rs_20000", "msg_20001", "fc_20002"}


# The end


async def test_usage_is_counted() -> None:
    counts = finished(cached_tokens=32, output_tokens=11, reasoning_tokens=5)
    events = await emitted((started(prompt_tokens=40), *message("Hello!"), counts))
    assert final(events).usage == Usage(40, InputTokensDetails(32), 11, OutputTokensDetails(5), 51)


async def test_completion_time_is_start_plus_durations() -> None:
    events = await emitted((started(created_at=1000), *message("Hello!"), finished(duration=2.7)))
    assert final(events).completed_at == 1002


async def test_turn_without_items_completes() -> None:
    events = await emitted((started(), finished()))
    assert event_types(events) == [*BEGIN, "completed"]


@pytest.mark.defect("14", "16", "V17", "B22")
@pytest.mark.parametrize("cut", [reasoning, message, refusal, function_call, custom_tool_call])
@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        ("length", "incomplete", IncompleteDetails("max_output_tokens")),
        ("content_filter", "incomplete", IncompleteDetails("content_filter")),
        ("cancelled", "cancelled", None),
    ],
)
async def test_cut_response_keeps_its_output_and_usage(
    cut: Any, reason: frames.FinishReason, status: str, details: IncompleteDetails | None
) -> None:
    events = await emitted((started(), *message("Hello!"), *cut("Hel", complete=False), finished(reason)))
    response = final(events)
    assert event_types(events)[-2:] == ["output_item.done", "incomplete"]
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert (response.status, response.incomplete_details) == (status, details)
    assert (response.completed_at, response.error) == (None, None)
    assert response.usage is not None
    assert response.usage.output_tokens == 20


@pytest.mark.parametrize("reason", ["max_tool_calls", "max_turns"])
async def test_tool_limit_is_the_reason_of_an_incomplete_response(reason: Any) -> None:
    response = final(await emitted((started(), *message("Let me see."), finished(reason))))
    assert (response.status, response.completed_at) == ("incomplete", None)
    assert response.incomplete_details == IncompleteDetails(reason)
    assert response.usage is not None


@pytest.mark.defect("B21")
async def test_queued_response_begins_in_progress() -> None:
    events = await emitted((started(status="queued", background=True), *message("Hello!"), finished()))
    assert event_types(events)[:3] == ["created", "queued", "in_progress"]
    assert [sse_json(event)["response"]["status"] for event in events[:3]] == ["queued", "queued", "in_progress"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final(events).status == "completed"


async def test_queued_response_may_fail() -> None:
    response = final(await emitted([started(status="queued", background=True)], EngineFailed("x")))
    assert response.status == "failed"


async def test_limit_between_items_leaves_them_complete() -> None:
    response = final(await emitted((started(), *message("Hello!"), finished("length"))))
    assert response.status == "incomplete"
    assert [item.status for item in response.output] == ["completed"]


async def test_tokens_follow_their_item() -> None:
    texts = (frames.ReasoningOpened(), frames.ItemDelta("So."), frames.ItemClosed(complete=True, token_ids=(1, 2)))
    async with aclosing(Emit()(frame_source((started(), *texts, *message("Hello!"), finished())))) as out:
        sequence = [frame async for frame in out]
    (at,) = (at for at, frame in enumerate(sequence) if isinstance(frame, frames.ItemTokens))
    assert sequence[at] == frames.ItemTokens("rs_10000", (1, 2))
    assert event_types([frame for frame in sequence[at - 1 : at + 2] if isinstance(frame, Event)]) == [
        "output_item.done",
        "output_item.added",
    ]
    checked(frame for frame in sequence if isinstance(frame, Event))


RAW = ({"role": "user", "content": []},)
OUTPUT = ({"role": "assistant", "channel": "final", "content": []},)


async def test_raw_messages_are_null_until_the_last_event() -> None:
    """As in vLLM."""
    events = await emitted((started(raw_messages=RAW), *message("Hello!"), finished(raw_messages=OUTPUT)))
    assert (final(events).input_messages, final(events).output_messages) == (RAW, OUTPUT)
    for event in events[:2]:
        assert {"input_messages": None, "output_messages": None}.items() <= sse_json(event)["response"].items()
    events = await emitted((started(), *message("Hello!"), finished()))
    assert not {"input_messages", "output_messages"} & set(sse_json(events[-1])["response"])


async def test_failed_response_has_its_raw_prompt() -> None:
    events = await emitted((started(raw_messages=RAW), *message("Hello!")), EngineFailed("x"))
    assert (final(events).input_messages, final(events).output_messages) == (RAW, ())


# Failures


@pytest.mark.defect("V6")
@pytest.mark.parametrize(
    "opening",
    [
        frames.ReasoningOpened(),
        frames.MessageOpened("final_answer"),
        frames.RefusalOpened(),
        frames.FunctionCallOpened("clock"),
        frames.CustomToolCallOpened("shell"),
        frames.McpCallOpened("wiki", "ask"),
        frames.CodeCallOpened(),
    ],
)
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailed("The engine gave up."), "server_error"),
        (EngineDead("It died."), "server_error"),
        (EngineOverloaded("The queue is full."), "rate_limit_exceeded"),
        (InvalidRequest("The page is too long."), "invalid_prompt"),
    ],
)
async def test_error_in_an_item_closes_it_and_fails(
    opening: frames.ConversedFrame, error: StageError, code: str
) -> None:
    events = await emitted((started(), *message("Hello!"), opening, frames.ItemDelta("So")), error)
    response = final(events)
    assert event_types(events)[-2:] == ["output_item.done", "failed"]
    assert response.error == ErrorDetails(code, error.message)
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert text_of(response.output[-1]) == "So"
    assert (response.completed_at, response.incomplete_details, response.usage) == (None, None, None)


def promised(text_format: str, *, held_to_grammar: bool = True, **stops: Any) -> frames.GenerationStarted:
    """The first frame of a response whose answer must have a format."""
    kind = {"type": text_format} | ({"name": "n", "schema": {}} if text_format == "json_schema" else {})
    first = replace(started(text={"format": kind}), held_to_grammar=held_to_grammar)
    return frames.with_facts(first, sampling=frames.Sampling(1.0, 1.0, **stops))


JSON = ["json_schema", "json_object"]


@pytest.mark.defect("22")
@pytest.mark.parametrize("text_format", JSON)
@pytest.mark.parametrize("phase", ["final_answer", None])
@pytest.mark.parametrize("text", ['{"a": "xx', "", "{}{}", "Sorry", "[" * 100_000 + "]" * 100_000])
async def test_answer_that_breaks_its_json_format_fails(text_format: str, phase: Phase | None, text: str) -> None:
    """A grammar that breaks down leaves a partial answer, which must not look complete."""
    answer = message(*filter(None, [text]), phase=phase)
    events = await emitted((promised(text_format), *reasoning("So."), *answer, finished()))
    response = final(events)
    assert event_types(events)[-1] == "failed"
    assert [item.status for item in response.output] == ["completed", "incomplete"]
    assert text_of(response.output[-1]) == text
    assert response.error is not None
    assert "could not hold the model to the format" in response.error.message


@pytest.mark.defect("22")
@pytest.mark.parametrize("text_format", JSON)
@pytest.mark.parametrize("text", ["{}", ' {"a": [1e999, "é"]}\n', "9" * 5000])
async def test_answer_in_any_json_completes(text_format: str, text: str) -> None:
    whole = (*message("Let me see.", phase="commentary"), *function_call("{"), *refusal("No."), *message(text))
    assert event_types(await emitted((promised(text_format), *whole, finished())))[-1] == "completed"


@pytest.mark.parametrize(
    "begun",
    [
        promised("text"),
        promised("json_object", stop=("x",)),
        promised("json_object", stop_token_ids=(5,)),
        promised("json_object", held_to_grammar=False),
    ],
)
async def test_answer_without_promised_json_completes(begun: frames.GenerationStarted) -> None:
    """Text is free, a stop text or token may cut any answer, and a stored response is sent again unchanged."""
    assert event_types(await emitted((begun, *message('{"a'), finished())))[-1] == "completed"


@pytest.mark.parametrize("cut", [False, True])
async def test_hidden_reasoning_reaches_no_client(cut: bool) -> None:
    begun = frames.with_facts(started(), hides_reasoning=True)
    thought = reasoning("A secret.", complete=not cut)
    turn = (begun, *thought, finished("length")) if cut else (begun, *thought, *message("Hello!"), finished())
    events = checked(await emitted(turn))
    assert not any("secret" in str(event) or isinstance(event, frames.ItemTokens) for event in events)
    response = final(events)
    assert [item.id for item in response.output] == ([] if cut else ["msg_10001"])
    assert response.usage == final(await emitted((started(), *turn[1:]))).usage


async def test_truncated_json_is_incomplete() -> None:
    turn = (promised("json_object"), *message('{"a', complete=False), finished("length"))
    assert event_types(await emitted(turn))[-1] == "incomplete"


async def test_stage_error_is_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    await emitted((started(),), EngineFailed("The engine gave up."))
    (record,) = caplog.records
    assert (record.levelname, record.exc_info) == ("WARNING", None)
    assert "The engine gave up." in record.getMessage()


async def test_bug_is_hidden_from_the_client_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    """It may hold secrets: the client gets the response's id, the log the traceback."""
    with caplog.at_level(logging.ERROR):
        events = await emitted((started(), frames.ReasoningOpened()), ZeroDivisionError("secret"))
    error = final(events).error
    assert error is not None
    assert error.code == "server_error"
    assert "resp_1" in error.message
    assert "secret" not in error.message
    (record,) = caplog.records
    assert "resp_1" in record.getMessage()
    assert record.exc_info
    assert isinstance(record.exc_info[1], ZeroDivisionError)


@pytest.mark.parametrize("error", [ContextTooLong(9, 8), EngineDead("It died."), ZeroDivisionError("bug")])
async def test_error_before_the_first_frame_is_raised(error: Exception) -> None:
    """Without a response nothing can fail, so the error goes on unchanged."""
    with pytest.raises(type(error)) as caught:
        await emitted((), error)
    assert caught.value is error


async def test_source_without_a_frame_is_a_bug() -> None:
    with pytest.raises(InvariantBroken, match="ends with TurnFinished"):
        await emitted(())


@pytest.mark.parametrize(
    "rest", [(), reasoning("So."), (*message("Hello!"), frames.ReasoningOpened(), frames.ItemDelta("So"))]
)
async def test_stream_without_its_end_has_failed(rest: Frames) -> None:
    """Without ``TurnFinished`` the model was not done, however complete the text looks."""
    events = await emitted((started(), *rest))
    assert event_types(events)[-1] == "failed"
    error = final(events).error
    assert error is not None
    assert error.message.startswith("Internal error.")


async def test_foreign_frame_is_reported_by_its_type() -> None:
    """The message helps the author of the stage that gave it."""
    foreign: list[Any] = ["So"]
    with pytest.raises(InvariantBroken, match="emit takes no str: a stage has put it in"):
        await emitted(foreign)


async def test_error_after_the_last_turn_fails() -> None:
    events = await emitted(whole_turn(), EngineFailed("The engine gave up."))
    assert event_types(events).count("completed") == 0
    assert event_types(events)[-1] == "failed"


@pytest.mark.parametrize(
    "sequence",
    [
        (frames.ItemDelta("So"),),
        (frames.ItemClosed(complete=True),),
        (*message("Hello!"), frames.ItemDelta("!")),
        (frames.ReasoningOpened(), frames.ItemDelta("So"), frames.MessageOpened("final_answer")),
        (frames.ReasoningOpened(), frames.ItemDelta("So"), finished()),
        (frames.AnnotationAdded({}),),
        (frames.ReasoningOpened(), frames.AnnotationAdded({})),
        (frames.RefusalOpened(), frames.AnnotationAdded({})),
        (frames.FunctionCallOpened("clock"), frames.AnnotationAdded({})),
        (started(), frames.ResponseStarted(started().facts)),
        (frames.CallStarted(),),
        (frames.CallFinished(),),
        (frames.MessageOpened("final_answer"), frames.CallStarted()),
        (frames.MessageOpened("final_answer"), frames.CallFinished()),
        (frames.McpCallOpened("wiki", "ask"), frames.CallFinished()),
        (frames.CodeCallOpened(), frames.CallStarted(), frames.CallStarted()),
        (frames.CodeCallOpened(), frames.CallStarted(), frames.CallFinished(), frames.CallFinished()),
        (frames.McpListToolsOpened("wiki"), frames.ItemDelta("So")),
        (frames.ShellOutputOpened(),),
        ("So",),
        (frames.MessageOpened("final_answer"), "So"),
    ],
)
async def test_frames_against_the_grammar_fail_the_response(sequence: Frames, caplog: pytest.LogCaptureFixture) -> None:
    """A broken parser gives a failed stream, not an unreadable one."""
    events = await emitted((started(), *sequence))
    assert event_types(events)[-1] == "failed"
    assert [record.levelname for record in caplog.records] == ["ERROR"]


@pytest.mark.defect("V7")
@pytest.mark.parametrize(
    ("sequence", "last"),
    [
        ((frames.ReasoningOpened(),), "content_part.added"),
        ((frames.CodeCallOpened(), frames.CallStarted()), "code_interpreter_call.interpreting"),
    ],
)
async def test_cancellation_is_no_failure_and_leaves_the_item_open(sequence: Frames, last: str) -> None:
    seen = []
    with pytest.raises(asyncio.CancelledError):
        async for event in Emit()(frame_source((started(), *sequence), asyncio.CancelledError())):
            seen.append(event)  # noqa: PERF401 - a comprehension would be lost with the error
    assert event_types(client_events(seen))[-1] == last


async def test_leaving_early_ends_the_events() -> None:
    stream: AsyncGenerator[Any, None] = Emit()(frame_source(whole_turn()))
    for _ in range(6):
        await anext(stream)
    await stream.aclose()
    assert [event async for event in stream] == []


# Any turn


def text_of(item: OutputItem) -> str:
    """The text that the deltas of an item must join to."""
    if isinstance(item, Message | Reasoning | FunctionCall | CustomToolCall | McpCall | CodeInterpreterCall):
        return item.text
    return ""


def summed(events: Iterable[ResponseEvent]) -> dict[int, str]:
    """The joined deltas of each item, by output index."""
    texts: dict[int, str] = {}
    for event in events:
        if isinstance(event, TextDelta):
            texts[event.output_index] = texts.get(event.output_index, "") + event.delta
    return texts


@given(turn=response_frames(), error=st.none() | st.just(EngineFailed("x")) | st.just(ValueError("x")), data=st.data())
async def test_any_turn_is_a_stream_that_clients_can_read(
    turn: Frames, error: Exception | None, data: st.DataObject
) -> None:
    if error:
        turn = turn[: data.draw(st.integers(1, len(turn)))]
    logging.disable(logging.CRITICAL)
    try:
        events = await emitted(turn, error)
    finally:
        logging.disable(logging.NOTSET)
    assert isinstance(events[-1], ResponseFailed) == (error is not None)
    texts = {index: text for index, item in enumerate(final(events).output) if (text := text_of(item))}
    assert summed(events) == texts


async def test_repairs_of_items_and_of_turns_are_counted() -> None:
    def counted(kind: str) -> float:
        return REGISTRY.get_sample_value("penstock_harmony_repairs_total", {"kind": kind}) or 0.0

    before = counted("empty call"), counted("missing end")
    closed = frames.ItemClosed(complete=True, repairs=("missing end",))
    ended = finished(repairs=("empty call",))
    await emitted((started(), frames.ReasoningOpened(), frames.ItemDelta("So."), closed, ended))
    assert (counted("empty call"), counted("missing end")) == (before[0] + 1, before[1] + 1)
