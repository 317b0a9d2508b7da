from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import aclosing
from typing import Any

from hypothesis import given, settings

from pipeline.frames import AnnotationAdded
from pipeline.protocol.events import ResponseEvent, to_sse
from pipeline.record import replay
from stages.openresponses import OpenResponsesEvent, open_responses, spelled_out
from tests.building import Frames, finished, message, on_the_wire, reasoning, started, turns, whole_turn, written
from tests.stages.persist.samples import response

RENAMED = {
    "response.reasoning_text.delta": "response.reasoning.delta",
    "response.reasoning_text.done": "response.reasoning.done",
}


async def renamed(events: Iterable[ResponseEvent]) -> list[OpenResponsesEvent]:
    async with aclosing(open_responses(replay(events))) as out:
        return [event async for event in out]


def without_tools(body: dict[str, Any]) -> dict[str, Any]:
    if "response" in body:
        return {**body, "response": {**body["response"], "tools": None}}
    return body


async def test_raw_reasoning_has_another_name() -> None:
    """Its events are those of Open Responses, with the same fields in the same order."""
    events = await renamed(written(whole_turn()))
    wire = [on_the_wire(event) for event in events[4:7]]
    place = {"item_id": "rs_10000", "output_index": 0, "content_index": 0}
    assert wire == [
        {"type": "response.reasoning.delta", "sequence_number": 4, **place, "delta": "Let me "},
        {"type": "response.reasoning.delta", "sequence_number": 5, **place, "delta": "think."},
        {"type": "response.reasoning.done", "sequence_number": 6, **place, "text": "Let me think."},
    ]
    assert to_sse(events[4]).startswith(b'event: response.reasoning.delta\ndata: {"type":"response.reasoning.delta",')


@settings(max_examples=50, deadline=None)
@given(turn=turns())
async def test_everything_else_is_the_same(turn: Frames) -> None:
    """No event is added, lost, moved or changed beside the two names and the tools."""
    events = written(turn)
    ours = [without_tools(on_the_wire(event)) for event in events]
    theirs = [without_tools(on_the_wire(event)) for event in await renamed(events)]
    assert theirs == [{**body, "type": RENAMED.get(body["type"], body["type"])} for body in ours]


async def test_what_is_the_same_is_not_even_copied() -> None:
    """Most events pass as they came."""
    events = written((started(), *message("Hel", AnnotationAdded({}), "lo!"), finished()))
    passed = await renamed(events)
    assert all(event is given for event, given in zip(passed[2:-1], events[2:-1], strict=True))


def test_a_function_is_spelled_out() -> None:
    """Strict readers want description, parameters and strict in every echo of a function; what was given stays."""
    tools = (
        {"type": "function", "name": "clock"},
        {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True, "x": 1},
        {"type": "custom", "name": "shell"},
    )
    assert spelled_out(response(tools=tools)).tools == (
        {"type": "function", "name": "clock", "description": None, "parameters": None, "strict": None},
        {
            "type": "function",
            "name": "add",
            "description": None,
            "parameters": {"type": "object"},
            "strict": True,
            "x": 1,
        },
        {"type": "custom", "name": "shell"},
    )


async def test_nothing_is_null_that_must_not_be() -> None:
    """Open Responses leaves out the reasoning fields that have no value: its readers take no null for them."""
    for event in await renamed(written((started(), *reasoning("So."), *message("Hello!"), finished()))):
        items = [on_the_wire(event).get("item"), *(on_the_wire(event).get("response") or {}).get("output", ())]
        for item in items:
            if item and item["type"] == "reasoning":
                assert None not in item.values()
                assert "null" not in json.dumps(item)
