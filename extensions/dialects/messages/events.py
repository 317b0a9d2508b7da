"""Messages and the events of their streams, as on the wire.  Names and fields are those of anthropic-python 2.13."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from penstock.pipeline.protocol.generations import Generation

StopReason: TypeAlias = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "pause_turn",
    "refusal",
    "model_context_window_exceeded",
    "compaction",
]


class _Typed(msgspec.Struct, frozen=True, gc=False, tag_field="type"):
    pass


# Blocks of content


class Text(_Typed, frozen=True, tag="text"):
    """Text for the user."""

    text: str


class Thinking(_Typed, frozen=True, tag="thinking"):
    """The model's thinking; ``signature`` is the sealed thought, which holds its text and its tokens."""

    thinking: str
    signature: str


class ToolCaller(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The caller of a tool: the model, whose type is ``direct``, or a program by the id of its block."""

    type: str
    tool_id: str | UnsetType = UNSET


class ToolUse(_Typed, frozen=True, tag="tool_use"):
    """A call of a tool for the client to run."""

    id: str
    name: str
    input: Any
    caller: ToolCaller | UnsetType = UNSET


class ServerToolUse(_Typed, frozen=True, tag="server_tool_use"):
    """A call that this server runs."""

    id: str
    name: Literal["web_search", "code_execution"]
    input: Any
    caller: ToolCaller | UnsetType = UNSET


class WebSearchResult(_Typed, frozen=True, tag="web_search_result"):
    """A page that a search has found."""

    url: str
    title: str
    encrypted_content: str = ""
    page_age: None = None


class WebSearchError(_Typed, frozen=True, tag="web_search_tool_result_error"):
    """The failure of a search."""

    error_code: Literal["unavailable"] = "unavailable"


class WebSearchToolResult(_Typed, frozen=True, tag="web_search_tool_result"):
    """The result of a search."""

    tool_use_id: str
    content: tuple[WebSearchResult, ...] | WebSearchError
    caller: ToolCaller | UnsetType = UNSET


class CodeExecutionResult(_Typed, frozen=True, tag="code_execution_result"):
    """The output of a program; this server does not tell errors from other output."""

    stdout: str
    return_code: int
    stderr: str = ""
    content: tuple[()] = ()


class CodeExecutionToolResult(_Typed, frozen=True, tag="code_execution_tool_result"):
    """The result of a program."""

    tool_use_id: str
    content: CodeExecutionResult


class Compaction(_Typed, frozen=True, tag="compaction"):
    """The summary of a conversation; None if the model wrote none."""

    content: str | None = None
    encrypted_content: None = None


ContentBlock: TypeAlias = (
    Text | Thinking | ToolUse | ServerToolUse | WebSearchToolResult | CodeExecutionToolResult | Compaction
)

# Messages


class ThinkingTokens(msgspec.Struct, frozen=True):
    """Details of the output tokens; ``thinking_tokens`` of them became text of thoughts."""

    thinking_tokens: int


class Searches(msgspec.Struct, frozen=True):
    """The work of the server's tools."""

    web_search_requests: int
    web_fetch_requests: int = 0


class MessageUsage(msgspec.Struct, frozen=True):
    """Token counts; ``input_tokens`` are those that were not in the engine's prefix cache."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    service_tier: Literal["standard"] = "standard"
    server_tool_use: Searches | None = None


class MessageContainer(msgspec.Struct, frozen=True):
    """The sandbox of a program: its ``id``, and the time in RFC 3339 until which it waits for the client."""

    id: str
    expires_at: str


class CreatedMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """An answer of the model."""

    id: str
    model: str
    content: tuple[ContentBlock, ...]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: MessageContainer | UnsetType = UNSET
    generations: tuple[Generation, ...] | UnsetType = UNSET
    role: Literal["assistant"] = "assistant"


# Events


class MessageStart(_Typed, frozen=True, tag="message_start"):
    """The first event; its message is empty."""

    message: CreatedMessage


class ContentBlockStart(_Typed, frozen=True, tag="content_block_start"):
    """A block begins; it is empty."""

    index: int
    content_block: ContentBlock


class TextDelta(_Typed, frozen=True, tag="text_delta"):
    """More text for the user."""

    text: str


class ThinkingDelta(_Typed, frozen=True, tag="thinking_delta"):
    """More text of a thought."""

    thinking: str


class SignatureDelta(_Typed, frozen=True, tag="signature_delta"):
    """The signature of a thought, as its last delta."""

    signature: str


class InputJsonDelta(_Typed, frozen=True, tag="input_json_delta"):
    """More of the JSON of a call's input."""

    partial_json: str


class CompactionDelta(_Typed, frozen=True, tag="compaction_delta"):
    """The summary of a conversation, as the only delta of its block."""

    content: str | None
    encrypted_content: None = None


BlockDelta: TypeAlias = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta | CompactionDelta


class ContentBlockDelta(_Typed, frozen=True, tag="content_block_delta"):
    """More of the open block."""

    index: int
    delta: BlockDelta


class ContentBlockStop(_Typed, frozen=True, tag="content_block_stop"):
    """The open block is whole."""

    index: int


class Ending(msgspec.Struct, frozen=True):
    """The reason for the end of a message, the text of ``stop_sequences`` that ended it, and what else the end brings.

    ``generations`` are this server's own.
    """

    stop_reason: StopReason
    stop_sequence: str | None = None
    stop_details: None = None
    container: MessageContainer | UnsetType = UNSET
    generations: tuple[Generation, ...] | UnsetType = UNSET


class MessageDelta(_Typed, frozen=True, tag="message_delta"):
    """The end of a message, and its usage."""

    delta: Ending
    usage: MessageUsage


class MessageStop(_Typed, frozen=True, tag="message_stop"):
    """The last event."""


class MessageProblem(msgspec.Struct, frozen=True, omit_defaults=True):
    """An error: its kind (``type``), and ``details`` with a word for programs, which few errors have."""

    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class MessageError(_Typed, frozen=True, tag="error"):
    """The body of every error, and the last event of a stream that breaks off."""

    error: MessageProblem
    request_id: str | None = None


Event: TypeAlias = (
    MessageStart | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop | MessageError
)

PING = b'event: ping\ndata: {"type":"ping"}\n\n'
"""An event that clients skip."""

_encode_into = msgspec.json.Encoder().encode_into
_encoded = bytearray()
"""A buffer that all events share, because a new one for each takes noticeable time."""


def to_sse(event: Event) -> bytes:
    """Encode an event as a whole server-sent event.  Not thread-safe."""
    _encode_into(event, _encoded)
    return b"event: %b\ndata: %b\n\n" % (str(event.__struct_config__.tag).encode(), bytes(_encoded))
