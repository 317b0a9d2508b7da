"""Items: what a conversation is made of, on the wire, in the store and between stages.

One union for both directions, because what a response puts out is what the next request brings in.  Fields that the
protocol leaves out rather than nulls are `msgspec.UNSET`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]
CallStatus: TypeAlias = Literal["in_progress", "completed", "incomplete", "failed"]
"""The status of what this server runs itself."""
Phase: TypeAlias = Literal["commentary", "final_answer"]
Role: TypeAlias = Literal["user", "assistant", "system", "developer"]
ImageDetail: TypeAlias = Literal["low", "high", "auto", "original"]


class InputText(msgspec.Struct, frozen=True, tag_field="type", tag="input_text"):
    """Text that the client wrote."""

    text: str


class InputImage(msgspec.Struct, frozen=True, tag_field="type", tag="input_image"):
    """An image that the client shows: an address on the web, or a data URL.

    ``detail`` is how closely the client wants it looked at; models here have their own way with every image.
    """

    image_url: str
    detail: ImageDetail = "auto"

    @property
    def text(self) -> str:
        """It says nothing in words."""
        return ""


class TopLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token that might have come, and how likely it was: the natural logarithm of its probability."""

    token: str
    bytes: tuple[int, ...]
    logprob: float


class Logprob(msgspec.Struct, frozen=True, gc=False):
    """A token that came, how likely it was, and the likeliest ones in its place, likeliest first."""

    token: str
    bytes: tuple[int, ...]
    logprob: float
    top_logprobs: tuple[TopLogprob, ...] = ()


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Text that the model wrote for the user.

    ``logprobs`` are those of its tokens, where they were asked for; text from a header that was repaired has none.
    """

    text: str
    annotations: tuple[dict[str, Any], ...] = ()
    logprobs: tuple[Logprob, ...] = ()


class Refusal(msgspec.Struct, frozen=True, tag_field="type", tag="refusal"):
    """The model's explanation of why it does not answer."""

    refusal: str


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Raw text of the model's thinking."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    """A summary of the model's thinking."""

    text: str


InputPart: TypeAlias = InputText | InputImage
"""What a client, or a tool of its own, shows the model."""
MessagePart: TypeAlias = InputPart | OutputText | Refusal
OutputPart: TypeAlias = OutputText | Refusal | ReasoningText
"""The parts that ``response.content_part`` events carry."""


class Message(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """What one side of the conversation says or shows; ``phase`` only where the assistant speaks."""

    id: str
    status: ItemStatus
    role: Role
    content: tuple[MessagePart, ...]
    phase: Phase | UnsetType = UNSET

    @property
    def text(self) -> str:
        """All of its text, without its images; parts join without a separator, as they were generated."""
        return "".join(part.refusal if isinstance(part, Refusal) else part.text for part in self.content)


class Reasoning(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """The model's thinking."""

    id: str
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] | UnsetType = UNSET
    encrypted_content: str | UnsetType = UNSET
    status: ItemStatus | UnsetType = UNSET

    @property
    def text(self) -> str:
        """The thinking: raw, or where there is no raw text, its summary."""
        return "".join(part.text for part in self.content or self.summary)


class FunctionCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """A call that the client is asked to run; ``arguments`` is the text the model wrote, valid JSON or not."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.arguments


class _CallOutput(msgspec.Struct, frozen=True, tag_field="type"):
    id: str
    call_id: str
    output: str | tuple[InputPart, ...]
    status: ItemStatus

    @property
    def text(self) -> str:
        """The output as one text, without its images."""
        return self.output if isinstance(self.output, str) else "".join(part.text for part in self.output)


class FunctionCallOutput(_CallOutput, frozen=True, tag="function_call_output"):
    """What a function call returned."""


class CustomToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    """A call that the client is asked to run; ``input`` is any text."""

    id: str
    call_id: str
    name: str
    input: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.input


class CustomToolCallOutput(_CallOutput, frozen=True, tag="custom_tool_call_output"):
    """What a custom tool call returned."""


# Calls that the client runs, in items of their own


class LocalShellCall(msgspec.Struct, frozen=True, tag_field="type", tag="local_shell_call"):
    """A command for the client to run; ``action`` as the API has it: ``exec`` with its ``command``."""

    id: str
    call_id: str
    action: dict[str, Any]
    status: ItemStatus

    @property
    def text(self) -> str:
        """What the model wrote, or would have written."""
        return _json({key: value for key, value in self.action.items() if key != "type"})


class LocalShellCallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="local_shell_call_output"):
    """What a local shell call returned; ``id`` is the call's ``call_id``, as the API has it."""

    id: str
    output: str
    status: ItemStatus | None = None

    @property
    def call_id(self) -> str:
        """The call that it answers."""
        return self.id

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.output


class ShellCall(msgspec.Struct, frozen=True, tag_field="type", tag="shell_call"):
    """Commands for a shell: the client's, or the sandbox's where ``environment`` says so.

    ``action`` has ``commands``, and may have ``timeout_ms`` and ``max_output_length``.
    """

    id: str
    call_id: str
    action: dict[str, Any]
    status: ItemStatus
    environment: dict[str, Any] | None = None

    @property
    def runs_here(self) -> bool:
        """Whether it is the sandbox's."""
        return self.environment is not None and self.environment.get("type") != "local"

    @property
    def text(self) -> str:
        """What the model wrote, or would have written."""
        return _json({key: value for key, value in self.action.items() if value is not None})


class ShellCallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="shell_call_output"):
    """What each command of a shell call wrote, and how it ended."""

    id: str
    call_id: str
    output: tuple[dict[str, Any], ...]
    status: ItemStatus
    max_output_length: int | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        return _json(self.output)


class ApplyPatchCall(msgspec.Struct, frozen=True, tag_field="type", tag="apply_patch_call"):
    """A change of one file for the client to make; ``operation`` as the API has it."""

    id: str
    call_id: str
    operation: dict[str, Any]
    status: ItemStatus

    @property
    def text(self) -> str:
        """What the model wrote, or would have written."""
        return _json(self.operation)


class ApplyPatchCallOutput(msgspec.Struct, frozen=True, tag_field="type", tag="apply_patch_call_output"):
    """Whether the client could make the change."""

    id: str
    call_id: str
    status: Literal["completed", "failed"]
    output: str | None = None

    @property
    def text(self) -> str:
        """What the model reads."""
        return self.output or self.status


# Calls that this server runs


class ListedTool(msgspec.Struct, frozen=True):
    """A tool as an MCP server describes it; ``input_schema`` is a JSON schema.

    What it does not say is left out: there are clients that take no null for it.
    """

    name: str
    input_schema: dict[str, Any]
    description: str | UnsetType = UNSET
    annotations: dict[str, Any] | UnsetType = UNSET


class McpListTools(msgspec.Struct, frozen=True, tag_field="type", tag="mcp_list_tools"):
    """What an MCP server offers, or why it could not be asked."""

    id: str
    server_label: str
    tools: tuple[ListedTool, ...]
    error: str | UnsetType = UNSET

    @property
    def status(self) -> CallStatus:
        """It is whole once it is there, and has no status on the wire."""
        return "completed"


class McpCall(msgspec.Struct, frozen=True, tag_field="type", tag="mcp_call"):
    """A call of a tool of an MCP server: ``output`` is what it returned, ``error`` why it failed."""

    id: str
    server_label: str
    name: str
    arguments: str
    status: CallStatus
    output: str | None = None
    error: dict[str, Any] | None = None
    approval_request_id: str | None = None

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.arguments


class McpApprovalRequest(msgspec.Struct, frozen=True, tag_field="type", tag="mcp_approval_request"):
    """A call that the client has to approve of before this server makes it."""

    id: str
    server_label: str
    name: str
    arguments: str

    @property
    def status(self) -> CallStatus:
        """It is whole once it is there, and has no status on the wire."""
        return "completed"

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.arguments


class McpApprovalResponse(msgspec.Struct, frozen=True, tag_field="type", tag="mcp_approval_response"):
    """Whether the client approves of the call that ``approval_request_id`` names."""

    id: str
    approval_request_id: str
    approve: bool
    reason: str | None = None


class CodeInterpreterCall(msgspec.Struct, frozen=True, tag_field="type", tag="code_interpreter_call"):
    """Code that ran in the sandbox; ``outputs`` only where they were asked for."""

    id: str
    code: str
    container_id: str
    status: CallStatus
    outputs: tuple[dict[str, Any], ...] | None = None

    @property
    def text(self) -> str:
        """What the model wrote."""
        return self.code


class WebSearchCall(msgspec.Struct, frozen=True, tag_field="type", tag="web_search_call"):
    """What the browser did: ``action`` is a ``search``, an ``open_page`` or a ``find_in_page``."""

    id: str
    action: dict[str, Any]
    status: CallStatus


class AdditionalTools(msgspec.Struct, frozen=True, tag_field="type", tag="additional_tools"):
    """Tools that the client adds within the conversation, as they came."""

    id: str
    role: Literal["developer"]
    tools: tuple[dict[str, Any], ...]


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


FormCall: TypeAlias = LocalShellCall | ShellCall | ApplyPatchCall
"""Calls of tools that have an item type of their own; the model knows these tools as functions."""

FormCallOutput: TypeAlias = LocalShellCallOutput | ShellCallOutput | ApplyPatchCallOutput

Call: TypeAlias = FunctionCall | CustomToolCall | FormCall
CallOutput: TypeAlias = FunctionCallOutput | CustomToolCallOutput | FormCallOutput

ServerItem: TypeAlias = McpListTools | McpCall | McpApprovalRequest | CodeInterpreterCall | WebSearchCall
"""What this server does itself, or asks to be allowed to; beside them `ShellCall` with its output."""

Item: TypeAlias = Message | Reasoning | Call | CallOutput | ServerItem | McpApprovalResponse | AdditionalTools
OutputItem: TypeAlias = Message | Reasoning | Call | ShellCallOutput | ServerItem


OneKind = TypeVar("OneKind", bound=Item)


def of_type(items: Iterable[Item], kind: type[OneKind]) -> list[OneKind]:
    """The items of one type.

    In a long conversation most are of others, and for those isinstance takes ten times as long.
    """
    return [item for item in items if type(item) is kind]


def images_of(item: Item) -> tuple[InputImage, ...]:
    """The images that an item shows the model, in order."""
    match item:
        case Message(content=parts):
            pass
        case FunctionCallOutput(output=tuple(parts)) | CustomToolCallOutput(output=tuple(parts)):
            pass
        case _:
            return ()
    return tuple(part for part in parts if isinstance(part, InputImage))
