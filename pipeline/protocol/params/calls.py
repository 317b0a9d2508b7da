"""Input items of calls with types of their own: the calls that a server runs, and the shells and patches of clients.

Clients send back the items that they kept of a response, sometimes without ids or statuses, so few fields are required.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, Tag, model_validator

from penstock.pipeline.protocol.params.common import FAIL_FAST, Body, CallId, Echoed, text_or_object

_Said: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
_Count: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]


class _Item(Body):
    id: str | None = None
    status: (
        Literal["in_progress", "completed", "incomplete", "failed", "searching", "interpreting", "calling"] | None
    ) = None


class _Call(_Item):
    call_id: CallId


# Calls that the client runs


class LocalShellAction(Body):
    command: Annotated[list[str], FAIL_FAST]
    env: dict[str, str] | None = None
    timeout_ms: _Count | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(_Call):
    type: Literal["local_shell_call"]
    action: LocalShellAction


class LocalShellCallOutputItem(_Call):
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


class ShellCallItem(_Call):
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


class ShellCallOutputItem(_Call):
    type: Literal["shell_call_output"]
    output: Annotated[list[ShellOutput], FAIL_FAST]
    max_output_length: _Count | None = None


class PatchOperation(Body):
    type: Literal["create_file", "update_file", "delete_file"]
    path: str
    diff: str | None = None


class ApplyPatchCallItem(_Call):
    type: Literal["apply_patch_call"]
    operation: PatchOperation


class ApplyPatchCallOutputItem(_Call):
    type: Literal["apply_patch_call_output"]
    output: str | None = None


# Calls that a server runs


class ListedToolPart(Body):
    name: _Said
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    annotations: dict[str, Any] | None = None


_Error: TypeAlias = Annotated[
    Annotated[str, Tag("as_text")] | Annotated[dict[str, Any], Tag("as_object")], Discriminator(text_or_object)
]


class McpListToolsItem(_Item):
    type: Literal["mcp_list_tools"]
    server_label: _Said
    tools: Annotated[list[ListedToolPart], FAIL_FAST] | None = None
    error: _Error | None = None


class _McpCall(_Item):
    server_label: _Said
    name: _Said
    arguments: str


class McpCallItem(_McpCall):
    type: Literal["mcp_call"]
    output: str | None = None
    error: _Error | None = None
    approval_request_id: str | None = None


class McpApprovalRequestItem(_McpCall):
    type: Literal["mcp_approval_request"]


class McpApprovalResponseItem(_Item):
    type: Literal["mcp_approval_response"]
    approval_request_id: _Said
    approve: bool
    reason: str | None = None


class CodeOutput(Body):
    type: Literal["logs", "image"]
    logs: str | None = None
    url: str | None = None


class CodeInterpreterCallItem(_Item):
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


class WebSearchCallItem(_Item):
    type: Literal["web_search_call"]
    action: WebAction | None = None


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
