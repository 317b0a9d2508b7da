"""Changes of a stream of events that break one rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.protocol.events import OutputItemDone, ResponseCreated, ResponseEvent, ResponseQueued
from penstock.pipeline.protocol.items import Logprob, OutputItem
from penstock.pipeline.protocol.response import InputTokensDetails, OutputTokensDetails, Response, Usage
from tests.support.frames import Frames, spelled_delta, written_events

Events: TypeAlias = list[ResponseEvent]
Change: TypeAlias = Callable[[Events], Events]


def first_response(events: Events) -> Response:
    first = events[0]
    assert isinstance(first, ResponseCreated)
    return first.response


def done_outputs(events: Events) -> tuple[OutputItem, ...]:
    return tuple(event.item for event in events if isinstance(event, OutputItemDone))


def renumber(events: Events) -> Events:
    return [replace(event, sequence_number=number) for number, event in enumerate(events)]


def drop(*gone: int) -> Change:
    return lambda events: renumber([event for at, event in enumerate(events) if at not in gone])


def repeat(at: int) -> Change:
    return copy(at, at)


def copy(at: int, behind: int) -> Change:
    return lambda events: renumber([*events[: behind + 1], events[at], *events[behind + 1 :]])


def instead(at: int, event: ResponseEvent) -> Change:
    return lambda events: renumber([*events[:at], event, *events[at + 1 :]])


def put(at: int, /, **fields: Any) -> Change:
    return lambda events: [
        replace(event, **fields) if position == at % len(events) else event for position, event in enumerate(events)
    ]


def put_in(at: int, name: str, /, **fields: Any) -> Change:
    return lambda events: put(at, **{name: replace(getattr(events[at], name), **fields)})(events)


def put_item(at: int, /, **fields: Any) -> Change:
    return put_in(at, "item", **fields)


def put_done_item(at: int, /, **fields: Any) -> Change:
    """Change fields of an event's item, and of the same item in the final response."""

    def change(events: Events) -> Events:
        changed = put_item(at, **fields)(events)
        return put_in(-1, "response", output=done_outputs(changed))(changed)

    return change


def begin(**fields: Any) -> Change:
    return put_in(0, "response", **fields)


def end(**fields: Any) -> Change:
    return put_in(-1, "response", **fields)


def queued(events: Events) -> Events:
    waiting = replace(first_response(events), status="queued")
    return renumber([ResponseCreated(0, waiting), ResponseQueued(1, waiting), *events[1:]])


def usage(
    total: int = 27, cached: int = 4, thought: int = 8, turns: int | None = 1, cached_in_turn: int | None = None
) -> Usage:
    cached_in_turn = cached if cached_in_turn is None else cached_in_turn
    return Usage(
        7,
        InputTokensDetails(cached, 0, (7,), (cached_in_turn,)),
        20,
        OutputTokensDetails(thought, 0, (20,), UNSET if turns is None else (0,) * turns),
        total,
    )


def put_part(at: int, /, **fields: Any) -> Change:
    return put_in(at, "part", **fields)


def put_tokens(*logprobs: Logprob) -> Change:
    """Change the logprobs in the first delta of RARE, and in the event that repeats them."""

    def change(events: Events) -> Events:
        rest = spelled_delta("y", 2).logprobs
        for at, tokens in ((4, logprobs), (7, (*logprobs, *rest))):
            events = put(at, logprobs=tokens)(events)
        return events

    return change


def both(first: Change, second: Change) -> Change:
    return lambda events: second(first(events))


def of(frames: Frames, change: Change) -> Change:
    return lambda _: change(written_events(frames))
