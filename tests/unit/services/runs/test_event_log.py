from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.pipeline.errors import RunInterrupted, StageError
from penstock.pipeline.frames import ParsedFrame, TokenChunk, TokenFrame
from penstock.pipeline.lifecycle.outcome import begun
from penstock.pipeline.protocol.events import Delta, OutputItemAdded, ResponseCreated, ResponseEvent, to_sse
from penstock.pipeline.protocol.generations import Generation
from penstock.pipeline.protocol.items import ListedTool, McpListTools
from penstock.pipeline.protocol.response import Response, Usage
from penstock.pipeline.recordings.format import read_frames
from penstock.services.runs.event_log import Block, EventLog, LogReader, read_blocks
from penstock.services.usage import TurnTokens, usage_of
from tests.support import frames
from tests.support.event_streams import checked, final
from tests.support.examples import examples
from tests.support.paths import HARMONY
from tests.support.stream_changes import renumber

Events: TypeAlias = list[ResponseEvent]

LONG = HARMONY / "long_reasoning"

EVENTS_IN_A_BLOCK = 5
"""The number of events of one response in a quarter of a second, at twenty tokens per second."""


USAGE = usage_of([TurnTokens(prompt=9, cached=3, output=5, reasoning=2)], lists_turns=False)


class Logged(EventLog):
    """A log that remembers what it sealed."""

    def __init__(self, response: Response, kept: Iterable[Block] = ()) -> None:
        super().__init__(response, kept)
        self.blocks = [*kept]

    def seal(self) -> Block | None:
        return self._remembered(super().seal())

    def end_early(
        self,
        error: Exception | None,
        usage: Usage | None,
        generations: tuple[Generation, ...] | UnsetType = UNSET,
    ) -> Block | None:
        return self._remembered(super().end_early(error, usage, generations))

    def _remembered(self, block: Block | None) -> Block | None:
        self.blocks += [block] if block else []
        return block


def logged(events: Iterable[ResponseEvent], sealed_at: Iterable[int] = ()) -> Logged:
    """A log of these events, sealed after the events at these positions."""
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


streams = st.builds(
    frames.written_events, frames.response_frames() | frames.response_frames().map(frames.background_turn)
)
"""Streams as the writer makes them; some are of responses that were queued."""

stops = st.sets(st.integers(0, 60))
"""The positions of events after which a log is sealed."""


# Reading again


@pytest.mark.defect("V2", "V3")
@examples(150)
@given(streams, stops)
def test_log_reads_back_to_the_same_bytes(events: Events, sealed_at: set[int]) -> None:
    log = logged(events, sealed_at)
    for after in range(-1, len(events) + 1):
        assert on_the_wire(log.read(after)) == on_the_wire(events[after + 1 :])


@examples(150)
@given(streams, stops)
def test_stored_blocks_read_back_with_the_final_response(events: Events, sealed_at: set[int]) -> None:
    log = logged(events, sealed_at)
    log.seal()
    assert [block.first for block in log.blocks] == [0, *(at + 1 for at in sorted(sealed_at) if at < len(events) - 1)]
    assert sum(block.count for block in log.blocks) == len(events)
    assert on_the_wire(read_blocks(final(events), log.blocks)) == on_the_wire(events)


@given(streams, stops, st.integers(0, 60))
def test_log_continues_from_stored_blocks(events: Events, sealed_at: set[int], at: int) -> None:
    head, tail = events[: at + 1], events[at + 1 :]
    before = logged(head, sealed_at)
    before.seal()
    log = Logged(begun(_first(events)), before.blocks)
    assert log.next_number == len(head)
    for event in tail:
        log.append(event)
    log.seal()
    assert on_the_wire(read_blocks(final(events), log.blocks)) == on_the_wire(events)


# Streams that penstock's writer never makes

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
    ("logprobs", frames.spelled_delta("other").logprobs),
]


@st.composite
def odd_streams(draw: st.DrawFn) -> Events:
    """Draw streams that a plug-in stage has changed between the first event and the last."""
    first, *inner, last = draw(streams)
    for at in draw(st.lists(st.integers(0, len(inner) - 1), max_size=4)):
        name, value = draw(st.sampled_from(_FIELDS))
        if isinstance(getattr(inner[at], name, None), type(value)):
            inner[at] = replace(inner[at], **{name: value})
    order = draw(st.permutations(inner) | st.just(inner))
    again = draw(st.lists(st.sampled_from(inner), max_size=2))
    events = renumber([first, *order, *again, last])
    gone = draw(st.sets(st.integers(0, len(events) - 1), max_size=3))
    return [event for at, event in enumerate(events) if at not in gone]


@examples(300)
@given(odd_streams(), stops)
def test_any_events_read_back(events: Events, sealed_at: set[int]) -> None:
    log = EventLog(frames.started().facts.response)
    for at, event in enumerate(events):
        log.append(event)
        if at in sealed_at:
            log.seal()
    assert on_the_wire(log.read()) == on_the_wire(events)
    log.seal()
    assert on_the_wire(log.read()) == on_the_wire(events)


