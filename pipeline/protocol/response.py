"""The Response object.

The 31 fields of the Open Responses specification are always present; a few others only if the request has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from penstock.pipeline.protocol.generations import Generation
from penstock.pipeline.protocol.items import Message, OutputItem, WebSearchCall

ResponseStatus: TypeAlias = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
IncompleteReason: TypeAlias = Literal["max_output_tokens", "content_filter", "max_tool_calls", "max_turns", "steered"]
Summary: TypeAlias = Literal["auto", "concise", "detailed"]
ReasoningContext: TypeAlias = Literal["auto", "current_turn", "all_turns"]
PromptCacheRetention: TypeAlias = Literal["in_memory", "24h"]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


def item_key(response_id: str, index: int) -> str:
    """Return the suffix of an output item's ids, made from the response's id so that a replay repeats it."""
    return f"{response_id.removeprefix('resp_')}{index:04x}"


PerTurn: TypeAlias = tuple[int, ...] | UnsetType
"""A number for each turn of the model, as vLLM has them; only if the request has ``enable_response_messages``.

OpenAI's details have only numbers, and clients that check them refuse lists.
"""


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the input tokens; ``cached_tokens`` of them were found in the engine's prefix cache."""

    cached_tokens: int
    cache_write_tokens: int = 0
    input_tokens_per_turn: PerTurn = UNSET
    cached_tokens_per_turn: PerTurn = UNSET


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Details of the output tokens; ``reasoning_tokens`` of them became text of reasoning items.

    ``tool_output_tokens`` are the results of calls that this server ran.  They are input of the next turn, not output
    of the model.
    """

    reasoning_tokens: int
    tool_output_tokens: int = 0
    output_tokens_per_turn: PerTurn = UNSET
    tool_output_tokens_per_turn: PerTurn = UNSET


class Usage(msgspec.Struct, frozen=True):
    """Token counts: every token of the prompt, and every token the engine generated, markup included."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ImageTokens(msgspec.Struct, frozen=True):
    """Input tokens of image generation; no tool of this server has any."""

    image_tokens: int = 0
    text_tokens: int = 0


class ImageGenerationUsage(msgspec.Struct, frozen=True):
    """The usage of image generation, which OpenAI's types require beside the searches."""

    input_tokens: int = 0
    input_tokens_details: ImageTokens = ImageTokens()
    output_tokens: int = 0
    total_tokens: int = 0


class WebSearchUsage(msgspec.Struct, frozen=True):
    """The completed searches of a response; opened pages do not count."""

    num_requests: int


class ToolUsage(msgspec.Struct, frozen=True):
    """The usage of tools that the server ran, apart from the tokens."""

    web_search: WebSearchUsage
    image_gen: ImageGenerationUsage = ImageGenerationUsage()


def tool_usage_of(output: Iterable[OutputItem]) -> ToolUsage | UnsetType:
    """Return the usage of tools in an output, or UNSET if it has no completed search of the web."""
    searches = sum(isinstance(item, WebSearchCall) and item.is_completed_search for item in output)
    return ToolUsage(WebSearchUsage(searches)) if searches else UNSET


class IncompleteDetails(msgspec.Struct, frozen=True):
    """The reason for the early end of a response."""

    reason: IncompleteReason


class ConversationReference(msgspec.Struct, frozen=True):
    """The conversation that a response belongs to."""

    id: str


class ErrorDetails(msgspec.Struct, frozen=True):
    """The reason for the failure of a response."""

    code: str
    message: str


class ReasoningOptions(msgspec.Struct, frozen=True):
    """The ``reasoning`` options of the request, repeated in the response."""

    effort: Effort | None
    summary: Summary | None
    context: ReasoningContext | UnsetType = UNSET


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """A response in any state.  Times are whole seconds since the epoch."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: ResponseStatus
    incomplete_details: IncompleteDetails | None = None
    model: str
    previous_response_id: str | None
    instructions: str | None
    output: tuple[OutputItem, ...] = ()
    error: ErrorDetails | None = None
    tools: tuple[dict[str, Any], ...]
    left_out_tools: tuple[str, ...] | UnsetType = UNSET
    """The types of tools of the request that were left out of it, as the operator wants."""
    tool_choice: str | dict[str, Any]
    truncation: Literal["auto", "disabled"] = "disabled"
    parallel_tool_calls: bool
    text: dict[str, Any]
    top_p: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    temperature: float
    reasoning: ReasoningOptions
    usage: Usage | None = None
    tool_usage: ToolUsage | UnsetType = UNSET
    max_output_tokens: int | None
    max_tool_calls: int | None = None
    store: bool
    background: bool = False
    conversation: ConversationReference | UnsetType = UNSET
    service_tier: str = "default"
    metadata: dict[str, str]
    safety_identifier: str | None
    prompt_cache_key: str | None
    prompt_cache_retention: PromptCacheRetention | UnsetType = UNSET
    user: str | UnsetType = UNSET
    prompt: dict[str, Any] | UnsetType = UNSET
    """The template that gave parameters, with the version that was used; they are echoed as if the request had them."""
    input_messages: tuple[dict[str, Any], ...] | UnsetType | None = UNSET
    """The prompt, message by message, if the request has ``enable_response_messages`` (vLLM); None until the end."""
    output_messages: tuple[dict[str, Any], ...] | UnsetType | None = UNSET
    """The model's output, under the same condition."""
    generations: tuple[Generation, ...] | UnsetType = UNSET
    """Each turn of the model by its tokens, at the end, if the request asks for tokens or versions of weights."""
    stop_reason: str | int | UnsetType = UNSET
    """The text of ``stop``, or the token of ``stop_token_ids``, that ended the response (vLLM's name)."""

    @property
    def output_text(self) -> str:
        """The text of all messages of the output, as OpenAI's SDKs name it."""
        return "".join(item.text for item in self.output if isinstance(item, Message))


ANSWERING: Mapping[str, Any] = {
    "instructions": None,
    "tools": (),
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "max_tool_calls": None,
    "text": {"format": {"type": "text"}},
    "reasoning": ReasoningOptions(None, None),
    "truncation": "disabled",
    "max_output_tokens": None,
    "top_logprobs": 0,
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""The echoed parameters that may change the answer of the model, each with its value if the request omits it."""

ECHOED: Mapping[str, Any] = {
    **ANSWERING,
    "metadata": {},
    "previous_response_id": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": UNSET,
    "safety_identifier": None,
    "user": UNSET,
}
"""All parameters that a response echoes, each with its value if the request omits it."""
