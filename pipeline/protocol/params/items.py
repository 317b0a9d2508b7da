"""Input items in a request body."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, Tag

from penstock.pipeline.protocol.items import ImageDetail, ItemStatus, Phase, Role
from penstock.pipeline.protocol.params import calls
from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, CallId, Name, text_or_list, type_of
from penstock.pipeline.protocol.params.tools import Tool

# Content parts


class InputTextPart(Body):
    type: Literal["input_text"]
    text: str


class OutputTextPart(Body):
    type: Literal["output_text"]
    text: str


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


class ReasoningTextPart(Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryTextPart(Body):
    type: Literal["summary_text"]
    text: str


class ImagePart(Body):
    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: ImageDetail | None = None


class FilePart(Body):
    type: Literal["input_file"]


MessagePart: TypeAlias = Annotated[
    InputTextPart | OutputTextPart | RefusalPart | ImagePart | FilePart, Field(discriminator="type")
]
OutputPart: TypeAlias = Annotated[InputTextPart | ImagePart | FilePart, Field(discriminator="type")]
_MessageContent: TypeAlias = Annotated[
    Annotated[str, Tag("as_text")] | Annotated[list[MessagePart], FAIL_FAST, Tag("as_list")],
    Discriminator(text_or_list),
]
_CallOutput: TypeAlias = Annotated[
    Annotated[str, Tag("as_text")] | Annotated[list[OutputPart], FAIL_FAST, Tag("as_list")],
    Discriminator(text_or_list),
]

# Items


class _InputItem(Body):
    id: str | None = None
    status: ItemStatus | None = None


class MessageItem(_InputItem):
    type: Literal["message"] | None = None
    role: Role
    content: _MessageContent
    phase: Phase | None = None


class ReasoningItem(_InputItem):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryTextPart], FAIL_FAST] | None = None
    content: Annotated[list[ReasoningTextPart], FAIL_FAST] | None = None
    encrypted_content: str | None = None


class _CallItem(_InputItem):
    call_id: CallId
    name: Annotated[str, StringConstraints(min_length=1)]
    namespace: Name | None = None


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    arguments: str


class CustomToolCallItem(_CallItem):
    type: Literal["custom_tool_call"]
    input: str


class _CallOutputItem(_InputItem):
    call_id: CallId
    output: _CallOutput


class FunctionCallOutputItem(_CallOutputItem):
    type: Literal["function_call_output"]


class CustomToolCallOutputItem(_CallOutputItem):
    type: Literal["custom_tool_call_output"]


class ItemReference(Body):
    """A reference to a stored item by its id."""

    type: Literal["item_reference"] | None = None
    id: str


class AdditionalToolsItem(Body):
    """More tools, available from this point of the conversation on."""

    type: Literal["additional_tools"]
    id: str | None = None
    role: Literal["developer"]
    tools: Annotated[list[Tool], FAIL_FAST]


def _item_tag(value: Any) -> Any:
    """Return the type of an item; an item without one is a message, or a reference if it has only an id."""
    if item_type := type_of(value):
        return item_type
    is_reference = isinstance(value, dict) and "id" in value and value.keys().isdisjoint(("role", "content"))
    return "item_reference" if is_reference or isinstance(value, ItemReference) else "message"


InputItem: TypeAlias = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionCallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CustomToolCallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[calls.LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[calls.LocalShellCallOutputItem, Tag("local_shell_call_output")]
    | Annotated[calls.ShellCallItem, Tag("shell_call")]
    | Annotated[calls.ShellCallOutputItem, Tag("shell_call_output")]
    | Annotated[calls.ApplyPatchCallItem, Tag("apply_patch_call")]
    | Annotated[calls.ApplyPatchCallOutputItem, Tag("apply_patch_call_output")]
    | Annotated[calls.McpListToolsItem, Tag("mcp_list_tools")]
    | Annotated[calls.McpCallItem, Tag("mcp_call")]
    | Annotated[calls.McpApprovalRequestItem, Tag("mcp_approval_request")]
    | Annotated[calls.McpApprovalResponseItem, Tag("mcp_approval_response")]
    | Annotated[calls.CodeInterpreterCallItem, Tag("code_interpreter_call")]
    | Annotated[calls.WebSearchCallItem, Tag("web_search_call")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")],
    Discriminator(_item_tag),
]

# Messages in Harmony's own format


class RawPart(Body):
    """Text, or the content of a system or developer message; ``instructions`` is the text of the latter."""

    type: Literal["text", "developer_content", "system_content"]
    text: str | None = None
    instructions: str | None = None


_RawRole: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class RawAuthor(Body):
    role: _RawRole
    name: str | None = None


class RawMessage(Body):
    """A message as openai_harmony writes it; its author is an object, or split into ``role`` and ``name``."""

    author: RawAuthor | None = None
    role: _RawRole | None = None
    name: str | None = None
    content: Annotated[
        Annotated[str, Tag("as_text")] | Annotated[list[RawPart], FAIL_FAST, Tag("as_list")],
        Discriminator(text_or_list),
    ]
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
