from __future__ import annotations

import ast
import inspect
from contextlib import aclosing
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.core import source_of
from penstock.pipeline.lifecycle import call_checker as call_invariants
from penstock.pipeline.lifecycle import checker as invariants
from penstock.pipeline.lifecycle import item_checker as item_invariants
from penstock.pipeline.lifecycle import order as order_invariants
from penstock.pipeline.lifecycle import rules
from penstock.pipeline.lifecycle.checker import StreamChecker, check
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol.events import (
    OutputTextAnnotationAdded,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
)
from tests.support.broken_streams import ASKED, BROKEN, BROKEN_CALLS, CUT_TURN, ERROR, RARE, SERVED, SUMMARY, TWO_CALLS
from tests.support.frames import (
    Frames,
    finished,
    message,
    response_frames,
    spelled_delta,
    started,
    whole_turn,
    written_events,
)
from tests.support.stream_changes import Change, Events, done_outputs, drop, first_response, queued, renumber, repeat

RULES = BROKEN | BROKEN_CALLS


def fed(events: Events) -> None:
    stream = StreamChecker()
    for event in events:
        stream.feed(event)
    stream.finish()


@pytest.mark.parametrize(("rule", "change"), [(rule, change) for rule, changes in RULES.items() for change in changes])
def test_broken_rule_is_named(rule: str, change: Change) -> None:
    with pytest.raises(InvariantBroken) as caught:
        fed(change(written_events(whole_turn())))
    assert str(caught.value) == rule


def test_table_has_every_rule() -> None:
    nodes = [
        node
        for module in (invariants, order_invariants, item_invariants, call_invariants, rules)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
    ]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    stated = {
        call.args[-1].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id in ("rule", "InvariantBroken")
        if isinstance(call.args[-1], ast.Constant)
    }
    assert stated == set(RULES)


@pytest.mark.parametrize(
    "frames", [whole_turn(), CUT_TURN, TWO_CALLS, RARE, SUMMARY, SERVED, ASKED, (started(), finished())]
)
def test_good_streams_pass(frames: Frames) -> None:
    fed(written_events(frames))
    fed(queued(written_events(frames)))


@pytest.mark.parametrize(("text", "tokens"), [("y", "y STOP"), ("y ST", "y ")])
def test_stop_text_may_cut_the_last_token(text: str, tokens: str) -> None:
    cut = replace(spelled_delta(text), logprobs=spelled_delta(tokens).logprobs)
    fed(written_events((started(), *message(spelled_delta("Hé"), cut), finished())))


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_queued_response_may_end(status: Any) -> None:
    events = queued(written_events(whole_turn()))[:2]
    response = replace(first_response(events), status=status, error=ERROR if status == "failed" else None)
    end = ResponseFailed if status == "failed" else ResponseIncomplete
    fed([*events, end(sequence_number=2, response=response)])


def test_cancelled_response_ends_as_incomplete() -> None:
    """Clients know no event for cancelled responses, so status and event name differ."""
    *events, _ = written_events(CUT_TURN)
    response = replace(first_response(events), status="cancelled", output=done_outputs(events))
    fed([*events, ResponseIncomplete(sequence_number=len(events), response=response)])


def test_failed_response_may_end_between_items() -> None:
    *events, _ = written_events(CUT_TURN)
    response = replace(first_response(events), status="failed", output=done_outputs(events), error=ERROR)
    fed([*events, ResponseFailed(sequence_number=len(events), response=response)])


# Any stream


def commute(first: ResponseEvent, second: ResponseEvent) -> bool:
    """True if the two events may be swapped: a delta and an annotation, or deltas that join to the same text."""
    if isinstance(first, OutputTextAnnotationAdded) != isinstance(second, OutputTextAnnotationAdded):
        return any(hasattr(event, "delta") for event in (first, second))
    one, other = getattr(first, "delta", None), getattr(second, "delta", None)
    return one is not None and other is not None and one + other == other + one


@given(frames=response_frames(), data=st.data())
def test_missing_event_is_refused(frames: Frames, data: st.DataObject) -> None:
    events = written_events(frames)
    fed(events)
    at = data.draw(st.integers(0, len(events) - 1))
    for changed in (drop(at)(events), [*events[:at], *events[at + 1 :]]):
        with pytest.raises(InvariantBroken):
            fed(changed)


@given(frames=response_frames(), data=st.data())
def test_swapped_events_are_refused(frames: Frames, data: st.DataObject) -> None:
    events = written_events(frames)
    at = data.draw(st.integers(0, len(events) - 2))
    assume(not commute(*events[at : at + 2]))
    swapped = [*events[:at], events[at + 1], events[at], *events[at + 2 :]]
    for changed in (renumber(swapped), swapped):
        with pytest.raises(InvariantBroken):
            fed(changed)


# The stage


async def test_check_passes_events_on() -> None:
    events = written_events(whole_turn())
    async with aclosing(check(source_of(events))) as passed:
        assert all(event is given for event, given in zip([event async for event in passed], events, strict=True))


@pytest.mark.parametrize(("change", "good"), [(repeat(4), 7), (drop(21), 21), (drop(3), 3)])
async def test_check_stops_at_the_broken_rule(change: Change, good: int) -> None:
    passed = []
    with pytest.raises(InvariantBroken):
        async for event in check(source_of(change(written_events(whole_turn())))):
            passed.append(event)  # noqa: PERF401 - a comprehension would be lost with the error
    assert len(passed) == good
