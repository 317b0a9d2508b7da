"""Emit: items become events, and a stream of frames becomes a Response.

The machine owns what the wire counts: sequence numbers, output indexes, item ids.  The stage is the one place that
catches everything: once the response has begun, whatever goes wrong ends in exactly one ``response.failed``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from itertools import count

import msgspec

from pipeline.ending import failed_response
from pipeline.errors import EngineFailed, StageError
from pipeline.frames import (
    EmittedFrame,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    MessageOpened,
    ParsedFrame,
    ReasoningOpened,
    TurnFinished,
)
from pipeline.protocol.events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
)
from pipeline.protocol.items import ItemStatus, OutputItem
from pipeline.protocol.response import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    Usage,
)
from stages.emit.ladder import OpenFunctionCall, OpenItem, OpenMessage, OpenReasoning, Place

logger = logging.getLogger(__name__)


async def emit(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[EmittedFrame, None]:
    """Write the events of one response; raises only what happens before it began."""
    writer = ResponseWriter()
    try:
        async for frame in source:
            for event in writer.feed(frame):
                yield event
        for event in writer.finish():
            yield event
    except Exception as error:
        if not writer.started:
            raise
        if isinstance(error, StageError):
            logger.warning("Response %s failed: %s", writer.response.id, error, exc_info=error.__cause__)
        else:
            logger.exception("Response %s met a bug", writer.response.id)
        for event in writer.fail(error):
            yield event


class ResponseWriter:
    """The machine: one per response."""

    response: Response

    def __init__(self) -> None:
        self.started = False
        self._numbers = count()
        self._prompt_tokens = 0
        self._output: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._turns: list[TurnFinished] = []

    def feed(self, frame: ParsedFrame) -> Iterable[EmittedFrame]:
        """Take one frame, give the events that it causes."""
        match frame:
            case ItemDelta() if self._open:  # nearly every frame
                return (self._open.delta(frame.text),)
            case ReasoningOpened():
                return self._begin(OpenReasoning(self._place("rs")))
            case MessageOpened(phase):
                return self._begin(OpenMessage(self._place("msg"), phase))
            case FunctionCallOpened(name):
                return self._begin(OpenFunctionCall(self._place("fc"), self._id("call"), name))
            case ItemClosed(complete):
                return self._end("completed" if complete else "incomplete")
            case GenerationStarted():
                return self._start(frame)
            case TurnFinished():
                self._turns.append(frame)
                return ()
            case ItemDelta():
                raise RuntimeError("text came while no item was open")

    def finish(self) -> Iterable[ResponseEvent]:
        """End the response as its last turn ended; raises `EngineFailed` if no turn did."""
        if not self._turns:
            raise EngineFailed("The engine's stream ended early.")
        self._check_closed()
        response = msgspec.structs.replace(self.response, output=tuple(self._output), usage=self._usage())
        if self._turns[-1].reason == "length":
            details = IncompleteDetails("max_output_tokens")
            response = msgspec.structs.replace(response, status="incomplete", incomplete_details=details)
            return (ResponseIncomplete(sequence_number=next(self._numbers), response=response),)
        completed_at = int(response.created_at + sum(turn.duration for turn in self._turns))
        response = msgspec.structs.replace(response, status="completed", completed_at=completed_at)
        return (ResponseCompleted(sequence_number=next(self._numbers), response=response),)

    def fail(self, error: Exception) -> Iterable[ResponseEvent]:
        """End the response because of ``error``: what is open is closed as incomplete."""
        if self._open:
            yield from self._end("incomplete")
        failed = failed_response(self.response, error, tuple(self._output))
        yield ResponseFailed(sequence_number=next(self._numbers), response=failed)

    def _start(self, frame: GenerationStarted) -> Iterable[EmittedFrame]:
        self.started = True
        self.response = frame.response
        self._prompt_tokens += frame.prompt_tokens
        yield frame
        yield ResponseCreated(sequence_number=next(self._numbers), response=frame.response)
        yield ResponseInProgress(sequence_number=next(self._numbers), response=frame.response)

    # One item after another

    def _begin(self, item: OpenItem) -> Iterable[ResponseEvent]:
        self._check_closed()
        self._open = item
        return item.added()

    def _end(self, status: ItemStatus) -> Iterable[ResponseEvent]:
        if self._open is None:
            raise RuntimeError("an end came while no item was open")
        yield from self._open.done(status)
        self._output.append(self._open.item(status))
        self._open = None

    def _check_closed(self) -> None:
        if self._open is not None:
            raise RuntimeError("an item was not closed before what follows it")

    def _place(self, prefix: str) -> Place:
        return Place(self._numbers, self._id(prefix), len(self._output))

    def _id(self, prefix: str) -> str:
        """Ids derive from the response's id and the item's index, so that a replay draws the same ones."""
        return f"{prefix}_{self.response.id.removeprefix('resp_')}{len(self._output):04x}"

    def _usage(self) -> Usage:
        output_tokens = sum(turn.output_tokens for turn in self._turns)
        return Usage(
            input_tokens=self._prompt_tokens,
            input_tokens_details=InputTokensDetails(sum(turn.cached_tokens for turn in self._turns)),
            output_tokens=output_tokens,
            output_tokens_details=OutputTokensDetails(sum(turn.reasoning_tokens for turn in self._turns)),
            total_tokens=self._prompt_tokens + output_tokens,
        )
