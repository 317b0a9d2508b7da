from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pipeline.errors import RunInterrupted, StageError
from pipeline.frames import ParsedFrame, TokenChunk, TokenFrame
from pipeline.outcome import begun
from pipeline.protocol.events import (
    Delta,
    ResponseCreated,
    ResponseEvent,
    to_sse,
)
from pipeline.protocol.response import Response
from pipeline.record import read_frames
from stages.persist.log import Block, EventLog, LogReader, read_blocks
from tests.support.event_streams import checked, final
from tests.support.frame_strategies import turns
from tests.support.frames import (
    LISTED,
    Frames,
    asking_turn,
    code_call,
    finished,
    in_background,
    is_news,
    mcp_call,
    mcp_list,
    rare_turn,
    served_turns,
    spelled,
    started,
    summarised_turn,
    types,
    whole_turn,
    written,
)
from tests.support.paths import HARMONY
from tests.support.stream_changes import renumbered

Events: TypeAlias = list[ResponseEvent]

LONG = HARMONY / "long_reasoning"

EVENTS_IN_A_BLOCK = 5
"""What comes of one response in a quarter of a second, at twenty tokens per second."""


class Logged(EventLog):
    """A log that remembers what it sealed."""

    def __init__(self, response: Response, kept: Iterable[Block] = ()) -> None:
        super().__init__(response, kept)
        self.blocks = [*kept]

    def seal(self) -> Block | None:
        return self._remembered(super().seal())

    def break_off(self, error: Exception | None) -> Block | None:
        return self._remembered(super().break_off(error))

    def _remembered(self, block: Block | None) -> Block | None:
        self.blocks += [block] if block else []
        return block


def logged(events: Iterable[ResponseEvent], sealed_at: Iterable[int] = ()) -> Logged:
    """A log of these events, sealed behind those positions."""
    events, stops = list(events), set(sealed_at)
    log = Logged(begun(_first(events)))
    for at, event in enumerate(events):
        log.append(event)
        if at in stops:
            log.seal()
    return log


def _first(events: Events) -> Response:
    first = events[0]
    assert isinstance(first, ResponseCreated)
    return first.response


def on_the_wire(events: Iterable[ResponseEvent]) -> list[bytes]:
    return [to_sse(event) for event in events]


streams = st.builds(written, turns() | turns().map(in_background))
"""Streams as the writer makes them, some of them of responses that waited."""

stops = st.sets(st.integers(0, 60))
"""Where a log is sealed."""


# Reading again


@pytest.mark.defect("V2", "B15")
@settings(max_examples=150, deadline=None)
@given(streams, stops)
def test_a_log_reads_back_to_the_same_bytes(events: Events, sealed_at: set[int]) -> None:
    """Wherever it was sealed, every event of a log comes back as it was, behind any of its numbers."""
    log = logged(events, sealed_at)
    for after in range(-1, len(events) + 1):
        assert on_the_wire(log.read(after)) == on_the_wire(events[after + 1 :])


@settings(max_examples=150, deadline=None)
@given(streams, stops)
def test_stored_blocks_read_back_with_the_final_response(events: Events, sealed_at: set[int]) -> None:
    """The blocks and the response as it ended are all that it takes."""
    log = logged(events, sealed_at)
    log.seal()
    assert [block.first for block in log.blocks] == [0, *(at + 1 for at in sorted(sealed_at) if at < len(events) - 1)]
    assert sum(block.count for block in log.blocks) == len(events)
    assert on_the_wire(read_blocks(final(events), log.blocks)) == on_the_wire(events)


@settings(max_examples=100, deadline=None)
@given(streams, stops, st.integers(0, 60))
def test_a_log_goes_on_from_stored_blocks(events: Events, sealed_at: set[int], at: int) -> None:
    """Whoever has the blocks so far, and the response as it began, can write the rest."""
    head, tail = events[: at + 1], events[at + 1 :]
    before = logged(head, sealed_at)
    before.seal()
    log = Logged(begun(_first(events)), before.blocks)
    assert log.next_number == len(head)
    for event in tail:
        log.append(event)
    log.seal()
    assert on_the_wire(read_blocks(final(events), log.blocks)) == on_the_wire(events)


# What no writer of ours writes

_FIELDS: list[tuple[str, Any]] = [
    ("item_id", "msg_other"),
    ("output_index", 7),
    ("content_index", 3),
    ("summary_index", 3),
    ("delta", "other"),
    ("text", "other"),
    ("refusal", "other"),
    ("arguments", "other"),
    ("input", "other"),
    ("code", "other"),
    ("command", "other"),
    ("command_index", 3),
    ("output", ()),
    ("annotation", {"type": "other"}),
    ("logprobs", spelled("other").logprobs),
]


@st.composite
def odd_streams(draw: st.DrawFn) -> Events:
    """Streams that a stage of somebody's own has changed between their first event and their last."""
    first, *inner, last = draw(streams)
    for at in draw(st.lists(st.integers(0, len(inner) - 1), max_size=4)):
        name, value = draw(st.sampled_from(_FIELDS))
        if isinstance(getattr(inner[at], name, None), type(value)):
            inner[at] = replace(inner[at], **{name: value})
    order = draw(st.permutations(inner) | st.just(inner))
    again = draw(st.lists(st.sampled_from(inner), max_size=2))
    events = renumbered([first, *order, *again, last])
    gone = draw(st.sets(st.integers(0, len(events) - 1), max_size=3))
    return [event for at, event in enumerate(events) if at not in gone]


