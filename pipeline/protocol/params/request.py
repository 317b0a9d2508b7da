"""The bodies of ``POST /v1/responses``, as openai-python 3.52 writes them, with vLLM's extras, and of ``/compact``.

Each field of the API is declared, so that the declarations are the table of what becomes of it: a field with a type of
its own is read by a stage, `Refused` gives a 400, and `UNUSED` marks what restricts nothing.  Keys that the API does
not have are ignored, because clients send some of their own, but for the names in ``foreign_names``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

from pydantic import AfterValidator, ConfigDict, Field, PrivateAttr, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from penstock.pipeline.logs import check_names
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.params.common import (
    FAIL_FAST,
    UNUSED,
    Body,
    Echoed,
    Metadata,
    Refused,
    TextOr,
    at_most,
    only,
)
from penstock.pipeline.protocol.params.foreign_names import OF_CHATS
from penstock.pipeline.protocol.params.items import (
    CompactionTriggerItem,
    InputItem,
    InputItems,
    RawMessages,
    SteeringMessages,
    message,
)
from penstock.pipeline.protocol.params.prompt import PromptParam
from penstock.pipeline.protocol.params.refusal import UNSUPPORTED
from penstock.pipeline.protocol.params.tools import JsonSchemaFormat, TextFormat, ToolChoice, ToolParam
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.pipeline.protocol.response import Effort, PromptCacheRetention, ReasoningContext, Summary

ServiceTier: TypeAlias = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]


class ReasoningOptionsParam(Body):
    effort: Effort | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None
    """The former name of ``summary``."""
    context: ReasoningContext | None = None
    mode: str | None = None


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class TextOptions(Echoed):
    format: Annotated[TextFormat | JsonSchemaFormat | JsonObjectFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ConversationReferenceParam(Body):
    id: str


class StreamOptions(Body):
    include_obfuscation: bool | None = None


def _soonest(window: str) -> str:
    if window != "soonest":
        raise PydanticCustomError(UNSUPPORTED, "Every response runs as soon as it can here: this should be 'soonest'")
    return window


_Soonest: TypeAlias = Annotated[Literal["soonest", "2h", "8h"], AfterValidator(_soonest)]


class BackgroundOptions(Body):
    completion_window: _Soonest | None = None
    continuation_id: Annotated[str, UNUSED] | None = None


class PromptCacheOptions(Body):
    mode: Annotated[Literal["implicit", "explicit"], UNUSED] | None = None
    ttl: Annotated[Literal["30m", "12h"], UNUSED] | None = None
    prewarm: Refused = None
    comparison_response_id: Annotated[str, UNUSED] | None = None


class ContextManagement(Body):
    """An entry of ``context_management``: before a turn of ``compact_threshold`` tokens, the context is compacted."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Field(ge=1)] | None = None


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputs(Body):
    """Exactly one constraint.  JSON is written with minimal white space, as ``disable_any_whitespace`` asks."""

    json_: TextOr[str, dict[str, Any]] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True, min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: TextOr[str, dict[str, Any]] | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: Refused = None
    disable_additional_properties: Literal[False] | None = None

    @property
    def constraint(self) -> dict[str, Any]:
        """The constraint as a dict, its name the only key."""
        values = self.model_dump(by_alias=True, include={"json_", *_CONSTRAINTS[1:]})
        return {name: value for name, value in values.items() if value is not None and value is not False}

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if len(self.constraint) != 1:
            raise PydanticCustomError(
                "structured_outputs", "This should have exactly one of {names}", {"names": ", ".join(_CONSTRAINTS)}
            )
        return self


def _of_client(extra: dict[str, Any]) -> dict[str, Any]:
    """Refuse what is not a client's to say.

    By the first two, vLLM moves caches between engines: they name addresses that the engine would open.  By the third,
    an engine reports what it reads from its cache as stored once more.  By the last, this server tells an engine which
    conversations are over.
    """
    for name in ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "penstock_let_go"):
        if name in extra:
            raise PydanticCustomError("vllm_xargs", "{name} cannot be set by a request", {"name": name})
    return extra


MOST_STOP_CHARACTERS = 1_000
"""Characters of the longest text that ends an answer, or that an answer must not have."""

MOST_BAD_WORDS = 128
"""The most ``bad_words``, as in vLLM."""

MOST_STOP_IDS = 100
"""The most ``stop_token_ids``: vLLM has room for 128, those of the model included."""

MOST_LOGPROB_IDS = 128
"""The most ``logprob_token_ids``, as in vLLM."""

