"""The objects of the APIs, with the fields that their references require; others are allowed."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

Status: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
Json: TypeAlias = dict[str, Any]


class Model(msgspec.Struct):
    """A model of OpenAI's list."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelList(msgspec.Struct):
    """OpenAI's list of models."""

    object: Literal["list"]
    data: list[Model]


class AnthropicModel(msgspec.Struct):
    """A model of Anthropic's list."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str


class AnthropicModels(msgspec.Struct):
    """Anthropic's list of models."""

    data: list[AnthropicModel]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Problem(msgspec.Struct):
    """The error of a refusal of any of the APIs; `StrictProblem` and `AnthropicProblem` have the rest of each."""

    message: str
    type: str
    param: Any = None
    code: Any = None


class StrictProblem(msgspec.Struct):
    """The error of a refusal of OpenAI's."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class Refusal(msgspec.Struct):
    """The body of a refusal of any of the APIs."""

    error: Problem


class StrictRefusal(msgspec.Struct):
    """The body of a refusal of OpenAI's."""

    error: StrictProblem


AnthropicType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "conflict_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "timeout_error",
    "overloaded_error",
]


class AnthropicProblem(msgspec.Struct):
    """The error of a refusal of Anthropic's."""

    type: AnthropicType
    message: str


class AnthropicRefusal(msgspec.Struct):
    """The body of a refusal of Anthropic's."""

    type: Literal["error"]
    error: AnthropicProblem


# Responses


class Cached(msgspec.Struct):
    """Details of the tokens of an input."""

    cached_tokens: int


class Reasoned(msgspec.Struct):
    """Details of the tokens of an output."""

    reasoning_tokens: int


class Usage(msgspec.Struct):
    """The usage of a response."""

    input_tokens: int
    input_tokens_details: Cached
    output_tokens: int
    output_tokens_details: Reasoned
    total_tokens: int


class Response(msgspec.Struct):
    """A response, with the fields that are never null."""

    id: str
    object: Literal["response"]
    created_at: float
    status: Status
    model: str
    output: list[Json]
    parallel_tool_calls: bool
    tool_choice: str | Json
    tools: list[Json]


NULLABLE = ("error", "incomplete_details", "instructions", "metadata", "temperature", "top_p")
"""The fields of a response that the reference requires, and that may be null."""


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """A text of a message."""

    text: str
    annotations: list[Json]


class RefusedText(msgspec.Struct, tag_field="type", tag="refusal"):
    """A refusal of the model."""

    refusal: str


class Message(msgspec.Struct):
    """A message of an output."""

    id: str
    role: Literal["assistant"]
    status: Literal["in_progress", "completed", "incomplete"]
    content: list[OutputText | RefusedText]


class FunctionCall(msgspec.Struct):
    """A call of a function of the client's."""

    call_id: str
    name: str
    arguments: str


class ThoughtPart(msgspec.Struct):
    """A part of a thought or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class Reasoning(msgspec.Struct):
    """A thought of an output."""

    id: str
    summary: list[ThoughtPart]
    content: list[ThoughtPart] | None = None
    encrypted_content: str | None = None


ITEMS: dict[str, type] = {"message": Message, "function_call": FunctionCall, "reasoning": Reasoning}
"""The items that a model itself writes, by type; those of tools that the server runs are not checked."""


# Chat Completions


class ChatFunction(msgspec.Struct):
    """The function of a call."""

    name: str
    arguments: str


class ChatCall(msgspec.Struct):
    """A call of a completion."""

    id: str
    type: Literal["function"]
    function: ChatFunction


class ChatMessage(msgspec.Struct):
    """The message of a choice."""

    role: Literal["assistant"]
    content: str | None
    tool_calls: list[ChatCall] | None = None


FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class Choice(msgspec.Struct):
    """A choice of a completion."""

    index: int
    message: ChatMessage
    finish_reason: FinishReason


class ChatUsage(msgspec.Struct):
    """The usage of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(msgspec.Struct):
    """A completion of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[Choice]
    usage: ChatUsage | None = None


class ChunkFunction(msgspec.Struct):
    """A piece of the function of a call."""

    name: str | None = None
    arguments: str | None = None


class ChunkCall(msgspec.Struct):
    """A piece of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: ChunkFunction | None = None


class Delta(msgspec.Struct):
    """A piece of a message."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ChunkCall] | None = None


class ChunkChoice(msgspec.Struct):
    """A choice of a chunk."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None


class Chunk(msgspec.Struct):
    """A chunk of a completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: ChatUsage | None = None


# Messages


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """A text of an answer."""

    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """A thought of an answer."""

    thinking: str
    signature: str


class RedactedBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """A thought that the client cannot read."""

    data: str


class ToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: Json


StopReason: TypeAlias = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", "refusal", "model_context_window_exceeded"
]


class MessagesUsage(msgspec.Struct):
    """The usage of an answer."""

    input_tokens: int
    output_tokens: int


class AnthropicMessage(msgspec.Struct):
    """An answer of the Messages API."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | RedactedBlock | ToolUse]
    stop_reason: StopReason
    usage: MessagesUsage
    stop_sequence: str | None = None
