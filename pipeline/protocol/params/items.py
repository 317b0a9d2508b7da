"""Input items in a request body: the items of a conversation, and the few others that a client may send.

Clients send back the items that they kept of a response, sometimes without ids or statuses, with nulls, or with text in
place of parts, so few fields are required.  A request may have thousands of items, so msgspec reads them: each by the
form of its class, for which this module has the fields that are other ones in a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta
from pydantic import ConfigDict, Field

from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.items import InputFile, InputImage, InputText, Refusal, Role
from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, Echoed
from penstock.pipeline.protocol.params.sent import LEFT_OUT, AnyStatus, Fields, Form, Sent, form, list_of, one_of, whole
from penstock.pipeline.protocol.params.structs import ListOf, schemas
from penstock.pipeline.protocol.params.tools import AnyTool, JsonSchemaFormat, TextFormat
from penstock.pipeline.protocol.readings import audio_instead
from penstock.pipeline.protocol.response import Effort

_Text: TypeAlias = Annotated[str, Meta(min_length=1)]
_CallId: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64)]
_Name: TypeAlias = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,64}$(?!\n)")]
_Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_Integer: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

Given: TypeAlias = dict[str, Any]
"""The fields of an item, without nulls."""


class _Object(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An object in a body: types are strict, and keys that the API does not have are ignored."""


# Messages


class Unheard(InputText, frozen=True, tag="input_text"):
    """A recording, which no model here hears, with the sentence that the model reads instead."""


class NoScreenshot(wire.Screenshot, frozen=True, tag="computer_screenshot"):
    """A screenshot that the server refuses, for the field with this name."""

    field: str


class AudioPart(_Object, Sent, frozen=True, kw_only=True, tag_field="type", tag="input_audio"):
    def whole(self) -> Unheard:
        """Return the part."""
        return Unheard(audio_instead())


class ReasoningTextPart(_Object, Sent, frozen=True, kw_only=True):
    type: Literal["reasoning_text"]
    text: str

    def whole(self) -> wire.ReasoningText:
        """Return the part."""
        return wire.ReasoningText(self.text)


class SummaryTextPart(_Object, Sent, frozen=True, kw_only=True):
    type: Literal["summary_text"]
    text: str

    def whole(self) -> wire.SummaryText:
        """Return the part."""
        return wire.SummaryText(self.text)