MOST_TOKEN_IDS = 1_024
"""The most ``allowed_token_ids``, and the most of a ``logit_bias``: more end vLLM's engine."""

StopText: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=MOST_STOP_CHARACTERS)]
_Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
_TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
_TokenKey: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
_Bias: TypeAlias = Annotated[float, Field(ge=-100, le=100)]
ExtraArguments: TypeAlias = Annotated[dict[str, Any], AfterValidator(_of_client)]
_Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
CacheSalt: TypeAlias = Annotated[str, StringConstraints(min_length=1, max_length=1024, pattern=r"^[^@/\\\x00]+$")]


REQUEST_ID_PATTERN = r"^[!-~]{1,128}$"
"""A client's own id of a request, as it may stand in a header and in a log line."""


@dataclass(frozen=True)
class Envelope:
    """Facts about a request that do not come from its parameters."""

    owner: str = ""
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    """The headers of W3C Trace Context, names in lower case."""
    body: bytes | None = b""
    """The raw body, secrets included; empty if it is not known, None if it is not one of the Responses API."""
    is_recorded: bool = False
    """True if the headers ask for a recording."""
    request_id: str = ""
    """The client's own id of the request, from the headers or the body."""
    session: str = ""
    """The client's own id of its session, from the headers."""
    agent_session: str = ""
    """The id of its session that a coding agent sends in a header of its own."""
    key_name: str = ""
    """The name of the API key for people."""
    team: str = ""
    """The team of the API key."""
    api: str = ""
    """The name of the dialect in which the request came."""
    line: str = ""
    """The id of the line of a batch that the request is; empty if it is none."""
    generates: bool = True
    """False if the response is only prepared: it has no output."""
    continued: History | None = None
    """The history of ``previous_response_id``, if the edge holds it; else it comes from the store."""
    moves: bool = False
    """True if the request can be passed on to the server that has its container."""
    forgives: bool = False
    """True if a thought that was sealed here and cannot be opened is left out, rather than refused."""


_NO_ENVELOPE = Envelope()

TRACE_HEADER_CHARACTERS = 512
"""The most characters of a header of W3C Trace Context that its specification has others send on."""


