"""The order of the frames at each junction, as state machines that raise at the first frame out of order.

``penstock.pipeline.frames`` and ``penstock.pipeline.protocol.events`` state each order as a grammar.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, ClassVar, get_args

from penstock.pipeline import frames
from penstock.pipeline.frames import ItemDelta, TokenChunk
from penstock.pipeline.lifecycle.order import StreamOrder
from penstock.pipeline.lifecycle.rules import rule
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


class TokenOrder(Order):
    """The order of `frames.TokenFrame`, for one turn or several."""

    def __init__(self) -> None:
        self._is_open = self._has_begun = False

    def feed(self, frame: frames.TokenFrame) -> None:
        """Take the next frame."""
        if type(frame) is TokenChunk and self._is_open and frame.token_ids and not frame.logprobs:
            return
        match frame:
            case frames.TokenChunk():
                rule(self._is_open, "tokens come between GenerationStarted and GenerationFinished")
                rule(bool(frame.token_ids), "a TokenChunk is never empty")
                rule(len(frame.logprobs) in (0, len(frame.token_ids)), "each token has a logprob, or none has one")
            case frames.GenerationStarted():
                rule(not self._is_open, "a generation ends with GenerationFinished before the next begins")
                self._is_open = self._has_begun = True
            case frames.GenerationFinished():
                rule(self._is_open, "GenerationFinished ends what GenerationStarted began, once")
                self._is_open = False

    def finish(self) -> None:
        """End the frames."""
        rule(self._has_begun, "a generation begins with GenerationStarted")
        rule(not self._is_open, "a generation ends with GenerationFinished")


class ItemOrder(Order):
    """The order of `frames.ParsedFrame`, for one turn or several."""

    calls_run: ClassVar[bool] = False
    """True if the calls of this server have run: their items are complete only then."""

    def __init__(self) -> None:
        self._takes_text = False
        self._open: type | None = None
        self._call = ""  # of the open item: "started" or "finished"
        self._is_cut = False
        self._has_begun = False
        self._in_turn = False
        self._turns = 0

    def feed(self, frame: frames.ConversedFrame) -> None:
        """Take the next frame."""
        if type(frame) is ItemDelta and self._takes_text and frame.text:
            return
        match frame:
            case frames.ItemDelta():
                rule(self._open is not None, "text comes inside an item: after its opening, and before ItemClosed")
                rule(self._open not in _TEXTLESS, "the items of McpListToolsOpened and ShellOutputOpened have no text")
                rule(not self._call, "the text of a call comes before CallStarted")
                rule(bool(frame.text), "an ItemDelta is never empty")
            case frames.AnnotationAdded():
                rule(self._open is frames.MessageOpened, "an annotation comes inside a message")
            case frames.ItemClosed():
                rule(self._open is not None, "ItemClosed ends an open item, once")
                is_done = self._call == "finished" or not self.calls_run or self._open not in _RUNNING
                rule(
                    is_done or not frame.complete,
                    "a call that this server runs is finished before its item is complete",
                )
                self._open, self._takes_text, self._is_cut = None, False, not frame.complete
            case frames.CallStarted():
                rule(self._open in _RUNNING, "CallStarted comes inside the item of a call that this server runs")
                rule(not self._call, "a call starts once")
                self._call, self._takes_text = "started", False
            case frames.CallFinished():
                rule(self._open is not None and self._call == "started", "CallFinished follows CallStarted, once")
                self._call = "finished"
            case _:
                rule(self._open is None, "an item is closed before what follows it")
                self._between_items(frame)

    def finish(self) -> None:
        """End the frames."""
        rule(self._open is None, "an item is closed before the end")
        rule(not self._in_turn, "every turn ends with TurnFinished")
        rule(self._turns > 0, "a response has a turn, from GenerationStarted to TurnFinished")

    def _between_items(self, frame: frames.ConversedFrame) -> None:
        match frame:
            case frames.ResponseStarted():
                rule(not self._has_begun, "ResponseStarted comes first, and once")
            case frames.GenerationStarted():
                rule(not self._in_turn, "a turn ends with TurnFinished before the next GenerationStarted")
                rule(not self._is_cut, "an item that was cut is the last")
                self._in_turn = True
            case frames.TurnFinished():
                rule(self._in_turn, "TurnFinished ends what GenerationStarted began, once")
                rule(not self._is_cut or frame.reason != "stop", "a turn with a cut item does not end with 'stop'")
                self._in_turn = False
                self._turns += 1
            case _:
                rule(not self._is_cut, "an item that was cut is the last")
                before = self._has_begun and not self._turns and type(frame) in _SERVED
                rule(self._in_turn or before, "an item comes inside a turn: between GenerationStarted and TurnFinished")
                self._open, self._call = type(frame), ""
                self._takes_text = self._open not in _TEXTLESS
        self._has_begun = True


class ConversedOrder(ItemOrder):
    """The order of `frames.ConversedFrame`."""

    calls_run = True


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


class EmittedOrder(Order):
    """The order of `frames.EmittedFrame`."""

    def __init__(self) -> None:
        self._events = StreamOrder()
        self._has_begun = False

    def feed(self, frame: frames.EmittedFrame) -> None:
        """Take the next frame."""
        if self._has_begun and isinstance(frame, Event):
            self._events.feed(frame)
            return
        is_first = isinstance(frame, frames.ResponseStarted)
        rule(is_first != self._has_begun, "ResponseStarted comes first, and once")
        self._has_begun = True

    def finish(self) -> None:
        """End the frames."""
        self._events.finish()


_TEXTLESS = (frames.McpListToolsOpened, frames.ShellOutputOpened)
_SERVED = get_args(frames.ServedOpened)
_RUNNING = tuple(kind for kind in _SERVED if kind is not frames.ShellCallOpened)  # its ShellOutputOpened is what runs

ORDERS: Mapping[frozenset[Any], Callable[[], Order]] = {
    frozenset(get_args(junction) or (junction,)): order
    for junction, order in (
        (CreateResponse, OneForOne),
        (frames.ResolvedRequest, OneForOne),
        (frames.Prompt, OneForOne),
        (frames.TokenFrame, TokenOrder),
        (frames.ParsedFrame, ItemOrder),
        (frames.ConversedFrame, ConversedOrder),
        (frames.EmittedFrame, EmittedOrder),
        (ResponseEvent, EventOrder),
    )
}
"""The state machine for each junction, by the classes of its frames."""