@settings(max_examples=300, deadline=None)
@given(odd_streams(), stops)
def test_whatever_a_stage_writes_reads_back(events: Events, sealed_at: set[int]) -> None:
    """Events that nobody could tell, in any order and with gaps in their numbers, come back as they were."""
    log = EventLog(started().response)
    for at, event in enumerate(events):
        log.append(event)
        if at in sealed_at:
            log.seal()
    assert on_the_wire(log.read()) == on_the_wire(events)
    log.seal()
    assert on_the_wire(log.read()) == on_the_wire(events)


# Readers of a log that grows


@settings(max_examples=150, deadline=None)
@given(streams, stops, st.lists(st.tuples(st.integers(-1, 40), st.integers(1, 9)), min_size=1, max_size=3))
def test_readers_of_any_pace_see_the_same(events: Events, sealed_at: set[int], readers: list[tuple[int, int]]) -> None:
    """However often each reader looks, whatever is sealed meanwhile, each sees every event behind its number, once."""
    log = logged(events[:1])
    reading = [(LogReader(log, after), after, pace, Events()) for after, pace in readers]
    for at, event in enumerate(events[1:], start=1):
        log.append(event)
        if at in sealed_at:
            log.seal()
        for reader, _, pace, seen in reading:
            if at % pace == 0:
                seen.extend(reader.read())
    for reader, after, _, seen in reading:
        while reader.is_behind:
            seen.extend(reader.read())
        assert on_the_wire(seen) == on_the_wire(events[after + 1 :])


def test_who_keeps_up_decodes_nothing() -> None:
    """A reader that is never behind is given the very events that were written."""
    events = written(whole_turn())
    log = logged(events[:1])
    reader = LogReader(log)
    seen = list(reader.read())
    for event in events[1:]:
        log.append(event)
        seen.extend(reader.read())
        log.seal()
    assert all(one is other for one, other in zip(seen, events, strict=True))


# Breaking off


@pytest.mark.defect("V2", "B15")
@settings(max_examples=150, deadline=None)
@given(streams, stops, st.integers(0, 60), st.sampled_from([RunInterrupted(), None]))
def test_a_log_ends_in_good_order_anywhere(
    events: Events, sealed_at: set[int], at: int, error: StageError | None
) -> None:
    """Behind any of its events a log can be ended by itself: what was seen stays, then comes one terminal event."""
    head = events[: at % (len(events) - 1) + 1]
    log = logged(head, sealed_at)
    log.break_off(error)
    ended = checked(log.read())
    assert ended[: len(head)] == head
    assert log.response == final(ended)
    assert log.response.status == ("failed" if error else "cancelled")
    assert on_the_wire(read_blocks(log.response, log.blocks)) == on_the_wire(ended)


@pytest.mark.defect("V1")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"status": "queued", "background": True}, ["created", "queued", "failed"]),
        ({"status": "in_progress", "background": True}, ["created", "queued", "in_progress", "failed"]),
        ({"status": "in_progress"}, ["created", "in_progress", "failed"]),
    ],
)
def test_a_log_without_events_begins_before_it_ends(fields: dict[str, Any], said: list[str]) -> None:
    """A server may die before it stored any event: what the stream is sure to have begun with is told all the same."""
    log = EventLog(started(**fields).response)
    log.break_off(RunInterrupted())
    assert types(checked(log.read())) == said


# How much it takes


def test_a_token_takes_16_bytes_at_most() -> None:
    """A recorded response is kept in so much, sealed as it would be in its time, the objects around it included."""
    frames = list(read_frames(LONG / "parsed.jsonl", ParsedFrame))
    tokens = sum(
        len(frame.token_ids)
        for frame in read_frames(LONG / "tokens.jsonl", TokenFrame)
        if isinstance(frame, TokenChunk)
    )
    events = written(frames)
    log = logged(events, range(0, len(events), EVENTS_IN_A_BLOCK))
    log.seal()
    assert sum(len(block.data) for block in log.blocks) < 8 * tokens
    assert log.size < 16 * tokens


@pytest.mark.defect("V7")
@pytest.mark.parametrize("call", [mcp_call, code_call])
def test_what_a_tool_is_called_with_takes_its_text(call: Callable[..., Frames]) -> None:
    """The deltas of arguments and of code are kept as texts; the item repeats them where it has a result."""
    words = ["word "] * 1000
    log = logged(written((started(), *call(*words), finished())))
    log.seal()
    assert log.size < 16 * len(words)


@pytest.mark.defect("B11")
@pytest.mark.parametrize(
    ("call", "done"),
    [(mcp_call("{}"), "mcp_call.completed"), (mcp_list(LISTED), "mcp_list_tools.completed")],
)
def test_a_log_that_lost_a_result_says_so(call: Frames, done: str) -> None:
    """A server may die between the two events that tell how a call ended: the item has no result, and is not whole."""
    events = written((started(), *call, finished()))
    log = logged(events[: types(events).index(done) + 1])
    log.break_off(RunInterrupted())
    ended = checked(log.read())
    assert types(ended)[-3:] == [done, "output_item.done", "failed"]


@pytest.mark.parametrize(
    "frames",
    [whole_turn(), rare_turn(), summarised_turn(), in_background(whole_turn()), served_turns(), asking_turn()],
)
def test_what_can_be_told_takes_a_byte(frames: Frames) -> None:
    """Whatever begins, closes and ends is one byte; only what is new is whole, and deltas are their texts."""
    events = written(frames)
    told = [event for event in events if not isinstance(event, Delta) and not is_news(event)]
    log = logged(events, range(len(events)))
    sizes = {block.first: len(block.data) for block in log.blocks}
    assert {sizes[event.sequence_number] for event in told[:-1]} == {2}  # an array of one number
