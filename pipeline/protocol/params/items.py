"""Input items in a request body, and the items of a conversation that they become.

Clients send back the items that they kept of a response, sometimes without ids or statuses, with nulls, or with text in
place of parts, so few fields are required.  A request may have thousands of items, so msgspec reads them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType
from pydantic import ConfigDict, Field

from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.items import (
    CallStatus,
    FileDetail,
    ImageDetail,
    InputText,
    ItemStatus,
    Phase,
    Refusal,
    Role,
)
from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, Echoed
from penstock.pipeline.protocol.params.structs import ListOf, schemas
from penstock.pipeline.protocol.params.tools import AnyTool, JsonSchemaFormat, TextFormat
from penstock.pipeline.protocol.response import Effort

Value = TypeVar("Value")

_Text: TypeAlias = Annotated[str, Meta(min_length=1)]
_CallId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
_Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Integer: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class _Object(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object in a body: types are strict, and keys that the API does not have are ignored."""

    @property
    def fields(self) -> dict[str, Any]:
        """The known fields that the client sent, without nulls."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return fields


# Content parts


class OutputTextPart(_Object, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str


class ReasoningTextPart(_Object, frozen=True, kw_only=True):
    type: Literal["reasoning_text"]
    text: str


class SummaryTextPart(_Object, frozen=True, kw_only=True):
    type: Literal["summary_text"]
    text: str


class ImagePart(_Object, frozen=True, kw_only=True, tag_field="type", tag="input_image"):
    image_url: str | None = None
    file_id: str | None = None
    detail: ImageDetail | None = None


class FilePart(_Object, frozen=True, kw_only=True, tag_field="type", tag="input_file"):
    filename: str | None = None
    file_data: str | None = None
    file_url: str | None = None
    file_id: str | None = None
    detail: FileDetail | None = None


class AudioPart(_Object, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    """A recording, which no model here hears."""


OutputPart: TypeAlias = InputText | ImagePart | FilePart | AudioPart
MessagePart: TypeAlias = InputText | OutputTextPart | Refusal | ImagePart | FilePart | AudioPart

# Items


class _Typed(_Object, frozen=True, kw_only=True, tag_field="type"):
    @property
    def type(self) -> str:
        """The type of the item, as on the wire."""
        return str(self.__struct_config__.tag)


class _Item(_Typed, frozen=True, kw_only=True):
    id: str | None = None


class _InputItem(_Item, frozen=True, kw_only=True):
    status: ItemStatus | None = None


class MessageItem(_InputItem, frozen=True, kw_only=True, tag="message"):
    role: Role
    content: str | tuple[MessagePart, ...]
    phase: Phase | None = None

    @property
    def text(self) -> str:
        """All of its text, without its images and files."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content if isinstance(part, InputText | OutputTextPart))


class SteeringMessage(_InputItem, frozen=True, kw_only=True, tag="message"):
    """A message of the user to a response that runs."""

    role: Literal["user"]
    content: str | tuple[OutputPart, ...]

    @property
    def as_item(self) -> MessageItem:
        """The message as an item of an input."""
        return MessageItem(id=self.id, status=self.status, role=self.role, content=self.content)


class ReasoningItem(_InputItem, frozen=True, kw_only=True, tag="reasoning"):
    summary: tuple[SummaryTextPart, ...] | None = None
    content: tuple[ReasoningTextPart, ...] | None = None
    encrypted_content: str | None = None

    def as_item(self, item_id: str) -> wire.Reasoning:
        """Return the item of a conversation."""
        summary = tuple(wire.SummaryText(part.text) for part in self.summary or ())
        content = None if self.content is None else tuple(wire.ReasoningText(part.text) for part in self.content)
        sealed = _unset(self.encrypted_content)
        return wire.Reasoning(
            item_id, summary=summary, content=_unset(content), encrypted_content=sealed, status=_unset(self.status)
        )


class _CallItem(_InputItem, frozen=True, kw_only=True):
    call_id: _CallId
    name: _Text
    namespace: _Name | None = None


