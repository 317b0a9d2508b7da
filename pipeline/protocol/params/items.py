"""Input items in a request body.

Clients send back the items that they kept of a response, sometimes without ids or statuses, so few fields are required.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from penstock.pipeline.protocol.items import ImageDetail, ItemStatus, Phase, Role
from penstock.pipeline.protocol.params import common
from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, CallId, Echoed, Name, TextOr
from penstock.pipeline.protocol.params.tools import ToolParam

_Text: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]

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
_MessageContent: TypeAlias = TextOr[str, Annotated[list[MessagePart], FAIL_FAST]]
_CallOutput: TypeAlias = TextOr[str, Annotated[list[OutputPart], FAIL_FAST]]

# Items


class _InputItem(Body):
    id: str | None = None
    status: ItemStatus | None = None


class MessageItem(_InputItem):
    type: Literal["message"] | None = None
    role: Role
    content: _MessageContent
    phase: Phase | None = None

    @property
    def text(self) -> str:
        """All of its text, without its images and files."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, InputTextPart | OutputTextPart))


class SteeringMessage(_InputItem):
    """A message of the user to a response that runs."""

    type: Literal["message"] | None = None
    role: Literal["user"]
    content: _CallOutput

    @property
    def as_item(self) -> MessageItem:
        """The message as an item of an input."""
        content: str | list[MessagePart] = self.content if isinstance(self.content, str) else [*self.content]
        return MessageItem(id=self.id, status=self.status, role=self.role, content=content)


class ReasoningItem(_InputItem):
    type: Literal["reasoning"]
    summary: Annotated[list[SummaryTextPart], FAIL_FAST] | None = None
    content: Annotated[list[ReasoningTextPart], FAIL_FAST] | None = None
    encrypted_content: str | None = None


class _CallItem(_InputItem):
    call_id: CallId
    name: _Text
    namespace: Name | None = None


class FunctionCallItem(_CallItem):
    type: Literal["function_call"]
    arguments: str
    is_async: bool | None = Field(default=None, alias="async")


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


class _TypedCallItem(Body):
    """A call with an item type of its own, or its output."""

    id: str | None = None
    status: (
        Literal["in_progress", "completed", "incomplete", "failed", "searching", "interpreting", "calling"] | None
    ) = None


class _ClientCallItem(_TypedCallItem):
    call_id: CallId


# Calls that the client runs


class LocalShellAction(Body):
    command: Annotated[list[str], FAIL_FAST]
    env: dict[str, str] | None = None
    timeout_ms: _Count | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(_ClientCallItem):
    type: Literal["local_shell_call"]
    action: LocalShellAction