def trace_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers of W3C Trace Context among ``headers``, names in lower case.

    A value that no tracer would write is left out, as it could not be sent on.
    """
    return {
        name.lower(): value
        for name, value in headers.items()
        if name.lower() in ("traceparent", "tracestate") and value.isascii() and len(value) <= TRACE_HEADER_CHARACTERS
    }


_Input: TypeAlias = TextOr[str, InputItems]


LOGPROBS = "message.output_text.logprobs"
"""The value of ``include`` that asks for log probabilities."""

SOURCES = "web_search_call.action.sources"
"""The value of ``include`` that asks for the pages that a search has found."""

WEB_RESULTS = "web_search_call.results"
"""The value of ``include`` that asks for the same with titles and snippets."""

OUTPUTS = "code_interpreter_call.outputs"
"""The value of ``include`` that asks for what code has written."""


RESULTS = "file_search_call.results"
"""The value of ``include`` that asks for what a file search has found."""


class Generating(Body):
    """The parameters that a request has by the same names in several APIs: who asks, and how to generate."""

    model: str | None = None
    stream: bool | None = None
    """Send the answer as events while the model writes it."""
    store: bool | None = None
    """Keep the answer, to be read and continued later."""
    metadata: Metadata | None = None
    """Up to 16 texts by name, which the answer repeats."""
    parallel_tool_calls: bool | None = None
    """Let the model make several calls in one turn."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """The randomness of the choice of each token: with 0, the likeliest one."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Choose among the likeliest tokens that together have this probability."""
    user: Annotated[str, StringConstraints(max_length=1024)] | None = None
    """The client's name for its user, which the answer repeats."""
    safety_identifier: Annotated[str, StringConstraints(max_length=128)] | None = None
    """The client's stable name for its user, which the answer repeats."""
    prompt_cache_key: Annotated[str, StringConstraints(max_length=64)] | None = None
    """The client's name for a prefix, which the answer repeats; it may salt the prefix cache."""
    prompt_cache_options: PromptCacheOptions | None = None
    """Accepted: the engine caches prefixes by itself."""
    prompt_cache_retention: PromptCacheRetention | None = None
    """The time for prefixes to stay in the cache; the answer repeats it, and it changes nothing."""
    service_tier: ServiceTier | None = None
    """Accepted: the answer names the only tier, ``default``."""

    moderation: Refused = None
    media_io_kwargs: Refused = None
    mm_processor_kwargs: Refused = None
    kv_transfer_params: Refused = None
    ec_transfer_params: Refused = None
    repetition_detection: Refused = None

    # ``normalize`` refuses these unless they have vLLM's default
    skip_special_tokens: bool | None = None
    """Only true, except in Completions, where false keeps special tokens in the text."""
    spaces_between_special_tokens: bool | None = None
    """Only true: no text here has special tokens with other spaces."""
    include_stop_str_in_output: bool | None = None
    """Only false: a stop text is cut off."""

    # vLLM's extensions
    ignore_eos: bool | None = None
    top_k: Annotated[_Int64, Field(ge=-1)] | None = None
    """Choose among this many of the likeliest tokens; 0 or -1 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Leave out tokens whose share of the likeliest one's probability is less."""
    presence_penalty: _Penalty | None = None
    """Make tokens that the output has already less likely, once for each."""
    frequency_penalty: _Penalty | None = None
    """Make tokens less likely by how often the output has them."""
    repetition_penalty: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Divide the scores of tokens that prompt or output have; more than 1 avoids them."""
    seed: _Int64 | None = None
    """A number that makes sampling repeatable."""
    stop: TextOr[StopText, Annotated[list[StopText], Field(fail_fast=True, max_length=4)]] | None = None
    """Up to 4 texts, each of which ends the answer and is cut off."""
    stop_token_ids: Annotated[list[_TokenId], Field(fail_fast=True, max_length=MOST_STOP_IDS)] | None = None
    """Tokens that end the output."""
    min_tokens: Annotated[_Int64, Field(ge=0)] | None = None
    """The number of tokens before which nothing ends the output."""
    bad_words: Annotated[list[StopText], Field(fail_fast=True, max_length=MOST_BAD_WORDS)] | None = None
    """Texts that the output must not have."""
    logit_bias: Annotated[dict[_TokenKey, _Bias], at_most(MOST_TOKEN_IDS, "token ids")] | None = None
    """Numbers to add to the scores of tokens, by token id."""
    allowed_token_ids: (
        Annotated[list[_TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_TOKEN_IDS)] | None
    ) = None
    """The only tokens that the output may have."""
    logprob_token_ids: (
        Annotated[list[_TokenId], Field(fail_fast=True, min_length=1, max_length=MOST_LOGPROB_IDS)] | None
    ) = None
    watermarking: bool | None = None
    """Mark the output, if the engine can."""
    vllm_xargs: ExtraArguments | None = None
    """Arguments for extensions of the engine."""
    thinking_token_budget: Annotated[_Int64, Field(ge=-1)] | None = None
    """The most tokens of a thought, at which the engine ends it; -1 bounds nothing, as in vLLM."""
    include_reasoning: bool | None = None
    cache_salt: CacheSalt | None = None
    """A text that keeps the cached prefixes of this request apart from those of others."""
    priority: _Int64 | None = None
    """The place in the engine's queue: lower numbers run first."""
    chat_template: str | None = None
    """A chat template for this request, if the operator trusts those of requests."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the model's chat template."""
    structured_outputs: StructuredOutputs | None = None
    request_id: Annotated[str, StringConstraints(pattern=REQUEST_ID_PATTERN)] | None = None
    session_id: str | None = None
    return_token_ids: bool | None = None
    """Return the ids of the tokens of the prompt and of the answer."""
    return_weight_versions: bool | None = None
    """Return the versions of the weights that wrote the answer, if the engine names them."""
    mm_payload: Literal["tensors", "none"] | None = None
    """Changes nothing: only the engine sees what becomes of images."""
    return_mm_kwargs: bool | None = None
    """Changes nothing: only the engine sees what becomes of images."""

    @property
    def given(self) -> dict[str, Any]:
        """The shared parameters that the client sent, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set & Generating.model_fields.keys()}


class CreateResponse(Generating):
    """A request for one response.  A parameter that is not given is None."""

    foreign = OF_CHATS
    required = "input"
    framing = frozenset({"type", "stream_id", "generate"})

    input: _Input | None = None
    instructions: str | None = None
    """Instructions for the model, which hold for this response alone."""
    previous_response_id: str | None = None
    stream_options: StreamOptions | None = None
    """``include_obfuscation`` adds random characters to each delta, which hide its length."""
    tools: Annotated[list[ToolParam], FAIL_FAST] | None = None
    tool_choice: ToolChoice | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """The number of likeliest tokens at each place of messages, up to 20."""
    reasoning: ReasoningOptionsParam | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=100)] | None = None
    background: bool | None = None
    conversation: TextOr[str, ConversationReferenceParam] | None = None

    background_options: BackgroundOptions | None = None
    """Accepted: each response runs as soon as it can."""
    context_management: Annotated[list[ContextManagement], Field(fail_fast=True, max_length=1)] | None = None

    prompt: PromptParam | None = None
    access_programs: Refused = None
    multi_agent: Annotated[Any, only({"enabled": False})] = None
    """Only ``{"enabled": false}``: one model answers."""
    image: Refused = None

    # vLLM's extensions
    enable_response_messages: bool | None = None
    previous_input_messages: RawMessages | None = None

    _envelope: Envelope = PrivateAttr(default_factory=lambda: _NO_ENVELOPE)  # a default would be copied each time
    _raw_prompt: RawPrompt | None = PrivateAttr(default=None)

    def replaced(self, changes: Mapping[str, Any]) -> Self:
        """Return a copy with other parameters, each validated; raise `TypeError` for one that does not exist."""
        if "envelope" in changes:
            raise TypeError("the envelope is not a parameter: request.inside(envelope) returns a copy in another one")
        check_names("parameter", changes, type(self).model_fields)
        valid = type(self).model_validate(changes)
        return self.model_copy(update={name: getattr(valid, name) for name in changes})

    def inside(self, envelope: Envelope) -> Self:
        """Return a copy in this envelope."""
        copy = self.model_copy()
        copy._envelope = envelope  # noqa: SLF001 - its own
        return copy

    @property
    def envelope(self) -> Envelope:
        """The facts about the request that its body cannot set."""
        envelope: Envelope = self._private("_envelope", _NO_ENVELOPE)
        return envelope

    def continuing(self, prompt: RawPrompt) -> Self:
        """Return a copy that asks for the continuation of a prompt, in place of an answer to ``input``."""
        copy = self.model_copy()
        copy._raw_prompt = prompt  # noqa: SLF001 - its own
        return copy

    @property
    def raw_prompt(self) -> RawPrompt | None:
        """The prompt to continue, which no parameter of this API can set; None for a conversation."""
        prompt: RawPrompt | None = self._private("_raw_prompt", None)
        return prompt

    def _private(self, name: str, default: Any) -> Any:
        """Return what pydantic keeps beside the fields: as an attribute it takes ten times as long to read."""
        return (self.__pydantic_private__ or {}).get(name, default)

    @property
    def conversation_id(self) -> str | None:
        """The id of the conversation to add the response to, or None."""
        return self.conversation.id if isinstance(self.conversation, ConversationReferenceParam) else self.conversation

    @property
    def input_items(self) -> Sequence[InputItem]:
        """The items of ``input``; a plain string is a user message."""
        return [message("user", self.input)] if isinstance(self.input, str) else self.input or ()


class SteerResponse(Body):
    """New input for a response that runs, or for the response that continues it; other keys are refused."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["response.steer"]
    previous_response_id: str
    input: TextOr[str, SteeringMessages]