class FunctionCallItem(_CallItem, frozen=True, kw_only=True, tag="function_call"):
    arguments: str
    is_async: bool | None = msgspec.field(default=None, name="async")

    def as_item(self, item_id: str) -> wire.FunctionCall:
        """Return the item of a conversation."""
        status, is_async = self.status or "completed", True if self.is_async else UNSET
        return wire.FunctionCall(
            item_id,
            call_id=self.call_id,
            name=self.name,
            arguments=self.arguments,
            status=status,
            namespace=_unset(self.namespace),
            is_async=is_async,
        )


class CustomToolCallItem(_CallItem, frozen=True, kw_only=True, tag="custom_tool_call"):
    input: str

    def as_item(self, item_id: str) -> wire.CustomToolCall:
        """Return the item of a conversation."""
        return wire.CustomToolCall(
            item_id,
            call_id=self.call_id,
            name=self.name,
            input=self.input,
            status=self.status or "completed",
            namespace=_unset(self.namespace),
        )


class _CallOutputItem(_InputItem, frozen=True, kw_only=True):
    call_id: _CallId
    output: str | tuple[OutputPart, ...]


class FunctionCallOutputItem(_CallOutputItem, frozen=True, kw_only=True, tag="function_call_output"):
    pass


class CustomToolCallOutputItem(_CallOutputItem, frozen=True, kw_only=True, tag="custom_tool_call_output"):
    pass


class _TypedCallItem(_Item, frozen=True, kw_only=True):
    """A call with an item type of its own, or its output."""

    status: (
        Literal["in_progress", "completed", "incomplete", "failed", "searching", "interpreting", "calling"] | None
    ) = None

    @property
    def call_status(self) -> CallStatus:
        """The status for item types that have a ``failed``."""
        match self.status:
            case None:
                return "completed"
            case "searching" | "interpreting" | "calling":
                return "in_progress"
            case status:
                return status


# Calls that the client runs


class _ClientCallItem(_TypedCallItem, frozen=True, kw_only=True):
    call_id: _CallId

    @property
    def item_status(self) -> ItemStatus:
        """The status for item types that have no ``failed``: a failed call is completed."""
        status = self.call_status
        return "completed" if status == "failed" else status


class LocalShellAction(_Object, frozen=True, kw_only=True):
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: _Count | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(_ClientCallItem, frozen=True, kw_only=True, tag="local_shell_call"):
    action: LocalShellAction

    def as_item(self, item_id: str) -> wire.LocalShellCall:
        """Return the item of a conversation."""
        action = {"type": "exec", "env": {}} | self.action.fields
        return wire.LocalShellCall(item_id, self.call_id, action, self.item_status)


class LocalShellCallOutputItem(_ClientCallItem, frozen=True, kw_only=True, tag="local_shell_call_output"):
    """The output of a local shell call.

    The API puts the ``call_id`` of the call in ``id``; some clients put it in ``call_id``.
    """

    output: str

    def as_item(self, item_id: str) -> wire.LocalShellCallOutput:
        """Return the item of a conversation."""
        return wire.LocalShellCallOutput(item_id, self.output, self.item_status)


class ShellAction(_Object, frozen=True, kw_only=True):
    commands: list[str]
    timeout_ms: _Count | None = None
    max_output_length: _Count | None = None


class ShellEnvironment(_Object, frozen=True, kw_only=True):
    type: str
    container_id: str | None = None


class ShellCallItem(_ClientCallItem, frozen=True, kw_only=True, tag="shell_call"):
    action: ShellAction
    environment: ShellEnvironment | None = None

    def as_item(self, item_id: str) -> wire.ShellCall:
        """Return the item of a conversation."""
        environment = None if self.environment is None else self.environment.fields
        return wire.ShellCall(
            item_id, call_id=self.call_id, action=self.action.fields, status=self.item_status, environment=environment
        )


class ShellOutcome(_Object, frozen=True, kw_only=True):
    type: Literal["exit", "timeout"]
    exit_code: _Integer | None = None


