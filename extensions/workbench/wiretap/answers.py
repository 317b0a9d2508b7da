"""Answers of the wire as a turn of the model: what the stage ``parse`` would have yielded for the items in them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import msgspec

from penstock.pipeline import frames
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.recordings.format import Recording
from penstock.pipeline.recordings.wire import WireBody, WireEvent

Json: TypeAlias = dict[str, Any]

Frames: TypeAlias = Iterator[frames.ParsedFrame]

REASONING, REFUSAL, MESSAGE = frames.ReasoningOpened(), frames.RefusalOpened(), frames.MessageOpened()

REASONS: Mapping[str, frames.FinishReason] = {
    "length": "length",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "max_output_tokens": "length",
    "content_filter": "content_filter",
    "refusal": "content_filter",
}
"""The reasons of all dialects; any other one is ``stop``."""


CLIENT_LEFT = "The client left before the end of the answer."

READ_DETAILS = ("prompt_tokens_details", "input_tokens_details")
WRITTEN_DETAILS = ("completion_tokens_details", "output_tokens_details")
"""The objects in the usage of all dialects that divide the tokens of the prompt, and those of the answer."""


class Turn(ABC):
    """Turns the events of one answer, or its whole body, into the frames of one turn."""

    def __init__(self) -> None:
        self.reason = ""
        self.usage: Json = {}
        self._open: object = None

    @abstractmethod
    def event(self, data: Json) -> Frames:
        """Yield the frames of an event."""

    @abstractmethod
    def body(self, data: Json) -> Frames:
        """Yield the frames of a whole body."""

    def end(self, duration: float) -> Frames:
        """Yield the last frames; raise `EngineFailed` if the answer has no end."""
        if not self.reason:
            raise EngineFailed("The recorded answer has no end.")
        reason = REASONS.get(self.reason, "stop")
        yield from self._leave(complete=reason == "stop")
        yield frames.TurnFinished(
            reason,
            cached_tokens=self._detail("cached_tokens", *READ_DETAILS),
            output_tokens=self._count("completion_tokens", "output_tokens"),
            reasoning_tokens=self._detail("reasoning_tokens", *WRITTEN_DETAILS),
            duration=duration,
            prompt_tokens=self._count("prompt_tokens", "input_tokens"),
        )

    def _count(self, *names: str) -> int:
        return next((self.usage[name] for name in names if isinstance(self.usage.get(name), int)), 0)

    def _detail(self, name: str, *groups: str) -> int:
        found = (self.usage.get(group) for group in groups)
        return next((group[name] for group in found if isinstance(group, dict) and group.get(name)), 0)

    def _text(self, key: object, opening: frames.ItemOpened, text: str | None) -> Frames:
        """Add text to the item ``key``, which begins with the opening unless it is open."""
        yield from self._enter(key, opening)
        if text:
            yield frames.ItemDelta(text)

    def _enter(self, key: object, opening: frames.ItemOpened) -> Frames:
        if self._open != key:
            yield from self._leave(complete=True)
            self._open = key
            yield opening

    def _leave(self, *, complete: bool) -> Frames:
        if self._open is not None:
            yield frames.ItemClosed(complete)
        self._open = None


class ChatTurn(Turn):
    """A chat completion, or a completion: its first choice."""

    def event(self, data: Json) -> Frames:
        """Yield the frames of a chunk."""
        self.usage = data.get("usage") or self.usage
        for choice in data.get("choices") or ():
            if choice.get("index", 0) == 0:
                yield from self._said(choice.get("delta") or choice.get("message") or {"content": choice.get("text")})
                self.reason = choice.get("finish_reason") or self.reason

    body = event

    def _said(self, said: Json) -> Frames:
        thought = said.get("reasoning") or said.get("reasoning_content")  # the field has two names
        texts = ((REASONING, thought), (REFUSAL, said.get("refusal")), (MESSAGE, said.get("content")))
        for opening, text in texts:
            if text:
                yield from self._text(opening, opening, text)
        for position, call in enumerate(said.get("tool_calls") or ()):
            yield from self._call(call.get("index", position), call)

    def _call(self, index: int, call: Json) -> Frames:
        custom, function = call.get("custom"), call.get("function") or {}
        opening: frames.ItemOpened = (
            frames.CustomToolCallOpened(custom.get("name") or "")
            if custom
            else frames.FunctionCallOpened(function.get("name") or "")
        )
        text = custom.get("input") if custom else function.get("arguments")
        yield from self._text(index, opening, text)


class MessagesTurn(Turn):
    """A message of Anthropic's API."""

    def event(self, data: Json) -> Frames:
        """Yield the frames of an event."""
        match data:
            case {"type": "message_start", "message": {"usage": usage}}:
                self.usage = dict(usage)
            case {"type": "content_block_start", "index": index, "content_block": block}:
                yield from self._block(index, block)
            case {"type": "content_block_delta", "delta": delta}:
                text = delta.get("text") or delta.get("thinking") or delta.get("partial_json")
                if text:
                    yield frames.ItemDelta(text)
            case {"type": "content_block_stop"}:
                yield from self._leave(complete=True)
            case {"type": "message_delta", "delta": {"stop_reason": reason}}:
                self.reason = reason or ""
                self.usage |= {name: count for name, count in (data.get("usage") or {}).items() if count is not None}
            case _:
                pass

    def body(self, data: Json) -> Frames:
        """Yield the frames of a message."""
        for index, block in enumerate(data.get("content") or ()):
            yield from self._block(index, block)
        self.usage, self.reason = data.get("usage") or {}, data.get("stop_reason") or ""

    def _block(self, index: int, block: Json) -> Frames:
        match block:
            case {"type": "text"}:
                yield from self._text(index, MESSAGE, block.get("text"))
            case {"type": "thinking" | "redacted_thinking"}:
                yield from self._text(index, REASONING, block.get("thinking"))
            case {"type": "tool_use", "name": name}:
                text = _json(block.get("input"))
                yield from self._text(index, frames.FunctionCallOpened(name), text)
            case _:
                raise _unknown(block)


