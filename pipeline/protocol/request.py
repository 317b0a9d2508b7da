"""The body of ``POST /v1/responses``, as openai-python 3.52's ``responses.create`` writes it.

Unknown keys are ignored, because clients send some of their own; known keys with bad values are refused with the path
of the value.  What is understood here but not implemented by a server is for the ``normalize`` stage to refuse.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
)
from pydantic_core import PydanticCustomError

from pipeline.protocol.items import ItemStatus, Phase, Role
from pipeline.protocol.response import Effort


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


def _type_of(value: Any) -> str | None:
    return value.get("type") if isinstance(value, dict) else getattr(value, "type", None)


def _item_tag(value: Any) -> str:
    return _type_of(value) or "message"


def _text_or_list(value: Any) -> str:
    return "as_text" if isinstance(value, str) else "as_list"


def _text_or_object(value: Any) -> str:
    return "as_text" if isinstance(value, str) else "as_object"


_FAIL_FAST: Any = Field(fail_fast=True)
"""One mistake is told, so one is looked for."""

# Content parts


class InputTextPart(_Body):
    type: Literal["input_text"]
    text: str


class OutputTextPart(_Body):
    type: Literal["output_text"]
    text: str


class RefusalPart(_Body):
    type: Literal["refusal"]
    refusal: str


class ReasoningTextPart(_Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryTextPart(_Body):
    type: Literal["summary_text"]
    text: str


class ImagePart(_Body):
    type: Literal["input_image"]


class FilePart(_Body):
    type: Literal["input_file"]


MessagePart: TypeAlias = Annotated[
    InputTextPart | OutputTextPart | RefusalPart | ImagePart | FilePart, Field(discriminator="type")
]
OutputPart: TypeAlias = Annotated[InputTextPart | ImagePart | FilePart, Field(discriminator="type")]
_MessageContent: TypeAlias = Annotated[
    Annotated[str, Tag("as_text")] | Annotated[list[MessagePart], _FAIL_FAST, Tag("as_list")],
    Discriminator(_text_or_list),
]
_CallOutput: TypeAlias = Annotated[
    Annotated[str, Tag("as_text")] | Annotated[list[OutputPart], _FAIL_FAST, Tag("as_list")],
    Discriminator(_text_or_list),
]

# Items


class _InputItem(_Body):
    id: str | None = None
    status: ItemStatus | None = None


class MessageItem(_InputItem):
    type: Literal["message"] | None = None
    role: Role
    content: _MessageContent
    phase: Phase | None = None


class ReasoningItem(_InputItem):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryTextPart], _FAIL_FAST] | None = None
    content: Annotated[list[ReasoningTextPart], _FAIL_FAST] | None = None
    encrypted_content: str | None = None


class FunctionCallItem(_InputItem):
    type: Literal["function_call"]
    call_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    name: Annotated[str, StringConstraints(min_length=1)]
    arguments: str


class FunctionCallOutputItem(_InputItem):
    type: Literal["function_call_output"]
    call_id: Annotated[str, StringConstraints(min_length=1, max_length=64)]
    output: _CallOutput


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")],
    Discriminator(_item_tag),
]

# Options


class FunctionTool(_Body):
    type: Literal["function"]
    name: Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class OtherTool(_Body):
    """A tool of another type: its fields are not read."""

    type: str


Tool: TypeAlias = Annotated[
    Annotated[FunctionTool, Tag("function_tool")] | Annotated[OtherTool, Tag("other_tool")],
    Discriminator(lambda value: "function_tool" if _type_of(value) == "function" else "other_tool"),
]


class ReasoningOptions(_Body):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(_Body):
    type: Literal["text", "json_schema", "json_object"]


class TextOptions(_Body):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(_Body):
    include_obfuscation: bool | None = None


_ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], Tag("as_text")] | Annotated[dict[str, Any], Tag("as_object")],
    Discriminator(_text_or_object),
]


def _few(value: Any) -> Any:
    """Refuse many keys before each of them is looked at."""
    if isinstance(value, dict) and len(value) > 16:
        raise PydanticCustomError("too_long", "Metadata has at most 16 keys")
    return value


_MetadataKey: TypeAlias = Annotated[str, StringConstraints(max_length=64)]
_MetadataValue: TypeAlias = Annotated[str, StringConstraints(max_length=512)]


class CreateResponse(_Body):
    """A request for one response.  None means: not said."""

    model: str | None = None
    input: (
        Annotated[
            Annotated[str, Tag("as_text")] | Annotated[list[InputItem], _FAIL_FAST, Tag("as_list")],
            Discriminator(_text_or_list),
        ]
        | None
    ) = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: Annotated[dict[_MetadataKey, _MetadataValue], BeforeValidator(_few)] | None = None
    tools: Annotated[list[Tool], _FAIL_FAST] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=16)] | None = None
    max_tool_calls: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Field(fail_fast=True, max_length=100)] | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
