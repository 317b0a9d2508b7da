from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import aclosing

from hypothesis import given

from penstock.pipeline.core import source_of
from penstock.pipeline.frames import AnnotationAdded
from penstock.pipeline.protocol.events import ResponseEvent, to_sse
from penstock.stages.optional.openresponses import OpenResponsesEvent, open_responses
from tests.support import frames
from tests.support.examples import examples

RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


async def renamed(events: Iterable[ResponseEvent]) -> list[OpenResponsesEvent]:
    async with aclosing(open_responses(source_of(events))) as out:
        return [event async for event in out]


async def test_raw_reasoning_events_are_renamed() -> None:
    events = await renamed(frames.written_events(frames.whole_turn()))
    wire = [frames.sse_json(event) for event in events[4:7]]
    place = {"item_id": "rs_10000", "output_index": 0, "content_index": 0}
    assert wire == [
        {"type": "response.reasoning.delta", "sequence_number": 4, **place, "delta": "Let me "},
        {"type": "response.reasoning.delta", "sequence_number": 5, **place, "delta": "think."},
        {"type": "response.reasoning.done", "sequence_number": 6, **place, "text": "Let me think."},
    ]
    assert to_sse(events[4]).startswith(b'event: response.reasoning.delta\ndata: {"type":"response.reasoning.delta",')


@examples(50)
@given(turn=frames.response_frames())
async def test_other_events_are_unchanged(turn: frames.Frames) -> None:
    events = frames.written_events(turn)
    ours = [frames.sse_json(event) for event in events]
    theirs = [frames.sse_json(event) for event in await renamed(events)]
    assert theirs == [{**body, "type": RENAMED.get(body["type"], body["type"])} for body in ours]


async def test_unchanged_events_are_not_copied() -> None:
    events = frames.written_events(
        (frames.started(), *frames.message("Hel", AnnotationAdded({}), "lo!"), frames.finished())
    )
    passed = await renamed(events)
    assert all(event is given for event, given in zip(passed, events, strict=True))


async def test_server_side_calls_are_unchanged() -> None:
    """Open Responses has no names of its own for them."""
    events = frames.written_events(frames.server_turns())
    passed = await renamed(events)
    changed = [(event, given) for event, given in zip(passed, events, strict=True) if event is not given]
    assert {given.__struct_config__.tag for _, given in changed} == set(RENAMED)


async def test_absent_fields_are_left_out() -> None:
    """Open Responses allows no null in the fields of reasoning."""
    for event in await renamed(
        frames.written_events(
            (frames.started(), *frames.reasoning("So."), *frames.message("Hello!"), frames.finished())
        )
    ):
        items = [frames.sse_json(event).get("item"), *(frames.sse_json(event).get("response") or {}).get("output", ())]
        for item in items:
            if item and item["type"] == "reasoning":
                assert None not in item.values()
                assert "null" not in json.dumps(item)
