"""From the events of a response to those of a message."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from operator import methodcaller
from typing import Literal, TypeAlias

from msgspec import UNSET, UnsetType
from msgspec.structs import asdict, replace
from pydantic_core import from_json

from penstock.api.dialect import failed, failure
from penstock.api.http.wire import UsageSoFar
from penstock.extensions.dialects.messages.arguments import ObjectReader
from penstock.extensions.dialects.messages.errors import problem
from penstock.extensions.dialects.messages.events import (
    BlockDelta,
    CodeExecutionResult,
    CodeExecutionToolResult,
    Compaction,
    CompactionDelta,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    CreatedMessage,
    Ending,
    Event,
    InputJsonDelta,
    MessageContainer,
    MessageDelta,
    MessageError,
    MessageStart,
    MessageStop,
    MessageUsage,
    Searches,
    ServerToolUse,
    SignatureDelta,
    StopReason,
    Text,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ThinkingTokens,
    ToolCaller,
    ToolUse,
    WebSearchError,
    WebSearchResult,
    WebSearchToolResult,
)
from penstock.extensions.dialects.messages.messages import (
    container_id,
    program_use_id,
    server_tool_use_id,
    tool_use_id,
)
from penstock.extensions.dialects.messages.tools import CALLER, CALLERS, PROGRAMS
from penstock.pipeline.hot_path import join, on_the_way
from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.response import Response, Usage
from penstock.pipeline.tasks import LARGE_BYTES, apart
from penstock.services.tools import PROGRAM_TTL

Display: TypeAlias = Literal["shown", "omitted", "none", "summary"]
"""The way in which thoughts are shown: with their text, with their signature alone, or not at all.

In a ``summary``, the text of the model is that of a compaction.
"""

_FIRST_KEY = re.compile(r'\s*\{\s*(?:\}|"(?:[^"\\]|\\.)*"\s*:(?P<after>.))', re.DOTALL)
"""Arguments up to the character that tells whether they are written with spaces."""

_ENDINGS: dict[str, StopReason] = {
    "content_filter": "refusal",
    "max_turns": "pause_turn",
    "max_tool_calls": "end_turn",
    "steered": "end_turn",
}
"""The reasons for the end of a message by the reasons for which a response is incomplete."""

_CODES = {"overloaded_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
"""The codes of failed responses by Anthropic's types of errors."""


