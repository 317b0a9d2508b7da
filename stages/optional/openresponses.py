"""Open Responses: the same stream under the names of the Open Responses specification.

The two protocols share every event but those of raw reasoning.  Clients of the one reject a stream of the other, so
each has a base URL of its own.

This is also how to write a stage that rewrites events: declare those of your own as `Event`s, list beside each event
that changes what becomes of it, and pass on everything else.  Looking an event's type up costs the same whichever it
is; a chain of isinstance is paid again at every token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, TypeAlias

from penstock.pipeline.protocol.events import Delta, Done, ReasoningTextDelta, ReasoningTextDone, ResponseEvent


class ReasoningDelta(Delta, frozen=True, tag="response.reasoning.delta"):
    """One more piece of raw reasoning."""

    content_index: int
    delta: str


class ReasoningDone(Done, frozen=True, tag="response.reasoning.done"):
    """All of a part of raw reasoning."""

    content_index: int
    text: str


OpenResponsesEvent: TypeAlias = ReasoningDelta | ReasoningDone | ResponseEvent
"""What `open_responses` gives: of the events of the Responses API all but the two of raw reasoning."""


async def open_responses(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[OpenResponsesEvent, None]:
    """Pass every event on, under its name in Open Responses."""
    async for event in source:
        rewrite = _REWRITTEN.get(type(event))
        yield event if rewrite is None else rewrite(event)


def _delta(event: ReasoningTextDelta) -> ReasoningDelta:
    return ReasoningDelta(event.sequence_number, event.item_id, event.output_index, event.content_index, event.delta)


def _done(event: ReasoningTextDone) -> ReasoningDone:
    return ReasoningDone(event.sequence_number, event.item_id, event.output_index, event.content_index, event.text)


_REWRITTEN: dict[type, Callable[[Any], OpenResponsesEvent]] = {ReasoningTextDelta: _delta, ReasoningTextDone: _done}
"""What becomes of the events that do not pass as they are."""
