"""Events of a stream, as on the wire.  Names and fields are those of openai-python 3.52's union of stream events.

An event is complete when it is created, sequence number included.  ``gc=False`` is safe because events hold no
reference cycles; it spares the garbage collector the server's most frequent objects.
"""

from __future__ import annotations

from typing import Any, TypeAlias, get_args

import msgspec

from penstock.pipeline.protocol.items import Logprob, OutputItem, OutputPart, SummaryText
from penstock.pipeline.protocol.response import Response


class Event(msgspec.Struct, frozen=True, gc=False, tag_field="type"):
    """One event of a stream; its tag is its name on the wire."""

    sequence_number: int


class ItemEvent(Event, frozen=True):
    """A change of one item."""

    item_id: str
    output_index: int


class Delta(ItemEvent, frozen=True):
    """A piece of an item's text; nearly every event of a stream is a delta."""


class Done(ItemEvent, frozen=True):
    """The whole text of an item or a part, after its deltas."""


class Progress(ItemEvent, frozen=True):
    """Progress of work that this server does itself: a call, a list of tools, or a compaction."""


class ResponseCreated(Event, frozen=True, tag="response.created"):
    response: Response


class ResponseQueued(Event, frozen=True, tag="response.queued"):
    response: Response


class ResponseInProgress(Event, frozen=True, tag="response.in_progress"):
    response: Response


class ResponseCompleted(Event, frozen=True, tag="response.completed"):
    response: Response


class ResponseIncomplete(Event, frozen=True, tag="response.incomplete"):
    response: Response


class ResponseFailed(Event, frozen=True, tag="response.failed"):
    response: Response