@on_the_way
@dataclass(frozen=True)
class MessageEvents:
    """Write the events of a message.

    ``most`` is the bound on its output tokens: if it ends before without being whole, the context is full.  With 0, the
    message has no content.  The first event has the usage ``so_far``: the tokens of the prompt.
    """

    display: Display = "shown"
    most: int | None = None
    so_far: UsageSoFar = lambda: None

    async def __call__(self, source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[Event, None]:
        """Yield the events of one message."""
        writer = MessageWriter(self.display, self.most, self.so_far)
        join(rewrite=writer.feed)
        async for event in source:
            for written in writer.feed(event):
                yield written


class MessageWriter:
    """State machine, one per message."""

    def __init__(self, display: Display, most: int | None, so_far: UsageSoFar) -> None:
        self._display = display
        self._most = most
        self._so_far = so_far
        self._index = 0
        self._is_open = False
        self._held = ""
        """Text of the open item that is not sent yet."""
        self._call: items.FunctionCall | None = None
        self._arguments = ObjectReader()
        self._has_called = False
        self._has_open_call = False
        """True if the model left a call open: its input is not whole, so that it cannot be made."""
        self._caller_type = ""
        """The type of programs as callers; empty if the request has none."""
        self._program = ""
        """The id of the call of the latest program."""
        self._searches = 0
        self._summary: list[str] = []
        self._has_refused = False

    def feed(self, event: ResponseEvent) -> Iterable[Event]:
        """Take one event, and return those that it causes."""
        if type(event) is events.OutputTextDelta:  # nearly every event
            return self._text(event.delta)
        return self._rare(event)

    def _rare(self, event: ResponseEvent) -> Iterator[Event]:
        match event:
            case events.RefusalDelta(delta=text):
                yield from self._text(text)
            case events.ReasoningTextDelta(delta=text):
                if self._display == "shown":
                    yield ContentBlockDelta(self._index, ThinkingDelta(text))
            case events.FunctionCallArgumentsDelta(delta=text):
                yield from self._input(self._arguments.feed(text))
            case events.OutputItemAdded(item=item):
                yield from self._begin(item)
            case events.OutputItemDone(item=item):
                yield from self._end(item)
            case events.ResponseCreated(response=response):
                self._caller_type = _caller_type(response)
                yield MessageStart(_begun(response, self._so_far()))
            case events.ResponseCompleted(response=response) | events.ResponseIncomplete(response=response):
                yield from self._finish(response)
            case events.ResponseFailed(response=response):
                yield _failure(response)
            case _:
                pass

    def _open(self, block: ContentBlock) -> Event:
        self._is_open = True
        return ContentBlockStart(self._index, block)

    def _close(self) -> Event:
        self._is_open = False
        self._index += 1
        return ContentBlockStop(self._index - 1)

    def _begin(self, item: items.OutputItem) -> Iterator[Event]:
        self._held = ""
        match item:
            case items.Reasoning() if self._display in ("shown", "omitted"):
                yield self._open(Thinking("", ""))
            case items.FunctionCall():
                self._call, self._arguments = item, ObjectReader()
            case _:
                pass

    def _text(self, text: str) -> tuple[Event, ...]:
        """Write text; clients take no block that is blank, so it begins with the first character that is not."""
        if self._display == "summary":
            self._summary.append(text)
            return ()
        if self._is_open:
            return (ContentBlockDelta(self._index, TextDelta(text)),)
        self._held += text
        if not self._held.strip():
            return ()
        return (self._open(Text("")), ContentBlockDelta(self._index, TextDelta(self._held)))

    def _input(self, text: str) -> Iterator[Event]:
        """Write input of a call; its block begins once the spelling is known, which the id tells."""
        if self._is_open:
            if text:
                yield ContentBlockDelta(self._index, InputJsonDelta(text))
            return
        self._held += text
        if spelling := _FIRST_KEY.match(self._held):
            after = spelling["after"]
            yield from self._open_call(compact=after is not None and not after.isspace())

    def _open_call(self, *, compact: bool) -> Iterator[Event]:
        assert self._call is not None
        use_id, caller = tool_use_id(self._call, compact=compact), self._caller(self._call)
        yield self._open(ToolUse(use_id, name=self._call.name, input={}, caller=caller))
        if self._held:
            yield ContentBlockDelta(self._index, InputJsonDelta(self._held))

    def _end(self, item: items.OutputItem) -> Iterator[Event]:
        match item:
            case items.Reasoning(encrypted_content=sealed) if self._is_open:
                yield ContentBlockDelta(self._index, SignatureDelta(sealed or ""))
            case items.FunctionCall(status=status):
                if not self._is_open:
                    yield from self._open_call(compact=False)
                self._has_called |= status == "completed"
                self._has_open_call |= status != "completed"
            case items.WebSearchCall():
                yield from self._search(item)
            case items.CodeInterpreterCall():
                yield from self._run(item)
            case items.Program(call_id=call_id, code=code):
                self._program = call_id
                call = ServerToolUse(program_use_id(call_id), "code_execution", {}, self._caller(item))
                yield from self._ran(call, {"code": code})
            case items.ProgramOutput(call_id=call_id, result=written, status=status):
                self._program = call_id
                result = CodeExecutionResult(written, int(status != "completed"))
                yield self._open(CodeExecutionToolResult(program_use_id(call_id), result))
            case items.Message(content=[items.Refusal()]):
                self._has_refused = True
            case _:
                pass
        if self._is_open:
            yield self._close()

    def _search(self, item: items.WebSearchCall) -> Iterator[Event]:
        """Write a search and what it found; of pages that are opened, a client needs only those of programs."""
        action = item.action or {}
        if action.get("type") == "search":
            self._searches += 1
            given = {"query": action.get("query") or ""}
        elif items.caller_of(item):
            given = {key: action.get(key) or "" for key in ("url", "pattern") if key in action}
        else:
            return
        caller = self._caller(item)
        call = ServerToolUse(server_tool_use_id(item), "web_search", {}, caller)
        yield from self._ran(call, given)
        urls = [str(source["url"]) for source in action.get("sources") or ()]
        found = tuple(WebSearchResult(url, url) for url in urls)
        yield self._open(WebSearchToolResult(call.id, WebSearchError() if item.status == "failed" else found, caller))

    def _run(self, item: items.CodeInterpreterCall) -> Iterator[Event]:
        """Write a program and what it wrote."""
        call = ServerToolUse(server_tool_use_id(item), "code_execution", {})
        yield from self._ran(call, {"code": item.code})
        written = "".join(output.get("logs", "") for output in item.outputs or ())
        result = CodeExecutionResult(written, int(item.status != "completed"))
        yield self._open(CodeExecutionToolResult(call.id, result))

    def _ran(self, call: ServerToolUse, given: Mapping[str, str]) -> Iterator[Event]:
        yield self._open(call)
        yield ContentBlockDelta(self._index, InputJsonDelta(json.dumps(given, ensure_ascii=False)))
        yield self._close()

    def _caller(self, item: items.FunctionCall | items.WebSearchCall | items.Program) -> ToolCaller | UnsetType:
        """Return the caller of a tool; UNSET if the request has no programs, so that the model is the only one."""
        if call_id := items.caller_of(item):
            self._program = call_id
            return ToolCaller(self._caller_type or CALLERS[-1], program_use_id(call_id))
        return ToolCaller("direct") if self._caller_type else UNSET

    def _finish(self, response: Response) -> Iterator[Event]:
        if response.status == "cancelled":
            yield _failure(response)
            return
        if self._display == "summary":
            summary = "".join(self._summary).strip() if response.status == "completed" and not self._has_refused else ""
            yield self._open(Compaction())
            yield ContentBlockDelta(self._index, CompactionDelta(summary or None))
            yield self._close()
        elif self._index == 0 and self._most != 0:  # clients look at the first block
            yield self._open(Text(""))
            yield self._close()
        usage = _usage(response.usage)
        if self._searches:
            usage = replace(usage, server_tool_use=Searches(self._searches))
        ending = self._ending(response, usage.output_tokens)
        ending = replace(ending, container=self._container(response), generations=response.generations)
        yield MessageDelta(ending, usage)
        yield MessageStop()

    def _container(self, response: Response) -> MessageContainer | UnsetType:
        """Return the container of the latest program; UNSET if there is none."""
        if not self._program:
            return UNSET
        expires = datetime.fromtimestamp((response.completed_at or response.created_at) + PROGRAM_TTL, UTC)
        return MessageContainer(container_id(self._program), expires.isoformat().replace("+00:00", "Z"))

    def _ending(self, response: Response, output_tokens: int) -> Ending:
        if self._display == "summary":
            return Ending("compaction")
        if self._most == 0:
            return Ending("max_tokens")
        if details := response.incomplete_details:
            if details.reason != "max_output_tokens":
                return Ending(_ENDINGS[details.reason])
            is_full = self._most is not None and output_tokens < self._most
            return Ending("model_context_window_exceeded" if is_full else "max_tokens")
        if self._has_open_call:
            return Ending("max_tokens")
        if self._has_called:
            return Ending("tool_use")
        if self._has_refused:
            return Ending("refusal")
        if isinstance(stop := response.stop_reason, str):
            return Ending("stop_sequence", stop)
        return Ending("end_turn")


def _caller_type(response: Response) -> str:
    """Return the type of programs as callers in a response; empty if its request has none."""
    types = [*map(methodcaller("get", "type"), response.tools)]  # there may be thousands
    return str(response.tools[types.index(PROGRAMS)].get(CALLER) or CALLERS[-1]) if PROGRAMS in types else ""


def _begun(response: Response, usage: Usage | None) -> CreatedMessage:
    return CreatedMessage(f"msg_{response.id.removeprefix('resp_')}", response.model, (), _usage(usage))


def _usage(usage: Usage | None) -> MessageUsage:
    if usage is None:
        return MessageUsage(0, 0, ThinkingTokens(0))
    cached = usage.input_tokens_details.cached_tokens
    thinking = ThinkingTokens(usage.output_tokens_details.reasoning_tokens)
    return MessageUsage(usage.input_tokens - cached, usage.output_tokens, thinking, cached)


def _failure(response: Response) -> MessageError:
    error = failure(response)
    return MessageError(problem(error.status, error.message, error.code))


async def whole_message(source: AsyncIterator[Event]) -> CreatedMessage:
    """Return the message that a stream makes; raise the error that it ends with."""
    message: CreatedMessage | None = None
    block: ContentBlock | None = None
    content: list[ContentBlock] = []
    texts: list[str] = []
    async for event in source:
        match event:
            case MessageStart():
                message = event.message
            case ContentBlockStart():
                block = event.content_block
            case ContentBlockDelta(delta=SignatureDelta(signature=signature)) if isinstance(block, Thinking):
                block = replace(block, signature=signature)
            case ContentBlockDelta(delta=CompactionDelta(content=summary)):
                block = Compaction(summary)
            case ContentBlockDelta(delta=delta):
                texts.append(_text_of(delta))
            case ContentBlockStop() if block is not None:
                text = "".join(texts)
                content.append(await apart(len(text) > LARGE_BYTES, _filled, block, text))
                texts.clear()
            case MessageDelta(delta=ending, usage=usage) if message is not None:
                return replace(message, content=tuple(content), usage=usage, **asdict(ending))
            case MessageError(error=error):
                raise failed(_CODES.get(error.type), error.message)
            case _:
                pass
    raise RuntimeError("the stream ended without its last events")


def _text_of(delta: BlockDelta) -> str:
    match delta:
        case TextDelta():
            return delta.text
        case ThinkingDelta():
            return delta.thinking
        case InputJsonDelta():
            return delta.partial_json
        case SignatureDelta() | CompactionDelta():
            return ""


def _filled(block: ContentBlock, text: str) -> ContentBlock:
    match block:
        case Text():
            return Text(text)
        case Thinking():
            return replace(block, thinking=text)
        case ToolUse() | ServerToolUse():
            return replace(block, input=from_json(text, allow_partial=True) if text else {})
        case WebSearchToolResult() | CodeExecutionToolResult() | Compaction():
            return block