class ShellCommandOutput(_Object, frozen=True, kw_only=True):
    outcome: ShellOutcome
    stdout: str | None = None
    stderr: str | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The output with all of its fields."""
        exit_code = {} if self.outcome.type == "timeout" else {"exit_code": self.outcome.exit_code or 0}
        outcome = {"type": self.outcome.type} | exit_code
        return {"stdout": self.stdout or "", "stderr": self.stderr or "", "outcome": outcome}


class ShellCallOutputItem(_ClientCallItem, frozen=True, kw_only=True, tag="shell_call_output"):
    output: tuple[ShellCommandOutput, ...]
    max_output_length: _Count | None = None

    def as_item(self, item_id: str) -> wire.ShellCallOutput:
        """Return the item of a conversation."""
        output = tuple(part.part for part in self.output)
        return wire.ShellCallOutput(
            item_id,
            call_id=self.call_id,
            output=output,
            status=self.item_status,
            max_output_length=self.max_output_length,
        )


class PatchOperation(_Object, frozen=True, kw_only=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCallItem(_ClientCallItem, frozen=True, kw_only=True, tag="apply_patch_call"):
    operation: PatchOperation

    def as_item(self, item_id: str) -> wire.ApplyPatchCall:
        """Return the item of a conversation."""
        return wire.ApplyPatchCall(item_id, self.call_id, self.operation.fields, self.item_status)


class ApplyPatchCallOutputItem(_ClientCallItem, frozen=True, kw_only=True, tag="apply_patch_call_output"):
    output: str | None = None

    def as_item(self, item_id: str) -> wire.ApplyPatchCallOutput:
        """Return the item of a conversation."""
        outcome: Literal["completed", "failed"] = "failed" if self.status == "failed" else "completed"
        return wire.ApplyPatchCallOutput(item_id, self.call_id, outcome, self.output)


class _ToolSearchItem(_TypedCallItem, frozen=True, kw_only=True):
    """A search for tools, or what it has found; those of OpenAI's own searches have no ``call_id``."""

    call_id: _CallId | None = None
    execution: Literal["server", "client"] | None = None

    @property
    def _found_by(self) -> tuple[str, Literal["server", "client"]]:
        """The id of the call, and who makes the search."""
        if self.call_id is None:
            return "call_tool_search", self.execution or "server"
        return self.call_id, self.execution or "client"

    @property
    def _item_status(self) -> ItemStatus:
        return "completed" if (status := self.call_status) == "failed" else status


class ToolSearchCallItem(_ToolSearchItem, frozen=True, kw_only=True, tag="tool_search_call"):
    arguments: Any = None

    def as_item(self, item_id: str) -> wire.ToolSearchCall:
        """Return the item of a conversation."""
        call_id, execution = self._found_by
        arguments = {} if self.arguments is None else self.arguments
        return wire.ToolSearchCall(
            item_id, call_id=call_id, arguments=arguments, status=self._item_status, execution=execution
        )


class ToolSearchOutputItem(_ToolSearchItem, frozen=True, kw_only=True, tag="tool_search_output"):
    tools: tuple[AnyTool, ...]

    def as_item(self, item_id: str) -> wire.ToolSearchOutput:
        """Return the item of a conversation."""
        call_id, execution = self._found_by
        tools = tuple(tool.root.without_secrets for tool in self.tools)
        return wire.ToolSearchOutput(
            item_id, call_id=call_id, tools=tools, status=self._item_status, execution=execution
        )


class SafetyCheck(_Object, frozen=True, kw_only=True):
    id: str
    code: str | None = None
    message: str | None = None


class ComputerCallItem(_ClientCallItem, frozen=True, kw_only=True, tag="computer_call"):
    action: dict[str, Any] | None = None
    actions: tuple[dict[str, Any], ...] | None = None
    pending_safety_checks: tuple[SafetyCheck, ...] | None = None

    def as_item(self, item_id: str) -> wire.ComputerCall:
        """Return the item of a conversation."""
        checks = tuple(check.fields for check in self.pending_safety_checks or ())
        action, actions = _unset(self.action), _unset(self.actions)
        return wire.ComputerCall(
            item_id,
            call_id=self.call_id,
            status=self.item_status,
            pending_safety_checks=checks,
            action=action,
            actions=actions,
        )