class OutputTextPart(_Object, Sent, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str

    def whole(self) -> wire.OutputText:
        """Return the part."""
        return wire.OutputText(self.text)


_IMAGE, _FILE = form(InputImage), form(InputFile)
_OUTPUT = one_of(str, list_of(InputText, _IMAGE, _FILE, AudioPart))
_CONTENT = one_of(str, list_of(InputText, OutputTextPart, Refusal, _IMAGE, _FILE, AudioPart))

VARIABLE: Any = one_of(InputText, _IMAGE, _FILE)
"""The parts that may be the value of a prompt's variable."""


def message(
    role: Role, content: str | Sequence[wire.MessagePart], status: wire.ItemStatus = "completed"
) -> wire.Message:
    """Return a message without an id; its content may be one text."""
    parts = (_text(role, content),) if isinstance(content, str) else tuple(content)
    return wire.Message("", status=status, role=role, content=parts)


def _text(role: Role, text: str) -> InputText | wire.OutputText:
    return wire.OutputText(text) if role == "assistant" else InputText(text)


class _MessageForm(Form, frozen=True, kw_only=True):
    """The form of a message; long requests have thousands, so it takes half the time of other forms."""

    def whole(self: Any) -> wire.Message:
        """Return the message."""
        content = self.content
        parts = (_text(self.role, content),) if isinstance(content, str) else whole(content)
        return wire.Message(
            self.id or "",
            status=self.status or "completed",
            role=self.role,
            content=parts,
            phase=self.phase or UNSET,
        )


# Calls that the client runs


class LocalShellAction(Fields, frozen=True, kw_only=True):
    command: list[str]
    env: dict[str, str] | None = None
    timeout_ms: _Count | None = None
    user: str | None = None
    working_directory: str | None = None

    def whole(self) -> Given:
        """Return the action with its type."""
        return {"type": "exec", "env": {}} | super().whole()


class ShellAction(Fields, frozen=True, kw_only=True):
    commands: list[str]
    timeout_ms: _Count | None = None
    max_output_length: _Count | None = None


class ShellEnvironment(Fields, frozen=True, kw_only=True):
    type: str
    container_id: str | None = None


class ShellOutcome(_Object, frozen=True, kw_only=True):
    type: Literal["exit", "timeout"]
    exit_code: _Integer | None = None


class ShellCommandOutput(_Object, Sent, frozen=True, kw_only=True):
    outcome: ShellOutcome
    stdout: str | None = None
    stderr: str | None = None

    def whole(self) -> Given:
        """Return the output with all of its fields."""
        exit_code = {} if self.outcome.type == "timeout" else {"exit_code": self.outcome.exit_code or 0}
        outcome = {"type": self.outcome.type} | exit_code
        return {"stdout": self.stdout or "", "stderr": self.stderr or "", "outcome": outcome}


class PatchOperation(Fields, frozen=True, kw_only=True):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class SafetyCheck(Fields, frozen=True, kw_only=True):
    id: str
    code: str | None = None
    message: str | None = None


def _function_call(given: Given) -> None:
    given["is_async"] = given["is_async"] or UNSET


def _local_output(given: Given) -> None:
    """Make the ``call_id`` the id: the API puts it there, and some clients in ``call_id``."""
    given["id"] = given.pop("call_id")


def _search(given: Given) -> None:
    """Choose who searches, and the id of the call: those of OpenAI's own searches have none."""
    given["execution"] = given["execution"] or ("client" if given["call_id"] else "server")
    given["call_id"] = given["call_id"] or "call_tool_search"


# Calls that a server runs


class ListedToolPart(_Object, Sent, frozen=True, kw_only=True):
    name: _Text
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None

    def whole(self) -> wire.ListedTool:
        """Return the tool with its schema."""
        return wire.ListedTool(self.name, self.input_schema or {}, self.description or UNSET, self.annotations or UNSET)


class CodeOutput(_Object, Sent, frozen=True, kw_only=True):
    type: Literal["logs", "image"]
    logs: str | None = None
    url: str | None = None

    def whole(self) -> Given:
        """Return the output with all of its fields."""
        name, text = ("logs", self.logs) if self.type == "logs" else ("url", self.url)
        return {"type": self.type, name: text or ""}


class WebAction(Echoed, Sent):
    """An action of the browser, of any type; only the known fields are validated."""

    type: str | None = None
    query: str | None = None
    queries: Annotated[list[str], FAIL_FAST] | None = None
    url: str | None = None
    pattern: str | None = None

    def whole(self) -> Given:
        """Return the action as the client sent it, without nulls."""
        return {"type": "search"} | {key: value for key, value in self.sent.items() if value is not None}


def _without_status(given: Given) -> None:
    del given["status"]


def _listing(given: Given) -> None:
    _without_status(given)
    error = given["error"]
    given["error"] = msgspec.json.encode(error).decode() if isinstance(error, dict) else error or UNSET


def _mcp_call(given: Given) -> None:
    error = given["error"] or None
    if isinstance(error, str):
        error = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
    status = given["status"] or ("failed" if error else "completed")
    given |= {"error": error, "status": status}


class ScreenshotPart(_Object, Sent, frozen=True, kw_only=True):
    type: Literal["computer_screenshot", "input_image"]
    image_url: str | None = None
    file_id: str | None = None

    def whole(self) -> wire.Screenshot:
        """Return the screen."""
        if self.file_id is not None:
            return NoScreenshot("", "file_id")
        return NoScreenshot("", "image_url") if self.image_url is None else wire.Screenshot(self.image_url)


# Other items


class _Update(Body, Sent):
    """A part of an update: other keys than the declared ones are refused."""

    model_config = ConfigDict(extra="forbid")

    def whole(self) -> Given:
        """Return what the client sent."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class EffortUpdate(_Update):
    """A new effort; null is that of the model."""

    effort: Effort | None = None


class FormatUpdate(_Update):
    """A new format of the answer."""

    format: Annotated[TextFormat | JsonSchemaFormat, Field(discriminator="type")]


class _Typed(_Object, frozen=True, kw_only=True, tag_field="type"):
    @property
    def type(self) -> str:
        """The type of the item, as on the wire."""
        return str(self.__struct_config__.tag)


class ItemReference(_Typed, frozen=True, kw_only=True, tag="item_reference"):
    """A reference to a stored item by its id."""

    id: str


class CompactionTriggerItem(_Typed, frozen=True, kw_only=True, tag="compaction_trigger"):
    """The wish to have the conversation compacted instead of answered; the last item of an input."""

    id: str | None = None


_STATUS, _EXECUTION, _ERROR = AnyStatus | None, Literal["server", "client"] | None, str | dict[str, Any] | None
_CALL: Any = {"call_id": _CallId, "status": _STATUS}
_NAMED: Any = {"call_id": _CallId, "name": _Text, "namespace": one_of(_Name, None)}
_MCP: Any = {"server_label": _Text, "name": _Text, "status": _STATUS}
_SEARCH: Any = {"call_id": one_of(_CallId, None), "execution": _EXECUTION, "status": _STATUS}
_UNCHOSEN = {"call_id": "", "execution": ""}

FORMS = (
    form(wire.Message, base=_MessageForm, content=_CONTENT),
    form(wire.Reasoning, summary=tuple[SummaryTextPart, ...] | None, content=tuple[ReasoningTextPart, ...] | None),
    form(wire.FunctionCall, _function_call, **_NAMED),
    form(wire.CustomToolCall, **_NAMED),
    form(wire.LocalShellCall, **_CALL, action=LocalShellAction),
    form(wire.LocalShellCallOutput, _local_output, **_CALL, chosen={"status": "completed"}),
    form(wire.ShellCall, **_CALL, action=ShellAction, environment=ShellEnvironment | None),
    form(wire.ShellCallOutput, **_CALL, output=tuple[ShellCommandOutput, ...], max_output_length=_Count | None),
    form(wire.ApplyPatchCall, **_CALL, operation=PatchOperation),
    form(wire.ApplyPatchCallOutput, **_CALL),
    form(wire.ToolSearchCall, _search, **_SEARCH, arguments=Any | None, chosen={"arguments": {}, **_UNCHOSEN}),
    form(wire.ToolSearchOutput, _search, **_SEARCH, tools=tuple[AnyTool, ...], chosen=_UNCHOSEN),
    form(wire.ComputerCall, **_CALL, pending_safety_checks=tuple[SafetyCheck, ...] | None),
    form(
        wire.McpListTools,
        _listing,
        server_label=_Text,
        tools=tuple[ListedToolPart, ...] | None,
        error=_ERROR,
        status=_STATUS,
        chosen={"tools": ()},
    ),
    form(wire.McpCall, _mcp_call, **_MCP, error=_ERROR, chosen={"status": ""}),
    form(wire.McpApprovalRequest, _without_status, **_MCP),
    form(wire.McpApprovalResponse, _without_status, approval_request_id=_Text, status=_STATUS),
    form(
        wire.CodeInterpreterCall,
        outputs=tuple[CodeOutput, ...] | None,
        status=_STATUS,
        chosen={"code": "", "container_id": ""},
    ),
    form(
        wire.WebSearchCall,
        action=WebAction | None,
        results=LEFT_OUT,
        status=_STATUS,
        chosen={"action": {"type": "search"}},
    ),
    form(wire.FileSearchCall, queries=tuple[str, ...], status=_STATUS, chosen={"queries": ()}),
    form(wire.ImageGenerationCall),
    form(wire.Program, call_id=_CallId),
    form(wire.ProgramOutput, call_id=_CallId),
    form(wire.AdditionalTools, tools=tuple[AnyTool, ...]),
    form(wire.ConfigurationUpdate, is_closed=True, reasoning=EffortUpdate | None, text=FormatUpdate | None),
    form(wire.Compaction),
    form(wire.FunctionCallOutput, call_id=_CallId, output=_OUTPUT),
    form(wire.CustomToolCallOutput, call_id=_CallId, output=_OUTPUT),
    form(
        wire.ComputerCallOutput,
        **_CALL,
        output=ScreenshotPart,
        acknowledged_safety_checks=tuple[SafetyCheck, ...] | None,
    ),
    ItemReference,
    CompactionTriggerItem,
)
"""The forms of all items."""

InputItem: TypeAlias = wire.Item | ItemReference | CompactionTriggerItem
"""An item of an input; it has no id if the client sent none."""


def _explicit(value: Any) -> Any:
    """Return an item with its type: without one it is a message, or a reference if it has only an id.

    The output of a local shell call gets its ``call_id``.
    """
    if isinstance(value, msgspec.Struct):  # of a program
        value = msgspec.to_builtins(value)
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


InputItems: TypeAlias = Annotated[list[InputItem], ListOf(one_of(*FORMS), _explicit)]
SteeringMessages: TypeAlias = Annotated[
    list[wire.Message], ListOf(form(wire.Message, base=_MessageForm, role=Literal["user"], content=_OUTPUT), _explicit)
]

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
    _, described = schemas(one_of(*FORMS), RawMessage)
    for name, added in (("MessageItem", "type"), ("ItemReference", "type"), ("LocalShellCallOutputItem", "call_id")):
        schema = described[name]
        schema["required"].remove(added)
        schema["properties"][added] = {"anyOf": [schema["properties"][added], {"type": "null"}]}
    return described
