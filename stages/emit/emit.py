"""Emit: turn items into events, and a stream of frames into a Response.

The state machine owns the counters of the wire format: sequence numbers, output indexes and item ids.  Once
the response has begun, any error of an earlier stage ends it here, with exactly one ``response.failed``.  For an
error of a later stage, ``penstock.stages.persist`` does so.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import count

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline import frames, metrics
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.faults import log_failure
from penstock.pipeline.frames import (
    ConversedFrame,
    EmittedFrame,
    GenerationStarted,
    ItemDelta,
    RawMessages,
    TurnFinished,
)
from penstock.pipeline.hot_path import join, on_the_way
from penstock.pipeline.lifecycle.outcome import cancelled_response, failed_response, last_event
from penstock.pipeline.lifecycle.rules import rule
from penstock.pipeline.protocol import events
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import ItemStatus, OutputItem
from penstock.pipeline.protocol.response import IncompleteDetails, IncompleteReason, Response, Usage, tool_usage_of
from penstock.pipeline.tasks import apart
from penstock.services.sealing import SealedItem, SealedReasoning, SealedSummary, Sealer
from penstock.services.usage import Tallies, Tally, TurnTokens, usage_of
from penstock.stages.emit.open_item import DeltaWriter, OpenItem
from penstock.stages.models.output_items import BUILDERS, Drafts

logger = logging.getLogger(__name__)

_ENCRYPTED_CONTENT = "reasoning.encrypted_content"
"""The value of ``include`` that seals thoughts also if the response is stored."""


@on_the_way
@dataclass(frozen=True)
class Emit:
    """Write the events of responses; ``sealer`` seals what clients carry, and None seals nothing."""

    sealer: Sealer | None = None
    tallies: Tallies = field(default_factory=Tallies, kw_only=True, compare=False, repr=False)
    """The tallies that ``parse`` counts in."""

    async def __call__(self, source: AsyncIterator[ConversedFrame]) -> AsyncGenerator[EmittedFrame, None]:
        """Yield the events of one response; raise only errors from before the response began."""
        writer = ResponseWriter(self.sealer, self.tallies)
        join(writer=writer)
        try:
            async for frame in source:
                if type(frame) is ItemDelta:  # hot path: see `penstock.pipeline.core`
                    delta = writer.feed_text(frame)
                    if delta is not None:
                        yield delta
                    continue
                for event in writer.feed(frame):
                    yield event
            await writer.list_generations()
            for event in writer.finish():
                yield event
        except Exception as error:
            if not writer.started:
                raise
            log_failure(logger, writer.response.id, error)
            await writer.list_generations()
            for event in writer.fail(error):
                yield event


class ResponseWriter:
    """State machine, one per response."""

    response: Response
    _drafts: Drafts

    def __init__(self, sealer: Sealer | None = None, tallies: Tallies | None = None) -> None:
        self.started = False
        self._sealer = sealer
        self._tallies = tallies or Tallies()
        self._tally = Tally()
        self._owner = ""
        self._model = ""
        self._seals_reasoning = False
        self._unsealed: list[SealedItem] = []
        """The items since the last thought; the next one seals what they do not show."""
        self._promises_json = False
        self._hides_reasoning = False
        self._numbers = count()
        self._output: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._turns = TurnTotals()
        self.feed_text: DeltaWriter = _without_item
        """Take more text of the open item and return its delta event, or None if its kind has none."""

    def feed(self, frame: ConversedFrame) -> Iterable[EmittedFrame]:
        """Take one frame and return the events that it causes."""
        match frame:
            case ItemDelta():
                delta = self.feed_text(frame)
                return () if delta is None else (delta,)
            case frames.ItemClosed():
                return self._close(frame)
            case frames.AnnotationAdded() | frames.CallStarted() | frames.CallFinished():
                return self._go_on(frame)
            case frames.ResponseStarted():
                return self._start(frame)
            case frames.GenerationStarted():
                return self._begin_turn(frame)
            case frames.TurnFinished():
                _count(frame.repairs)
                self._turns.end(frame)
                return ()
            case _:
                return self._begin(frame)

    async def list_generations(self) -> None:
        """List the turns of the response, if its request asks for them."""
        generations = await apart(self._tally.is_long, self._tally.generations)
        if generations is not UNSET:
            self.response = replace(self.response, generations=generations)

    def finish(self) -> Iterable[ResponseEvent]:
        """Return the event that ends the response as its last turn ended.  Raises `InvariantBroken` before that."""
        rule(self._turns.are_over, "every turn ends with TurnFinished")
        self._check_closed()
        metrics.TURNS.observe(len(self._turns.finished))
        output = tuple(self._output)
        usage, tool_usage = self._turns.usage(), tool_usage_of(output)
        response = replace(self._with_messages(), output=output, usage=usage, tool_usage=tool_usage)
        last = self._turns.finished[-1]
        match last.reason:
            case "stop":
                completed_at = int(response.created_at + sum(turn.duration for turn in self._turns.finished))
                response = replace(response, status="completed", completed_at=completed_at)
                if last.stop_reason is not None:
                    response = replace(response, stop_reason=last.stop_reason)
            case "cancelled":
                response = cancelled_response(response, response.output, response.usage)
            case "length":
                response = _incomplete(response, "max_output_tokens")
            case "content_filter" | "max_tool_calls" | "max_turns" | "steered" as reason:
                response = _incomplete(response, reason)
        return (last_event(next(self._numbers), response),)

    def fail(self, error: Exception) -> Iterable[EmittedFrame]:
        """End the response because of ``error``, closing an open item as incomplete."""
        if self._open:
            yield from self._end("incomplete")
        yield last_event(next(self._numbers), failed_response(self._with_messages(), error, tuple(self._output)))

    def _start(self, frame: frames.ResponseStarted) -> Iterable[EmittedFrame]:
        if self.started:
            raise RuntimeError("a response began twice")
        self.started = True
        response = self.response = frame.facts.response
        self._tally = self._tallies.of(response.id)
        self._owner = frame.facts.origin.owner
        self._model = frame.facts.model
        self._seals_reasoning = not response.store or _ENCRYPTED_CONTENT in frame.facts.include
        self._drafts = Drafts(frame.facts, is_shown=True)
        self._hides_reasoning = frame.facts.hides_reasoning
        yield frame
        yield events.ResponseCreated(next(self._numbers), response)
        if response.status == "queued":  # a background response, which was stored as queued
            yield events.ResponseQueued(next(self._numbers), response)
            self.response = replace(response, status="in_progress")
        yield events.ResponseInProgress(next(self._numbers), self.response)

    def _begin_turn(self, frame: frames.GenerationStarted) -> Iterable[EmittedFrame]:
        self._promises_json = _promises_json(frame)
        self._turns.begin(frame)
        return () if self.started else self._start(frames.ResponseStarted(frame.facts))

    # One item after another

    def _begin(self, opening: frames.Opened) -> Iterable[ResponseEvent]:
        rule(type(opening) in BUILDERS, f"emit takes no {type(opening).__name__}: a stage has put it in")
        self._check_closed()
        draft = self._drafts.begin(opening)
        if self._hides_reasoning and isinstance(opening, frames.ReasoningOpened):
            self.feed_text = _hidden
            return
        self._open = OpenItem(draft, self._numbers, len(self._output))
        yield from self._open.opened()
        self.feed_text = self._open.delta

    def _go_on(
        self, frame: frames.AnnotationAdded | frames.CallStarted | frames.CallFinished
    ) -> Iterable[ResponseEvent]:
        if self._open is None:
            raise RuntimeError("an annotation or a call came while no item was open")
        match frame:
            case frames.AnnotationAdded(annotation):
                return (self._open.annotated(annotation),)
            case frames.CallStarted():
                return self._open.started(frame)
            case frames.CallFinished():
                return self._open.finished(frame)

    def _close(self, closed: frames.ItemClosed) -> Iterable[EmittedFrame]:
        if self.feed_text is _hidden:
            self.feed_text = _without_item
            return
        _count(closed.repairs)
        if self._settle(complete=closed.complete):
            metrics.REPAIRS.labels("malformed call").inc()
            closed = frames.ItemClosed(closed.complete)  # its tokens are those of a call
        if closed.complete and self._promises_json:
            self._check_answer()
        self._seal(closed.token_ids)
        yield from self._end("completed" if closed.complete else "incomplete")
        if closed.token_ids:
            yield frames.ItemTokens(self._output[-1].id, closed.token_ids)

    def _settle(self, *, complete: bool) -> bool:
        """Settle the open item; return True if it has become a thought."""
        if self._open is None:
            raise RuntimeError("an end came while no item was open")
        draft = self._open.draft
        was_thought = isinstance(draft.opening, frames.ReasoningOpened)
        draft.settle(complete=complete)
        return isinstance(draft.opening, frames.ReasoningOpened) and not was_thought

    def _seal(self, token_ids: frames.TokenIds) -> None:
        """Seal what the client keeps of the open item: a compaction, or a thought that no store keeps."""
        if self._sealer is None or self._open is None:
            return
        draft = self._open.draft
        hidden = draft.hidden_result
        match draft.opening:
            case frames.CompactionOpened():
                draft.encrypted_content = self._sealer.seal(SealedSummary(draft.text), self._owner)
            case frames.ReasoningOpened() if self._seals_reasoning:
                thought = SealedReasoning(draft.text, token_ids, tuple(self._unsealed), self._model)
                draft.encrypted_content = self._sealer.seal(thought, self._owner)
                self._unsealed.clear()
            case _ if self._seals_reasoning and (token_ids or hidden is not None):
                self._unsealed.append(SealedItem(self._open.item("completed").id, token_ids, hidden))
            case _:
                pass

    def _check_answer(self) -> None:
        """Raise `EngineFailed` for a complete answer that is not valid JSON although the grammar required JSON.

        An answer that breaks the grammar was broken off by the engine.
        """
        draft = self._open.draft if self._open else None
        if draft is None or not isinstance(draft.opening, frames.MessageOpened) or draft.opening.phase == "commentary":
            return
        try:
            msgspec.json.decode(draft.text, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            raise EngineFailed("The engine could not hold the model to the format of this request.") from None

    def _end(self, status: ItemStatus) -> Iterable[EmittedFrame]:
        if self._open is None:
            raise RuntimeError("an end came while no item was open")
        self._open.draft.settle(complete=status == "completed")
        if self._hides_reasoning and isinstance(self._open.draft.opening, frames.ReasoningOpened):
            self._open, self.feed_text = None, _without_item
            return
        yield from self._open.closed(status)
        item = self._open.item(status)
        self._output.append(item)
        if (result := self._open.draft.hidden_result) is not None:
            yield frames.ItemResult(item.id, result)
        self._open, self.feed_text = None, _without_item

    def _check_closed(self) -> None:
        if self.feed_text is not _without_item:
            raise RuntimeError("an item was not closed before what follows it")

    def _with_messages(self) -> Response:
        messages = self._turns.messages()
        if messages is None:
            return self.response
        return replace(self.response, input_messages=messages[0], output_messages=messages[1])


def _count(repairs: Iterable[frames.Repair]) -> None:
    for kind in repairs:
        metrics.REPAIRS.labels(kind).inc()


def _without_item(frame: ItemDelta) -> ResponseEvent | None:
    raise RuntimeError("text came while no item was open")


def _hidden(frame: ItemDelta) -> ResponseEvent | None:
    """Take the text of an item that the client does not see."""
    return None


def _incomplete(response: Response, reason: IncompleteReason) -> Response:
    return replace(response, status="incomplete", incomplete_details=IncompleteDetails(reason))


def _promises_json(begun: frames.GenerationStarted) -> bool:
    """Return True if a complete answer must be valid JSON; a stop string may cut it anywhere."""
    facts = begun.facts
    kind = facts.text_format.get("type")
    return begun.held_to_grammar and not facts.sampling.stops_anywhere and kind in {"json_object", "json_schema"}


class TurnTotals:
    """The data collected from turn to turn for the end of the response: its usage, and its raw messages.

    State machine, one per response.
    """

    __slots__ = ("_are_listed", "_input", "_output", "_prompts", "finished")

    def __init__(self) -> None:
        self.finished: list[TurnFinished] = []
        self._prompts: list[int] = []
        self._are_listed = False
        self._input: RawMessages | None = None
        self._output: RawMessages = ()

    @property
    def are_over(self) -> bool:
        """True if at least one turn has begun, and all have ended."""
        return 0 < len(self.finished) == len(self._prompts)

    def begin(self, started: GenerationStarted) -> None:
        """Begin a turn; its prompt includes the output of earlier turns and their tools."""
        self._prompts.append(started.prompt_tokens)
        self._are_listed |= started.facts.wants_raw_messages
        if self._input is None:
            self._input = started.raw_messages
        else:
            self._output = (started.raw_messages or ())[len(self._input) :]

    def end(self, finished: TurnFinished) -> None:
        """End the turn; if the engine counted the prompt's tokens itself (images expand), use its number."""
        self.finished.append(finished)
        if finished.prompt_tokens is not None:
            self._prompts[-1] = finished.prompt_tokens
        self._output += finished.raw_messages or ()

    def messages(self) -> tuple[RawMessages, RawMessages] | None:
        """Return the raw messages of input and output, or None if the request does not want them."""
        return None if self._input is None else (self._input, self._output)

    def usage(self) -> Usage:
        """Return the usage, summed over all turns; with the numbers of each turn if the request wants raw messages."""
        turns = [
            TurnTokens(prompt, turn.cached_tokens, turn.output_tokens, turn.reasoning_tokens)
            for prompt, turn in zip(self._prompts, self.finished, strict=True)
        ]
        return usage_of(turns, lists_turns=self._are_listed)