class ScreenshotPart(_Object, frozen=True, kw_only=True):
    type: Literal["computer_screenshot", "input_image"]
    image_url: str | None = None
    file_id: str | None = None


class ComputerCallOutputItem(_ClientCallItem, frozen=True, kw_only=True, tag="computer_call_output"):
    """The screen of a computer; the image is checked as that of any other part."""

    output: ScreenshotPart
    acknowledged_safety_checks: tuple[SafetyCheck, ...] | None = None


# Calls that a server runs


class ListedToolPart(_Object, frozen=True, kw_only=True):
    name: _Text
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None

    @property
    def tool(self) -> wire.ListedTool:
        """The tool with its schema."""
        return wire.ListedTool(self.name, self.input_schema or {}, self.description or UNSET, self.annotations or UNSET)


class McpListToolsItem(_TypedCallItem, frozen=True, kw_only=True, tag="mcp_list_tools"):
    server_label: _Text
    tools: tuple[ListedToolPart, ...] | None = None
    error: str | dict[str, Any] | None = None

    def as_item(self, item_id: str) -> wire.McpListTools:
        """Return the item of a conversation."""
        error = self.error if isinstance(self.error, str | None) else msgspec.json.encode(self.error).decode()
        tools = tuple(part.tool for part in self.tools or ())
        return wire.McpListTools(item_id, self.server_label, tools, error or UNSET)


class _McpCallItem(_TypedCallItem, frozen=True, kw_only=True):
    server_label: _Text
    name: _Text
    arguments: str


class McpCallItem(_McpCallItem, frozen=True, kw_only=True, tag="mcp_call"):
    output: str | None = None
    error: str | dict[str, Any] | None = None
    approval_request_id: str | None = None

    def as_item(self, item_id: str) -> wire.McpCall:
        """Return the item of a conversation."""
        error = self.error or None
        if isinstance(error, str):
            error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
        status = "failed" if error is not None and self.status is None else self.call_status
        return wire.McpCall(
            item_id,
            server_label=self.server_label,
            name=self.name,
            arguments=self.arguments,
            status=status,
            output=self.output,
            error=error,
            approval_request_id=self.approval_request_id,
        )


class McpApprovalRequestItem(_McpCallItem, frozen=True, kw_only=True, tag="mcp_approval_request"):
    def as_item(self, item_id: str) -> wire.McpApprovalRequest:
        """Return the item of a conversation."""
        return wire.McpApprovalRequest(item_id, self.server_label, self.name, self.arguments)


class McpApprovalResponseItem(_TypedCallItem, frozen=True, kw_only=True, tag="mcp_approval_response"):
    approval_request_id: _Text
    approve: bool
    reason: str | None = None

    def as_item(self, item_id: str) -> wire.McpApprovalResponse:
        """Return the item of a conversation."""
        return wire.McpApprovalResponse(item_id, self.approval_request_id, self.approve, self.reason)


class CodeOutput(_Object, frozen=True, kw_only=True):
    type: Literal["logs", "image"]
    logs: str | None = None
    url: str | None = None

    @property
    def part(self) -> dict[str, Any]:
        """The output with all of its fields."""
        return (
            {"type": "logs", "logs": self.logs or ""}
            if self.type == "logs"
            else {"type": "image", "url": self.url or ""}
        )


class CodeInterpreterCallItem(_TypedCallItem, frozen=True, kw_only=True, tag="code_interpreter_call"):
    code: str | None = None
    container_id: str | None = None
    outputs: tuple[CodeOutput, ...] | None = None

    def as_item(self, item_id: str) -> wire.CodeInterpreterCall:
        """Return the item of a conversation."""
        outputs = None if self.outputs is None else tuple(part.part for part in self.outputs)
        code, container = self.code or "", self.container_id or ""
        return wire.CodeInterpreterCall(
            item_id, code=code, container_id=container, status=self.call_status, outputs=outputs
        )


class WebAction(Echoed):
    """An action of the browser, of any type; only the known fields are validated."""

    type: str | None = None
    query: str | None = None
    queries: Annotated[list[str], FAIL_FAST] | None = None
    url: str | None = None
    pattern: str | None = None


