"""Emit: items become events, and a stream of frames becomes a Response.

The machine owns what the wire counts: sequence numbers, output indexes, item ids.  The stage is the one place that
catches everything: once the response has begun, whatever goes wrong ends in exactly one ``response.failed``.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from itertools import count

import msgspec
from msgspec.structs import replace

from pipeline.ending import failed_response
from pipeline.errors import EngineFailed, StageError
from pipeline.frames import (
    AnnotationAdded,
    CustomToolCallOpened,
    EmittedFrame,
    FunctionCallOpened,
    GenerationStarted,
    ItemClosed,
    ItemDelta,
    ItemOpened,
    ItemTokens,
    MessageOpened,
    ParsedFrame,
    RawMessages,
    ReasoningOpened,
    RefusalOpened,
    TurnFinished,
)
from pipeline.protocol.events import (
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseQueued,
)
from pipeline.protocol.items import ItemStatus, OutputItem
from pipeline.protocol.response import (
    IncompleteDetails,
    IncompleteReason,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    Usage,
)
from stages.emit.ladder import OpenItem, OpenMessage, Place, open_item

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
        self._promises_json = False
        self._numbers = count()
        self._prompts: list[int] = []
        self._prompt_messages: RawMessages | None = None
        self._output: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._turns: list[TurnFinished] = []

    def feed(self, frame: ParsedFrame) -> Iterable[EmittedFrame]:
        """Take one frame, give the events that it causes."""
        if self._open and isinstance(frame, ItemDelta):  # nearly every frame: ahead of the match, which takes longer
            return (self._open.delta(frame),)
        match frame:
            case ReasoningOpened() | MessageOpened() | RefusalOpened() | FunctionCallOpened() | CustomToolCallOpened():
                return self._begin(frame)
            case ItemClosed():
                return self._close(frame)
            case AnnotationAdded(annotation) if self._open:
                return (self._open.annotated(annotation),)
            case GenerationStarted():
                return self._start(frame)
            case TurnFinished():
                self._turns.append(frame)
                return ()
            case ItemDelta() | AnnotationAdded():
                raise RuntimeError("text came while no item was open")

    def finish(self) -> Iterable[ResponseEvent]:
        """End the response as its last turn ended; raises `EngineFailed` if no turn did."""
        if not self._turns:
            raise EngineFailed("The engine's stream ended early.")
        self._check_closed()
        response = replace(self._with_messages(), output=tuple(self._output), usage=self._usage())
        match self._turns[-1].reason:
            case "stop":
                completed_at = int(response.created_at + sum(turn.duration for turn in self._turns))
                response = replace(response, status="completed", completed_at=completed_at)
                return (ResponseCompleted(next(self._numbers), response),)
            case "cancelled":
                response = replace(response, status="cancelled")
            case "length":
                response = _incomplete(response, "max_output_tokens")
            case "content_filter":
                response = _incomplete(response, "content_filter")
        return (ResponseIncomplete(next(self._numbers), response),)

    def fail(self, error: Exception) -> Iterable[ResponseEvent]:
        """End the response because of ``error``: what is open is closed as incomplete."""
        if self._open:
            yield from self._end("incomplete")
        yield ResponseFailed(next(self._numbers), failed_response(self._with_messages(), error, tuple(self._output)))

    def _start(self, frame: GenerationStarted) -> Iterable[EmittedFrame]:
        self.started = True
        self.response = frame.response
        self._promises_json = _promises_json(frame)
        self._prompts.append(frame.prompt_tokens)
        self._prompt_messages = frame.raw_messages
        yield frame
        yield ResponseCreated(next(self._numbers), frame.response)
        if frame.response.status == "queued":  # one for the background: whoever stored it has said so already
            yield ResponseQueued(next(self._numbers), frame.response)
            self.response = replace(frame.response, status="in_progress")
        yield ResponseInProgress(next(self._numbers), self.response)

    # One item after another

    def _begin(self, opening: ItemOpened) -> Iterable[ResponseEvent]:
        self._check_closed()
        self._open = open_item(opening, self._place(), summarised=self.response.reasoning.summary is not None)
        return self._open.added()

    def _close(self, closed: ItemClosed) -> Iterable[EmittedFrame]:
        if closed.complete and self._promises_json:
            self._check_answer()
        yield from self._end("completed" if closed.complete else "incomplete")
        if closed.token_ids:
            yield ItemTokens(self._output[-1].id, closed.token_ids)

    def _check_answer(self) -> None:
        """Raise `EngineFailed` for a whole answer that is not the JSON that it was to be: it was broken off."""
        answer = self._open.item("completed") if isinstance(self._open, OpenMessage) else None
        if answer is None or answer.phase != "final_answer":
            return
        try:
            msgspec.json.decode(answer.text, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            raise EngineFailed("The engine could not hold the model to the format of this request.") from None

    def _end(self, status: ItemStatus) -> Iterable[ResponseEvent]:
        if self._open is None:
            raise RuntimeError("an end came while no item was open")
        yield from self._open.done(status)
        self._output.append(self._open.item(status))
        self._open = None

    def _check_closed(self) -> None:
        if self._open is not None:
            raise RuntimeError("an item was not closed before what follows it")

    def _place(self) -> Place:
        """Ids derive from the response's id and the item's index, so that a replay draws the same ones."""
        at = len(self._output)
        return Place(self._numbers, at, f"{self.response.id.removeprefix('resp_')}{at:04x}")

    # What is known at the end

    def _with_messages(self) -> Response:
        """The response with the raw messages, where they were asked for."""
        if self._prompt_messages is None:
            return self.response
        said = tuple(message for turn in self._turns for message in turn.raw_messages or ())
        return replace(self.response, input_messages=self._prompt_messages, output_messages=said)

    def _usage(self) -> Usage:
        prompts = tuple(self._prompts)
        cached = tuple(turn.cached_tokens for turn in self._turns)
        outputs = tuple(turn.output_tokens for turn in self._turns)
        thought = sum(turn.reasoning_tokens for turn in self._turns)
        from_tools = tuple(0 for _ in self._turns)  # no turn has run a tool yet
        return Usage(
            input_tokens=sum(prompts),
            input_tokens_details=InputTokensDetails(sum(cached), 0, prompts, cached),
            output_tokens=sum(outputs),
            output_tokens_details=OutputTokensDetails(thought, sum(from_tools), outputs, from_tools),
            total_tokens=sum(prompts) + sum(outputs),
        )


def _incomplete(response: Response, reason: IncompleteReason) -> Response:
    return replace(response, status="incomplete", incomplete_details=IncompleteDetails(reason))


def _promises_json(begun: GenerationStarted) -> bool:
    """Whether the answer is certain to be JSON; a stop text may cut it anywhere."""
    text_format = begun.response.text.get("format") or {}
    return begun.held_to_grammar and not begun.stop and text_format.get("type") in {"json_object", "json_schema"}
