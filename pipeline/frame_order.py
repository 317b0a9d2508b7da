"""The order of the frames at each junction, as state machines that raise at the first frame out of order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, ClassVar, get_args

from penstock.pipeline import frames
from penstock.pipeline.frames import ItemDelta, TokenChunk
from penstock.pipeline.grammar import Automaton
from penstock.pipeline.lifecycle.order import StreamOrder
from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import Event, ResponseEvent
from penstock.pipeline.protocol.params.request import CreateResponse


class Order(ABC):
    """The state machine for the frames that one stage gives."""

    def taken_from(self, source: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        """Return what the stage shall take its frames from: ``source``, or a stand-in that tells the order about it."""
        return source

    @abstractmethod
    def feed(self, frame: Any) -> None:
        """Take the next frame; raise `InvariantBroken` if it is out of order."""

    @abstractmethod
    def finish(self) -> None:
        """End the frames; raise `InvariantBroken` if some are missing."""


class OneForOne(Order):
    """One frame for each that the stage takes: requests and prompts."""

    def __init__(self) -> None:
        self._taken = self._given = 0

    def taken_from(self, source: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        """Return the source, counted."""
        return _Counted(source, self._take)

    def feed(self, frame: Any) -> None:
        """Take the next frame."""
        self._given += 1
        rule(self._given <= self._taken, "a stage gives one frame for each that it takes here")

    def finish(self) -> None:
        """End the frames."""
        rule(0 < self._given == self._taken, "a stage gives one frame for each that it takes here")

    def _take(self) -> None:
        self._taken += 1


class _Counted:
    """An iterator, not a generator, as it needs no closing."""

    def __init__(self, source: AsyncIterator[Any], count: Callable[[], None]) -> None:
        self._source = source
        self._count = count

    def __aiter__(self) -> _Counted:
        return self

    async def __anext__(self) -> Any:
        frame = await anext(self._source)
        self._count()
        return frame


def _automaton(rule_name: str) -> Automaton:
    return Automaton(rule_name, frames.GRAMMAR, {**vars(events), **vars(frames)}, frames.variant_of)


class GrammarOrder(Order):
    """The order of a rule of `frames.GRAMMAR`, and no empty text."""

    automaton: ClassVar[Automaton]

    def __init__(self) -> None:
        self._state = self.automaton.start
        self._repeated: type | None = None
        """The class of text that has just come a second time: more of it leaves the state as it is."""

    def feed(self, frame: Any) -> None:
        """Take the next frame."""
        kind = type(frame)
        if kind is self._repeated and (frame.text if kind is ItemDelta else frame.token_ids and not frame.logprobs):
            return  # nearly every frame takes this path
        if kind is ItemDelta:
            rule(bool(frame.text or frame.logprobs), "an ItemDelta is never empty")
        elif kind is TokenChunk:
            rule(bool(frame.token_ids), "a TokenChunk is never empty")
            rule(len(frame.logprobs) in (0, len(frame.token_ids)), "each token has a logprob, or none has one")
        before = self._state
        self._state = before.following.get(kind) or before.after(frame)
        self._repeated = kind if self._state is before and kind in (ItemDelta, TokenChunk) else None

    def finish(self) -> None:
        """End the frames."""
        self._state.finish()


class EngineOrder(GrammarOrder):
    """The order of `frames.EngineFrame`."""

    automaton = _automaton("EngineFrame")


class TokenOrder(GrammarOrder):
    """The order of `frames.TokenFrame`, for one turn or several."""

    automaton = _automaton("TokenFrame")


class ParsedOrder(GrammarOrder):
    """The order of `frames.ParsedFrame`, for one turn or several."""

    automaton = _automaton("ParsedFrame")


class ConversedOrder(GrammarOrder):
    """The order of `frames.ConversedFrame`."""

    automaton = _automaton("ConversedFrame")


class EventOrder(Order):
    """The order of `ResponseEvent` after ``persist``.

    If the source ends without a terminal event, the response was ended from outside: its readers get that from the log.
    """

    _source: Any = None

    def __init__(self) -> None:
        self._events = StreamOrder()

    def taken_from(self, source: AsyncGenerator[Any, None]) -> AsyncIterator[Any]:
        """Remember the source, and return it."""
        self._source = source
        return source

    def feed(self, frame: ResponseEvent) -> None:
        """Take the next frame."""
        self._events.feed(frame)

    def finish(self) -> None:
        """End the frames."""
        if getattr(self._source, "ag_frame", None) is not None:  # it has not ended
            self._events.finish()


class EmittedOrder(GrammarOrder):
    """The order of `frames.EmittedFrame`; its events are in the order of a stream."""

    automaton = _automaton("EmittedFrame")

    def __init__(self) -> None:
        super().__init__()
        self._events = StreamOrder()

    def feed(self, frame: frames.EmittedFrame) -> None:
        """Take the next frame."""
        super().feed(frame)
        if isinstance(frame, Event):
            self._events.feed(frame)

    def finish(self) -> None:
        """End the frames."""
        super().finish()
        self._events.finish()


ORDERS: Mapping[frozenset[Any], Callable[[], Order]] = {
    frozenset(get_args(junction) or (junction,)): order
    for junction, order in (
        (CreateResponse, OneForOne),
        (frames.ResolvedRequest, OneForOne),
        (frames.Prompt, OneForOne),
        (frames.TokenFrame, TokenOrder),
        (frames.ParsedFrame, ParsedOrder),
        (frames.ConversedFrame, ConversedOrder),
        (frames.EmittedFrame, EmittedOrder),
        (ResponseEvent, EventOrder),
    )
}
"""The state machine for each junction, by the classes of its frames."""