# Readers of a log that grows


@examples(150)
@given(streams, stops, st.lists(st.tuples(st.integers(-1, 40), st.integers(1, 9)), min_size=1, max_size=3))
def test_readers_of_any_pace_see_the_same(events: Events, sealed_at: set[int], readers: list[tuple[int, int]]) -> None:
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


def test_reader_that_keeps_up_decodes_nothing() -> None:
    events = frames.written_events(frames.whole_turn())
    log = logged(events[:1])
    reader = LogReader(log)
    seen = list(reader.read())
    for event in events[1:]:
        log.append(event)
        seen.extend(reader.read())
        log.seal()
    assert all(one is other for one, other in zip(seen, events, strict=True))


# Interrupted runs


@pytest.mark.defect("V2", "V3")
@examples(150)
@given(streams, stops, st.integers(0, 60), st.sampled_from([RunInterrupted(), None]), st.sampled_from([USAGE, None]))
def test_log_can_be_ended_after_any_event(
    events: Events, sealed_at: set[int], at: int, error: StageError | None, usage: Usage | None
) -> None:
    head = events[: at % (len(events) - 1) + 1]
    log = logged(head, sealed_at)
    log.end_early(error, usage)
    ended = checked(log.read())
    assert ended[: len(head)] == head
    assert log.response == final(ended)
    assert (log.response.status, log.response.usage) == (("failed", None) if error else ("cancelled", usage))
    assert on_the_wire(read_blocks(log.response, log.blocks)) == on_the_wire(ended)


@pytest.mark.defect("V1")
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"status": "queued", "background": True}, ["created", "queued", "failed"]),
        ({"status": "in_progress", "background": True}, ["created", "queued", "in_progress", "failed"]),
        ({"status": "in_progress"}, ["created", "in_progress", "failed"]),
    ],
)
def test_log_without_events_begins_before_it_ends(fields: dict[str, Any], expected: list[str]) -> None:
    log = EventLog(frames.started(**fields).facts.response)
    log.end_early(RunInterrupted(), None)
    assert frames.event_types(checked(log.read())) == expected


# Size


def test_log_reads_back_integers_of_any_size() -> None:
    log = EventLog(frames.started().facts.response)
    log.begin()
    schema = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 2**128 - 1}}}
    listed = McpListTools("mcpl_1", server_label="tools", tools=(ListedTool("find", schema),))
    events = [*log.fresh, OutputItemAdded(log.next_number, 0, listed)]
    log.append(events[-1])
    log.seal()
    assert on_the_wire(log.read()) == on_the_wire(events)


def test_token_takes_16_bytes_at_most() -> None:
    turn = list(read_frames(LONG / "parsed.jsonl", ParsedFrame))
    tokens = sum(
        len(frame.token_ids)
        for frame in read_frames(LONG / "tokens.jsonl", TokenFrame)
        if isinstance(frame, TokenChunk)
    )
    events = frames.written_events(turn)
    log = logged(events, range(0, len(events), EVENTS_IN_A_BLOCK))
    log.seal()
    assert sum(len(block.data) for block in log.blocks) < 8 * tokens
    assert log.size < 16 * tokens


@pytest.mark.defect("V7")
@pytest.mark.parametrize("call", [frames.mcp_call, frames.code_call])
def test_call_arguments_take_their_length(call: Callable[..., frames.Frames]) -> None:
    words = ["word "] * 1000
    log = logged(frames.written_events((frames.started(), *call(*words), frames.finished())))
    log.seal()
    assert log.size < 16 * len(words)


@pytest.mark.defect("V7")
@pytest.mark.parametrize(
    ("call", "done"),
    [(frames.mcp_call("{}"), "mcp_call.completed"), (frames.mcp_list(frames.LISTED_TOOL), "mcp_list_tools.completed")],
)
def test_log_without_its_result_marks_the_item(call: frames.Frames, done: str) -> None:
    events = frames.written_events((frames.started(), *call, frames.finished()))
    log = logged(events[: frames.event_types(events).index(done) + 1])
    log.end_early(RunInterrupted(), None)
    ended = checked(log.read())
    assert frames.event_types(ended)[-3:] == [done, "output_item.done", "failed"]


@pytest.mark.parametrize(
    "turn",
    [
        frames.whole_turn(),
        frames.rare_turn(),
        frames.summary_turn(),
        frames.background_turn(frames.whole_turn()),
        frames.server_turns(),
        frames.client_turn(),
    ],
)
def test_predictable_event_takes_one_byte(turn: frames.Frames) -> None:
    events = frames.written_events(turn)
    received = [event for event in events if not isinstance(event, Delta) and not frames.is_unforeseen(event)]
    log = logged(events, range(len(events)))
    sizes = {block.first: len(block.data) for block in log.blocks}
    assert {sizes[event.sequence_number] for event in received[:-1]} == {2}  # an array of one number