class WebSearchCallItem(_TypedCallItem, frozen=True, kw_only=True, tag="web_search_call"):
    action: WebAction | None = None

    def as_item(self, item_id: str) -> wire.WebSearchCall:
        """Return the item of a conversation."""
        sent = self.action.sent if self.action else {}
        action = {"type": "search"} | {key: value for key, value in sent.items() if value is not None}
        return wire.WebSearchCall(item_id, self.call_status, action)


class FileSearchCallItem(_TypedCallItem, frozen=True, kw_only=True, tag="file_search_call"):
    queries: tuple[str, ...] = ()
    results: tuple[dict[str, Any], ...] | None = None

    def as_item(self, item_id: str) -> wire.FileSearchCall:
        """Return the item of a conversation."""
        return wire.FileSearchCall(item_id, self.queries, self.call_status, self.results)


# Calls of tools that only other servers have


class ImageGenerationCallItem(_Item, frozen=True, kw_only=True, tag="image_generation_call"):
    status: Literal["in_progress", "completed", "generating", "failed"] | None = None
    result: str | None = None

    def as_item(self, item_id: str) -> wire.ImageGenerationCall:
        """Return the item of a conversation."""
        return wire.ImageGenerationCall(item_id, self.status or "completed", self.result)


class ProgramItem(_Item, frozen=True, kw_only=True, tag="program"):
    call_id: _CallId
    code: str
    fingerprint: str

    def as_item(self, item_id: str) -> wire.Program:
        """Return the item of a conversation."""
        return wire.Program(item_id, self.call_id, self.code, self.fingerprint)


class ProgramOutputItem(_Item, frozen=True, kw_only=True, tag="program_output"):
    call_id: _CallId
    result: str
    status: Literal["completed", "incomplete"] | None = None

    def as_item(self, item_id: str) -> wire.ProgramOutput:
        """Return the item of a conversation."""
        return wire.ProgramOutput(item_id, self.call_id, self.result, self.status or "completed")


# Other items


class ItemReference(_Typed, frozen=True, kw_only=True, tag="item_reference"):
    """A reference to a stored item by its id."""

    id: str


class AdditionalToolsItem(_Item, frozen=True, kw_only=True, tag="additional_tools"):
    """More tools, available from this point of the conversation on."""

    role: Literal["developer"]
    tools: tuple[AnyTool, ...]

    def as_item(self, item_id: str) -> wire.AdditionalTools:
        """Return the item of a conversation."""
        return wire.AdditionalTools(item_id, self.role, tuple(tool.root.without_secrets for tool in self.tools))


class _Update(Body):
    """A part of an update: other keys than the declared ones are refused."""

    model_config = ConfigDict(extra="forbid")


class EffortUpdate(_Update):
    """A new effort; null is that of the model."""

    effort: Effort | None = None


class FormatUpdate(_Update):
    """A new format of the answer."""

    format: Annotated[TextFormat | JsonSchemaFormat, Field(discriminator="type")]


class ConfigurationUpdateItem(_Item, frozen=True, kw_only=True, tag="configuration_update", forbid_unknown_fields=True):
    """New values of parameters, from this point of the conversation on."""

    reasoning: EffortUpdate | None = None
    text: FormatUpdate | None = None

    def as_item(self, item_id: str) -> wire.ConfigurationUpdate:
        """Return the item of a conversation."""
        effort = self.reasoning.model_dump(exclude_unset=True) if self.reasoning else UNSET
        text = self.text.model_dump(by_alias=True, exclude_unset=True) if self.text else UNSET
        return wire.ConfigurationUpdate(item_id, effort, text)


class CompactionItem(_Item, frozen=True, kw_only=True, tag="compaction"):
    """The summary of what came before it, as this server sealed it."""

    encrypted_content: str

    def as_item(self, item_id: str) -> wire.Compaction:
        """Return the item of a conversation."""
        return wire.Compaction(item_id, self.encrypted_content)


