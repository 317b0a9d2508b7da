from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from pipeline.frames import AnnotationAdded, CustomToolCallOpened, ItemClosed, ItemDelta, MessageOpened, RefusalOpened
from pipeline.protocol.events import DELTAS, OutputTextAnnotationAdded, ResponseEvent, ResponseIncomplete
from pipeline.protocol.items import Logprob
from pipeline.protocol.response import ReasoningOptions
from stages.persist.again import events_again
from tests.building import Frames, finished, function_call, on_the_wire, reasoning, started, turns, written
from tests.stages.persist.samples import response
from tests.streams import checked, final

CITATION = {"type": "url_citation", "start_index": 0, "end_index": 2, "url": "https://oslo.example", "title": "Oslo"}


def told(events: list[ResponseEvent]) -> tuple[list[Any], list[Any]]:
    """The events without their numbers, each item's deltas joined to one; and the annotations, which may come later."""
    said, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    for event in events:
        body = on_the_wire(event) | {"sequence_number": 0}
        if isinstance(event, OutputTextAnnotationAdded):
            annotations.append(body)
        elif type(event) in DELTAS and said[-1]["type"] == body["type"]:
            said[-1] |= {key: said[-1][key] + body[key] for key in ("delta", "logprobs") if key in body}
        else:
            said.append(body)
    return said, annotations


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns())
def test_a_stored_response_makes_the_stream_that_made_it(frames: Frames) -> None:
    """What is told again is what was told first, down to every id and the last response; only deltas are joined."""
    first = written(frames)
    again = checked(events_again(final(first)))
    assert told(again) == told(first)


def test_every_kind_of_item_is_told_again() -> None:
    """Summaries, refusals, custom calls, namespaces, annotations and logprobs come back as they were."""
    frames: Frames = (
        started(reasoning=ReasoningOptions("low", "auto")),
        *reasoning("Let me ", "think."),
        MessageOpened("commentary"),
        ItemDelta("Os", (Logprob("Os", (79, 115), -0.5),)),
        ItemDelta("lo", (Logprob("lo", (108, 111), -0.25),)),
        AnnotationAdded(CITATION),
        ItemClosed(complete=True),
        RefusalOpened(),
        ItemDelta("No."),
        ItemClosed(complete=True),
        *function_call(),
        CustomToolCallOpened("shell", "machine"),
        ItemDelta("ls"),
        ItemClosed(complete=False),
        finished("length"),
    )
    first = checked(written(frames))
    again = checked(events_again(final(first)))
    assert told(again) == told(first)


@pytest.mark.parametrize("status", ["completed", "incomplete", "failed", "cancelled"])
def test_the_end_is_what_was_stored(status: Any) -> None:
    """Whatever became of a response, its stream ends with it; the cancelled have no event of their own."""
    stored = response("resp_1", status=status, output=())
    *_, last = events_again(stored)
    assert getattr(last, "response", None) == stored
    assert isinstance(last, ResponseIncomplete) is (status in ("incomplete", "cancelled"))