class OutputItemAdded(Event, frozen=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class OutputItemDone(Event, frozen=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class ContentPartAdded(ItemEvent, frozen=True, tag="response.content_part.added"):
    content_index: int
    part: OutputPart


class ContentPartDone(ItemEvent, frozen=True, tag="response.content_part.done"):
    content_index: int
    part: OutputPart


class OutputTextDelta(Delta, frozen=True, tag="response.output_text.delta"):
    content_index: int
    delta: str
    logprobs: tuple[Logprob, ...] = ()


class OutputTextDone(Done, frozen=True, tag="response.output_text.done"):
    content_index: int
    text: str
    logprobs: tuple[Logprob, ...] = ()


class OutputTextAnnotationAdded(ItemEvent, frozen=True, tag="response.output_text.annotation.added"):
    content_index: int
    annotation_index: int
    annotation: dict[str, Any]


class RefusalDelta(Delta, frozen=True, tag="response.refusal.delta"):
    content_index: int
    delta: str


class RefusalDone(Done, frozen=True, tag="response.refusal.done"):
    content_index: int
    refusal: str


class ReasoningTextDelta(Delta, frozen=True, tag="response.reasoning_text.delta"):
    content_index: int
    delta: str


class ReasoningTextDone(Done, frozen=True, tag="response.reasoning_text.done"):
    content_index: int
    text: str


class ReasoningSummaryPartAdded(ItemEvent, frozen=True, tag="response.reasoning_summary_part.added"):
    summary_index: int
    part: SummaryText


class ReasoningSummaryPartDone(ItemEvent, frozen=True, tag="response.reasoning_summary_part.done"):
    summary_index: int
    part: SummaryText


class ReasoningSummaryTextDelta(Delta, frozen=True, tag="response.reasoning_summary_text.delta"):
    summary_index: int
    delta: str


class ReasoningSummaryTextDone(Done, frozen=True, tag="response.reasoning_summary_text.done"):
    summary_index: int
    text: str


class FunctionCallArgumentsDelta(Delta, frozen=True, tag="response.function_call_arguments.delta"):
    delta: str


class FunctionCallArgumentsDone(Done, frozen=True, tag="response.function_call_arguments.done"):
    arguments: str


class CustomToolCallInputDelta(Delta, frozen=True, tag="response.custom_tool_call_input.delta"):
    delta: str


class CustomToolCallInputDone(Done, frozen=True, tag="response.custom_tool_call_input.done"):
    input: str


class McpCallArgumentsDelta(Delta, frozen=True, tag="response.mcp_call_arguments.delta"):
    delta: str


class McpCallArgumentsDone(Done, frozen=True, tag="response.mcp_call_arguments.done"):
    arguments: str


class CodeInterpreterCallCodeDelta(Delta, frozen=True, tag="response.code_interpreter_call_code.delta"):
    delta: str


class CodeInterpreterCallCodeDone(Done, frozen=True, tag="response.code_interpreter_call_code.done"):
    code: str


class McpListToolsInProgress(Progress, frozen=True, tag="response.mcp_list_tools.in_progress"): ...


class McpListToolsCompleted(Progress, frozen=True, tag="response.mcp_list_tools.completed"): ...


class McpListToolsFailed(Progress, frozen=True, tag="response.mcp_list_tools.failed"): ...


class McpCallInProgress(Progress, frozen=True, tag="response.mcp_call.in_progress"): ...


class McpCallCompleted(Progress, frozen=True, tag="response.mcp_call.completed"): ...


class McpCallFailed(Progress, frozen=True, tag="response.mcp_call.failed"): ...


class CodeInterpreterCallInProgress(Progress, frozen=True, tag="response.code_interpreter_call.in_progress"): ...


class CodeInterpreterCallInterpreting(Progress, frozen=True, tag="response.code_interpreter_call.interpreting"): ...


class CodeInterpreterCallCompleted(Progress, frozen=True, tag="response.code_interpreter_call.completed"): ...


class WebSearchCallInProgress(Progress, frozen=True, tag="response.web_search_call.in_progress"): ...


class WebSearchCallSearching(Progress, frozen=True, tag="response.web_search_call.searching"): ...


class WebSearchCallCompleted(Progress, frozen=True, tag="response.web_search_call.completed"): ...


class FileSearchCallInProgress(Progress, frozen=True, tag="response.file_search_call.in_progress"): ...


class FileSearchCallSearching(Progress, frozen=True, tag="response.file_search_call.searching"): ...


class FileSearchCallCompleted(Progress, frozen=True, tag="response.file_search_call.completed"): ...


class CompactionCompacting(Progress, frozen=True, tag="response.compaction.compacting"):
    """The summary of a compaction was written; it is not in the event."""


class ShellCallCommandAdded(Event, frozen=True, tag="response.shell_call_command.added"):
    output_index: int
    command_index: int
    command: str


class ShellCallCommandDelta(Event, frozen=True, tag="response.shell_call_command.delta"):
    output_index: int
    command_index: int
    delta: str


class ShellCallCommandDone(Event, frozen=True, tag="response.shell_call_command.done"):
    output_index: int
    command_index: int
    command: str


class ShellCallOutputContentDelta(ItemEvent, frozen=True, tag="response.shell_call_output_content.delta"):
    command_index: int
    delta: dict[str, str]


class ShellCallOutputContentDone(ItemEvent, frozen=True, tag="response.shell_call_output_content.done"):
    command_index: int
    output: tuple[dict[str, Any], ...]


TerminalEvent: TypeAlias = ResponseCompleted | ResponseIncomplete | ResponseFailed
TextDelta: TypeAlias = (
    OutputTextDelta
    | RefusalDelta
    | ReasoningTextDelta
    | ReasoningSummaryTextDelta
    | FunctionCallArgumentsDelta
    | CustomToolCallInputDelta
    | McpCallArgumentsDelta
    | CodeInterpreterCallCodeDelta
)
TextDone: TypeAlias = (
    OutputTextDone
    | RefusalDone
    | ReasoningTextDone
    | ReasoningSummaryTextDone
    | FunctionCallArgumentsDone
    | CustomToolCallInputDone
    | McpCallArgumentsDone
    | CodeInterpreterCallCodeDone
)
ToolProgress: TypeAlias = (
    McpListToolsInProgress
    | McpListToolsCompleted
    | McpListToolsFailed
    | McpCallInProgress
    | McpCallCompleted
    | McpCallFailed
    | CodeInterpreterCallInProgress
    | CodeInterpreterCallInterpreting
    | CodeInterpreterCallCompleted
    | WebSearchCallInProgress
    | WebSearchCallSearching
    | WebSearchCallCompleted
    | FileSearchCallInProgress
    | FileSearchCallSearching
    | FileSearchCallCompleted
)
ShellEvent: TypeAlias = (
    ShellCallCommandAdded
    | ShellCallCommandDelta
    | ShellCallCommandDone
    | ShellCallOutputContentDelta
    | ShellCallOutputContentDone
)
ResponseEvent: TypeAlias = (
    ResponseCreated
    | ResponseQueued
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | ReasoningSummaryPartAdded
    | TextDelta
    | OutputTextAnnotationAdded
    | TextDone
    | ContentPartDone
    | ReasoningSummaryPartDone
    | ToolProgress
    | CompactionCompacting
    | ShellEvent
    | OutputItemDone
    | TerminalEvent
)

DELTAS: frozenset[type[Event]] = frozenset(get_args(TextDelta))
"""The types of deltas, for ``type(event) in DELTAS``: isinstance takes five times as long, at every token."""

TERMINAL_TYPES = frozenset(str(kind.__struct_config__.tag) for kind in get_args(TerminalEvent))
"""The names of the events that end a stream."""

DONE = b"data: [DONE]\n\n"
"""The end of every stream, after its terminal event."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment that clients skip; it keeps proxies from closing a silent connection."""

_encode_into = msgspec.json.Encoder().encode_into
_encoded = bytearray()
"""A buffer that all events share, because a new one for each takes noticeable time; `to_sse` returns a copy."""
_prefixes: dict[type[Event], bytes] = {}


def to_json(event: Event) -> bytes:
    """Encode an event as JSON.  Not thread-safe."""
    _encode_into(event, _encoded)
    return bytes(_encoded)


def to_sse(event: Event) -> bytes:
    """Encode an event as a whole server-sent event.

    Lines end in LF, and there is no ``id:`` line: with comments in the stream, it would break openai-python.  Not
    thread-safe.
    """
    try:
        prefix = _prefixes[type(event)]
    except KeyError:
        prefix = _prefixes[type(event)] = f"event: {event.__struct_config__.tag}\ndata: ".encode()
    _encode_into(event, _encoded)
    _encoded.extend(b"\n\n")
    return prefix + _encoded