class CompactionTriggerItem(_Item, frozen=True, kw_only=True, tag="compaction_trigger"):
    """The wish to have the conversation compacted instead of answered; the last item of an input."""


PlainItem: TypeAlias = (
    ReasoningItem
    | FunctionCallItem
    | CustomToolCallItem
    | LocalShellCallItem
    | LocalShellCallOutputItem
    | ShellCallItem
    | ShellCallOutputItem
    | ApplyPatchCallItem
    | ApplyPatchCallOutputItem
    | ToolSearchCallItem
    | ToolSearchOutputItem
    | ComputerCallItem
    | McpListToolsItem
    | McpCallItem
    | McpApprovalRequestItem
    | McpApprovalResponseItem
    | CodeInterpreterCallItem
    | WebSearchCallItem
    | FileSearchCallItem
    | ImageGenerationCallItem
    | ProgramItem
    | ProgramOutputItem
    | AdditionalToolsItem
    | ConfigurationUpdateItem
    | CompactionItem
)
"""Items that become the same item of a conversation at any server."""

InputItem: TypeAlias = (
    MessageItem
    | PlainItem
    | FunctionCallOutputItem
    | CustomToolCallOutputItem
    | ComputerCallOutputItem
    | ItemReference
    | CompactionTriggerItem
)


def _explicit(value: Any) -> Any:
    """Return an item with its type: without one it is a message, or a reference if it has only an id.

    The output of a local shell call gets its ``call_id``.
    """
    if not isinstance(value, dict):
        return value
    match value.get("type"):
        case None:
            is_reference = "id" in value and value.keys().isdisjoint(("role", "content"))
            return {**value, "type": "item_reference" if is_reference else "message"}
        case "local_shell_call_output" if value.get("call_id") is None and "id" in value:
            return {**value, "call_id": value["id"]}
        case _:
            return value


InputItems: TypeAlias = Annotated[list[InputItem], ListOf(InputItem, _explicit)]
SteeringMessages: TypeAlias = Annotated[list[SteeringMessage], ListOf(SteeringMessage, _explicit)]

# Messages in Harmony's own format


class RawPart(_Object, frozen=True, kw_only=True):
    """Text, or the content of a system or developer message; ``instructions`` is the text of the latter."""

    type: Literal["text", "developer_content", "system_content"]
    text: str | None = None
    instructions: str | None = None


_RawRole: TypeAlias = Literal["system", "developer", "user", "assistant", "tool"]


class RawAuthor(_Object, frozen=True, kw_only=True):
    role: _RawRole
    name: str | None = None


class RawFunction(_Object, frozen=True, kw_only=True):
    name: str
    arguments: str


class RawToolCall(_Object, frozen=True, kw_only=True):
    """A call in a message of the Chat Completions API."""

    id: _CallId
    function: RawFunction


class RawMessage(_Object, frozen=True, kw_only=True):
    """A message as openai_harmony writes it; its author is an object, or split into ``role`` and ``name``.

    ``reasoning``, ``tool_calls`` and ``tool_call_id`` are those of messages of the Chat Completions API.
    """

    author: RawAuthor | None = None
    role: _RawRole | None = None
    name: str | None = None
    content: str | tuple[RawPart, ...] | None = None
    channel: str | None = None
    recipient: str | None = None
    content_type: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[RawToolCall, ...] | None = None
    tool_call_id: str | None = None


RawMessages: TypeAlias = Annotated[list[RawMessage], ListOf(RawMessage)]

# JSON schemas

MODELS = (AnyTool, EffortUpdate, FormatUpdate, WebAction)
"""The objects in items that pydantic reads, and describes."""


def item_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of items and messages, and of the structs in them, by name."""
    _, described = schemas(InputItem, RawMessage)
    for kind, added in ((MessageItem, "type"), (ItemReference, "type"), (LocalShellCallOutputItem, "call_id")):
        schema = described[kind.__name__]
        schema["required"].remove(added)
        schema["properties"][added] = {"anyOf": [schema["properties"][added], {"type": "null"}]}
    return described


def _unset(value: Value | None) -> Value | UnsetType:
    return UNSET if value is None else value
