"""Open Responses: the same stream under the names of the Open Responses specification.

The two protocols share all events except those of raw reasoning.  Clients of one protocol reject a stream of the other,
so each has a base URL of its own.

This is also an example of a stage that rewrites events: declare your own events as `Event`s, map each event type that
changes to its rewriting function, and pass on everything else.  Looking a type up in a dict costs the same for every
event, while a chain of isinstance checks costs more, at every token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeAlias

from penstock.pipeline.protocol.events import Delta, Done, ReasoningTextDelta, ReasoningTextDone, ResponseEvent


class ReasoningDelta(Delta, frozen=True, tag="response.reasoning.delta"):
    """A delta of raw reasoning."""

    content_index: int
    delta: str


class ReasoningDone(Done, frozen=True, tag="response.reasoning.done"):
    """The complete text of a part of raw reasoning."""

    content_index: int
    text: str


OpenResponsesEvent: TypeAlias = ReasoningDelta | ReasoningDone | ResponseEvent
"""The events of `open_responses`: its own two for raw reasoning, and all others of the Responses API."""


async def open_responses(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[OpenResponsesEvent, None]:
    """Pass every event on under its name in Open Responses."""
    async for event in source:
        rewrite = _REWRITTEN.get(type(event))
        yield event if rewrite is None else rewrite(event)


def _delta(event: ReasoningTextDelta) -> ReasoningDelta:
    return ReasoningDelta(
        event.sequence_number, event.item_id, event.output_index, event.content_index, delta=event.delta
    )


def _done(event: ReasoningTextDone) -> ReasoningDone:
    return ReasoningDone(event.sequence_number, event.item_id, event.output_index, event.content_index, text=event.text)


_REWRITTEN: dict[type, Callable[[Any], OpenResponsesEvent]] = {ReasoningTextDelta: _delta, ReasoningTextDone: _done}
"""The rewriting functions of the events that change, by their types."""