class LocalShellCallOutputItem(_ClientCallItem):
    """The output of a local shell call.

    The API puts the ``call_id`` of the call in ``id``; some clients put it in ``call_id``.
    """

    type: Literal["local_shell_call_output"]
    output: str

    @model_validator(mode="before")
    @classmethod
    def _named_once(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("call_id") is None and "id" in value:
            return {**value, "call_id": value["id"]}
        return value


class ShellAction(Body):
    commands: Annotated[list[str], FAIL_FAST]
    timeout_ms: _Count | None = None
    max_output_length: _Count | None = None


class ShellEnvironment(Body):
    type: str
    container_id: str | None = None


class ShellCallItem(_ClientCallItem):
    type: Literal["shell_call"]
    action: ShellAction
    environment: ShellEnvironment | None = None


class ShellOutcome(Body):
    type: Literal["exit", "timeout"]
    exit_code: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None


class ShellOutput(Body):
    outcome: ShellOutcome
    stdout: str | None = None
    stderr: str | None = None


class ShellCallOutputItem(_ClientCallItem):
    type: Literal["shell_call_output"]
    output: Annotated[list[ShellOutput], FAIL_FAST]
    max_output_length: _Count | None = None


class PatchOperation(Body):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCallItem(_ClientCallItem):
    type: Literal["apply_patch_call"]
    operation: PatchOperation


class ApplyPatchCallOutputItem(_ClientCallItem):
    type: Literal["apply_patch_call_output"]
    output: str | None = None


# Calls that a server runs


class ListedToolPart(Body):
    name: _Text
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None


_Error: TypeAlias = TextOr[str, dict[str, Any]]


class McpListToolsItem(_TypedCallItem):
    type: Literal["mcp_list_tools"]
    server_label: _Text
    tools: Annotated[list[ListedToolPart], FAIL_FAST] | None = None
    error: _Error | None = None


class _McpCallItem(_TypedCallItem):
    server_label: _Text
    name: _Text
    arguments: str


class McpCallItem(_McpCallItem):
    type: Literal["mcp_call"]
    output: str | None = None
    error: _Error | None = None
    approval_request_id: str | None = None


class McpApprovalRequestItem(_McpCallItem):
    type: Literal["mcp_approval_request"]


class McpApprovalResponseItem(_TypedCallItem):
    type: Literal["mcp_approval_response"]
    approval_request_id: _Text
    approve: bool
    reason: str | None = None


class CodeOutput(Body):
    type: Literal["logs", "image"]
    logs: str | None = None
    url: str | None = None


class CodeInterpreterCallItem(_TypedCallItem):
    type: Literal["code_interpreter_call"]
    code: str | None = None
    container_id: str | None = None
    outputs: Annotated[list[CodeOutput], FAIL_FAST] | None = None


class WebAction(Echoed):
    """An action of the browser, of any type; only the known fields are validated."""

    type: str | None = None
    query: str | None = None
    queries: Annotated[list[str], FAIL_FAST] | None = None
    url: str | None = None
    pattern: str | None = None


class WebSearchCallItem(_TypedCallItem):
    type: Literal["web_search_call"]
    action: WebAction | None = None


# Other items


class ItemReference(Body):
    """A reference to a stored item by its id."""

    type: Literal["item_reference"] | None = None
    id: str


class AdditionalToolsItem(Body):
    """More tools, available from this point of the conversation on."""

    type: Literal["additional_tools"]
    id: str | None = None
    role: Literal["developer"]
    tools: Annotated[list[ToolParam], FAIL_FAST]


class CompactionItem(Body):
    """The summary of what came before it, as this server sealed it."""

    type: Literal["compaction"]
    id: str | None = None
    encrypted_content: str


class CompactionTriggerItem(Body):
    """The wish to have the conversation compacted instead of answered; the last item of an input."""

    type: Literal["compaction_trigger"]
    id: str | None = None


ClientCallItem: TypeAlias = (
    LocalShellCallItem
    | LocalShellCallOutputItem
    | ShellCallItem
    | ShellCallOutputItem
    | ApplyPatchCallItem
    | ApplyPatchCallOutputItem
)
ServerCallItem: TypeAlias = (
    McpListToolsItem
    | McpCallItem
    | McpApprovalRequestItem
    | McpApprovalResponseItem
    | CodeInterpreterCallItem
    | WebSearchCallItem
)


def _item_tag(value: Any) -> Any:
    """Return the type of an item; an item without one is a message, or a reference if it has only an id."""
    if item_type := common.type_of(value):
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
    | Annotated[LocalShellCallItem, Tag("local_shell_call")]
    | Annotated[LocalShellCallOutputItem, Tag("local_shell_call_output")]
    | Annotated[ShellCallItem, Tag("shell_call")]
    | Annotated[ShellCallOutputItem, Tag("shell_call_output")]
    | Annotated[ApplyPatchCallItem, Tag("apply_patch_call")]
    | Annotated[ApplyPatchCallOutputItem, Tag("apply_patch_call_output")]
    | Annotated[McpListToolsItem, Tag("mcp_list_tools")]
    | Annotated[McpCallItem, Tag("mcp_call")]
    | Annotated[McpApprovalRequestItem, Tag("mcp_approval_request")]
    | Annotated[McpApprovalResponseItem, Tag("mcp_approval_response")]
    | Annotated[CodeInterpreterCallItem, Tag("code_interpreter_call")]
    | Annotated[WebSearchCallItem, Tag("web_search_call")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[AdditionalToolsItem, Tag("additional_tools")]
    | Annotated[CompactionItem, Tag("compaction")]
    | Annotated[CompactionTriggerItem, Tag("compaction_trigger")],
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


class RawFunction(Body):
    name: str
    arguments: str


class RawToolCall(Body):
    """A call in a message of the Chat Completions API."""

    id: CallId
    function: RawFunction


class RawMessage(Body):
    """A message as openai_harmony writes it; its author is an object, or split into ``role`` and ``name``.

    ``reasoning``, ``tool_calls`` and ``tool_call_id`` are those of messages of the Chat Completions API.
    """

    author: RawAuthor | None = None
    role: _RawRole | None = None
    name: str | None = None
    content: TextOr[str, Annotated[list[RawPart], FAIL_FAST]] | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[RawToolCall], FAIL_FAST] | None = None
    tool_call_id: str | None = None