class CompactConversation(Body):
    """A request for the compaction of a conversation."""

    foreign = OF_CHATS
    required = "input"

    model: str
    """The name of the model that writes the summary."""
    input: _Input | None = None
    """The conversation, as a text or as items."""
    instructions: str | None = None
    """Instructions that the model had; the summary does not repeat them."""
    previous_response_id: str | None = None
    """The stored response whose conversation is compacted, too."""
    prompt_cache_key: Annotated[str, StringConstraints(max_length=64)] | None = None
    """Salts the prefix cache, if the operator has it so."""
    prompt_cache_options: PromptCacheOptions | None = None
    """Accepted: the engine caches prefixes by itself."""
    prompt_cache_retention: PromptCacheRetention | None = None
    """Accepted: the engine caches prefixes by itself."""
    service_tier: ServiceTier | None = None
    """Accepted: there is one tier."""
    image: Refused = None

    @property
    def create_request(self) -> CreateResponse:
        """The request for a response that is the compaction alone, and is not stored."""
        given = {name: getattr(self, name) for name in self.model_fields_set if name in type(self).model_fields}
        request = NOTHING_ASKED.model_copy(update=given)
        trigger = CompactionTriggerItem()
        return request.model_copy(update={"input": [*request.input_items, trigger], "store": False})


NOTHING_ASKED: Final = CreateResponse()
"""A request without parameters, of which a dialect makes its own: a copy takes a fifth of the time."""