class ResponsesTurn(Turn):
    """A response of OpenAI's API."""

    def event(self, data: Json) -> Frames:
        """Yield the frames of an event."""
        match data:
            case {"type": "response.output_item.added", "output_index": index, "item": item}:
                yield from self._enter(index, _opening(item))
            case {"type": str(kind), "delta": str(text)} if kind in DELTAS:
                yield frames.ItemDelta(text)
            case {"type": "response.output_item.done"}:
                yield from self._leave(complete=True)
            case {"type": "response.completed" | "response.incomplete" | "response.failed", "response": response}:
                self._ended(response)
            case _:
                pass

    def body(self, data: Json) -> Frames:
        """Yield the frames of a response."""
        for index, item in enumerate(data.get("output") or ()):
            yield from self._text(index, _opening(item), _text_of(item))
        self._ended(data)

    def _ended(self, response: Json) -> None:
        if response.get("status") == "failed":
            raise EngineFailed(str((response.get("error") or {}).get("message") or "The response failed."))
        self.usage = response.get("usage") or {}
        self.reason = (response.get("incomplete_details") or {}).get("reason") or "stop"


DELTAS = frozenset(
    {"response.reasoning_text.delta", "response.reasoning_summary_text.delta", "response.output_text.delta"}
    | {"response.refusal.delta", "response.function_call_arguments.delta", "response.custom_tool_call_input.delta"}
)
"""The events of the Responses API that add text to an item."""


def _opening(item: Json) -> frames.ItemOpened:
    match item:
        case {"type": "reasoning"}:
            return REASONING
        case {"type": "message"}:
            refused = any(part.get("type") == "refusal" for part in item.get("content") or ())
            return REFUSAL if refused else frames.MessageOpened(item.get("phase"))
        case {"type": "function_call", "name": name}:
            return frames.FunctionCallOpened(name, item.get("namespace"))
        case {"type": "custom_tool_call", "name": name}:
            return frames.CustomToolCallOpened(name, item.get("namespace"))
        case _:
            raise _unknown(item)


def _text_of(item: Json) -> str:
    if item["type"] in ("function_call", "custom_tool_call"):
        return str(item.get("arguments") or item.get("input") or "")
    parts = item.get("content") or item.get("summary") or ()
    return "".join(part.get("text") or part.get("refusal") or "" for part in parts)


def _json(value: Any) -> str:
    """Return the arguments of a call as JSON, as a stream has them; none if they follow."""
    return msgspec.json.encode(value).decode() if value else ""


def _unknown(item: Json) -> EngineFailed:
    return EngineFailed(f"An item of the type {item.get('type')} cannot be shown: another server has done its work.")


TURNS: Mapping[str, Callable[[], Turn]] = {
    "chat": ChatTurn,
    "completions": ChatTurn,
    "messages": MessagesTurn,
    "responses": ResponsesTurn,
    "open_responses": ResponsesTurn,
}
"""The readers of the dialects."""


def turn_of(recording: Recording) -> Iterator[tuple[float, frames.ParsedFrame]]:
    """Yield the frames of the turn of a recorded answer, with their times; raise `EngineFailed` if it failed.

    `GenerationStarted`, which has the facts of the request, is not among them.
    """
    turn = TURNS[recording.header.dialect or ""]()
    at = 0.0
    for timed in recording.timed:
        at = timed.at if timed.at is not None else at
        frame = timed.frame
        if isinstance(frame, (WireEvent, WireBody)) and isinstance(frame.data, dict):
            _raise_failure(frame.data)
            read = turn.body if isinstance(frame, WireBody) else turn.event
            try:
                yield from ((at, each) for each in read(frame.data))
            except (AttributeError, KeyError, TypeError) as error:
                raise EngineFailed(
                    f"Line {timed.line} is no event of the dialect {recording.header.dialect}."
                ) from error
    if recording.end.failure:
        raise EngineFailed(recording.end.failure.message)
    if recording.end.abandoned:
        raise EngineFailed(CLIENT_LEFT)
    yield from ((at, each) for each in turn.end(at))


def _raise_failure(data: Json) -> None:
    error = data.get("error")
    if data.get("type") == "error" or (isinstance(error, dict) and "choices" not in data and "output" not in data):
        raise EngineFailed(str(error.get("message") if isinstance(error, dict) else data.get("message")))
