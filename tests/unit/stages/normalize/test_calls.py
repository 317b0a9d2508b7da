"""Items of calls with types of their own, and their outputs."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import pytest
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from penstock.pipeline.errors import InvalidRequest, StoreFailed
from penstock.pipeline.protocol.items import (
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CodeInterpreterCall,
    FunctionCallOutput,
    Item,
    ListedTool,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    ShellCall,
    ShellCallOutput,
    WebSearchCall,
)
from penstock.stages.services.store.store import Store
from tests.support.request_bodies import CLIENT_SHELLS, SERVER_TOOLS, WEATHER
from tests.support.requests import normalize, store_answer

Json: TypeAlias = dict[str, Any]

ERROR = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "No."}]}
EXIT = {"type": "exit", "exit_code": 0}
LISTED = {"name": "f", "input_schema": {"type": "object"}, "description": "F.", "annotations": {"readOnlyHint": True}}
DELETE = {"type": "delete_file", "path": "a"}


def mcp(**fields: Any) -> Json:
    return {"type": "mcp_call", "server_label": "m", "name": "f", "arguments": "{}", **fields}


def request(**fields: Any) -> Json:
    return {**mcp(**fields), "type": "mcp_approval_request"}


def response(asked: str = "r", **fields: Any) -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": asked, "approve": True, **fields}


@pytest.mark.parametrize(
    ("given", "item"),
    [
        ({"type": "mcp_list_tools", "server_label": "m"}, McpListTools("mcpl_1i0000", "m", ())),
        (
            {"type": "mcp_list_tools", "id": "i", "server_label": "m", "tools": [LISTED, {"name": "g"}], "error": None},
            McpListTools(
                "i", "m", (ListedTool("f", {"type": "object"}, "F.", {"readOnlyHint": True}), ListedTool("g", {}))
            ),
        ),
        ({"type": "mcp_list_tools", "server_label": "m", "error": "No."}, McpListTools("mcpl_1i0000", "m", (), "No.")),
        (
            {"type": "mcp_list_tools", "server_label": "m", "error": {"code": 5}},
            McpListTools("mcpl_1i0000", "m", (), '{"code":5}'),
        ),
        (mcp(), McpCall("mcp_1i0000", "m", "f", "{}", "completed")),
        (
            mcp(id="i", output="x", error=None, status="completed", approval_request_id="r", caller=None),
            McpCall("i", "m", "f", "{}", "completed", "x", None, "r"),
        ),
        (mcp(error="No."), McpCall("mcp_1i0000", "m", "f", "{}", "failed", None, ERROR)),
        (mcp(error="", status="failed"), McpCall("mcp_1i0000", "m", "f", "{}", "failed")),
        (mcp(error=ERROR, status="incomplete"), McpCall("mcp_1i0000", "m", "f", "{}", "incomplete", None, ERROR)),
        (mcp(status="calling"), McpCall("mcp_1i0000", "m", "f", "{}", "in_progress")),
        (request(), McpApprovalRequest("mcpr_1i0000", "m", "f", "{}")),
        (
            {"type": "code_interpreter_call", "code": None, "container_id": None, "outputs": None},
            CodeInterpreterCall("ci_1i0000", "", "", "completed"),
        ),
        (
            {
                "type": "code_interpreter_call",
                "id": "i",
                "code": "1",
                "container_id": "c",
                "status": "interpreting",
                "outputs": [{"type": "logs", "logs": "x", "y": 1}, {"type": "image", "url": "u"}],
            },
            CodeInterpreterCall(
                "i", "1", "c", "in_progress", ({"type": "logs", "logs": "x"}, {"type": "image", "url": "u"})
            ),
        ),
        ({"type": "web_search_call"}, WebSearchCall("ws_1i0000", {"type": "search"}, "completed")),
        (
            {"type": "web_search_call", "id": "i", "status": "searching", "action": {"type": "open_page", "url": None}},
            WebSearchCall("i", {"type": "open_page"}, "in_progress"),
        ),
        (
            {"type": "web_search_call", "status": "failed", "action": {"type": "scroll", "by": 5}},
            WebSearchCall("ws_1i0000", {"type": "scroll", "by": 5}, "failed"),
        ),
        (
            {"type": "web_search_call", "action": {"query": "x", "sources": [{"type": "url", "url": "u"}]}},
            WebSearchCall(
                "ws_1i0000", {"type": "search", "query": "x", "sources": [{"type": "url", "url": "u"}]}, "completed"
            ),
        ),
        (
            {"type": "local_shell_call", "call_id": "c", "action": {"command": ["ls"], "timeout_ms": None}},
            LocalShellCall("lsh_1i0000", "c", {"type": "exec", "env": {}, "command": ["ls"]}, "completed"),
        ),
        (
            {
                "type": "local_shell_call",
                "id": "i",
                "call_id": "c",
                "status": "incomplete",
                "action": {"type": "exec", "command": [], "env": {"A": "b"}, "user": "u"},
            },
            LocalShellCall("i", "c", {"type": "exec", "env": {"A": "b"}, "command": [], "user": "u"}, "incomplete"),
        ),
        (
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"], "timeout_ms": 5, "x": 1}},
            ShellCall("sh_1i0000", "c", {"commands": ["ls"], "timeout_ms": 5}, "completed"),
        ),
        (
            {
                "type": "shell_call",
                "id": "i",
                "call_id": "c",
                "action": {"commands": []},
                "environment": {"type": "container_reference", "container_id": "b", "x": 1},
            },
            ShellCall("i", "c", {"commands": []}, "completed", {"type": "container_reference", "container_id": "b"}),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {**DELETE, "diff": None}, "status": "completed"},
            ApplyPatchCall("apc_1i0000", "c", DELETE, "completed"),
        ),
    ],
    ids=str,
)
async def test_items_of_servers_and_shells_are_read(store: Store, given: Json, item: Item) -> None:
    """Ids, statuses and nulls may be missing; a failure has its error in any form."""
    assert (await normalize(store, input=[given])).input == (item,)


SHELL = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
LOCAL = {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": ["ls"]}}
PATCH = {"type": "apply_patch_call", "call_id": "c", "operation": DELETE}


@pytest.mark.parametrize(
    ("call", "given", "item"),
    [
        (
            SHELL,
            {"type": "shell_call_output", "output": []},
            ShellCallOutput("sho_1i0001", "c", (), "completed"),
        ),
        (
            SHELL,
            {
                "type": "shell_call_output",
                "id": "i",
                "status": "failed",
                "max_output_length": 9,
                "output": [
                    {"stdout": "x", "stderr": None, "outcome": {"type": "exit"}, "created_by": "y"},
                    {"outcome": {"type": "timeout", "exit_code": None}},
                ],
            },
            ShellCallOutput(
                "i",
                "c",
                (
                    {"stdout": "x", "stderr": "", "outcome": EXIT},
                    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
                ),
                "completed",
                9,
            ),
        ),
        (
            LOCAL,
            {"type": "local_shell_call_output", "output": "x"},
            LocalShellCallOutput("c", "x", "completed"),
        ),
        (
            LOCAL,
            {"type": "local_shell_call_output", "call_id": None, "id": "c", "output": "", "status": "incomplete"},
            LocalShellCallOutput("c", "", "incomplete"),
        ),
        (
            {**LOCAL, "id": "c"},
            {"type": "local_shell_call_output", "call_id": None, "id": "c", "output": ""},
            LocalShellCallOutput("c", "", "completed"),
        ),
        (
            LOCAL,
            {"type": "function_call_output", "output": "x"},
            FunctionCallOutput("fco_1i0001", "c", "x", "completed"),
        ),
        (
            PATCH,
            {"type": "apply_patch_call_output", "output": None},
            ApplyPatchCallOutput("apco_1i0001", "c", "completed"),
        ),
        (
            PATCH,
            {"type": "apply_patch_call_output", "id": "i", "status": "failed", "output": "No."},
            ApplyPatchCallOutput("i", "c", "failed", "No."),
        ),
    ],
    ids=str,
)
async def test_outputs_of_client_tools_are_read(store: Store, call: Json, given: Json, item: Item) -> None:
    """Each kind of call has its kind of output; a local shell's may have the call's id as its own."""
    conversation = await normalize(store, input=[call, {"call_id": "c", **given}])
    assert conversation.input[1] == item
    assert len({one.id for one in conversation.input}) == 2


@pytest.mark.parametrize("client", [SERVER_TOOLS, CLIENT_SHELLS], ids=["server", "client"])
async def test_items_are_sent_as_openai_python_reads_them(store: Store, client: Json) -> None:
    """Items of any form are sent in the form that it reads without a warning."""
    items = (await normalize(store, input=client["input"][1:])).input
    adapter = TypeAdapter[Any](ResponseOutputItem)
    for item in items:
        adapter.validate_json(msgspec.json.encode(item), strict=False)


# Calls and their outputs


@pytest.mark.parametrize("call", [SHELL, LOCAL, PATCH, None], ids=lambda call: call and call["type"])
@pytest.mark.parametrize(
    "output",
    [
        {"type": "shell_call_output", "output": []},
        {"type": "local_shell_call_output", "output": ""},
        {"type": "apply_patch_call_output"},
        {"type": "custom_tool_call_output", "output": ""},
    ],
    ids=lambda output: output["type"],
)
async def test_output_needs_a_call_of_its_kind(store: Store, call: Json | None, output: Json) -> None:
    """An output without one is refused at its place."""
    items = [call or WEATHER_CALL, {**output, "call_id": "c"}]
    if call and output["type"] == f"{call['type']}_output":
        await normalize(store, input=items)
        return
    with pytest.raises(InvalidRequest, match=r"No .* call with call_id 'c' comes before") as caught:
        await normalize(store, input=items)
    assert caught.value.param == "input[1].call_id"


WEATHER_CALL = {"type": "function_call", "call_id": "c", "name": WEATHER["name"], "arguments": "{}"}


async def test_local_shell_call_is_answered_once(store: Store) -> None:
    """Its output has the id of the call, so there can be only one."""
    output = {"type": "local_shell_call_output", "id": "c", "output": ""}
    with pytest.raises(InvalidRequest, match="Duplicate item") as caught:
        await normalize(store, input=[LOCAL, output, output])
    assert caught.value.param == "input[2].call_id"


async def test_approval_answers_a_request_of_the_history(store: Store) -> None:
    """The answer has the client's decision and reason."""
    await store_answer(store, "1", McpApprovalRequest("mcpr_1", "m", "f", "{}"), input="Hi")
    given = response("mcpr_1", approve=False, reason="Not now.")
    conversation = await normalize(store, "2", previous_response_id="resp_1", input=[given])
    assert conversation.input == (McpApprovalResponse("mcpa_2i0000", "mcpr_1", False, "Not now."),)


@pytest.mark.parametrize(
    ("items", "position"),
    [
        ([response()], 0),
        ([response(), request(id="r")], 0),
        ([request(id="q"), response()], 1),
        ([request(id="r"), response(), response(approve=False)], 2),
        ([request(id="r"), mcp(approval_request_id="r"), response()], 2),
    ],
)
async def test_approval_answers_one_request_once(store: Store, items: list[Json], position: int) -> None:
    """An answer to nothing, or a second one, is refused at its place, even after the call."""
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input=items)
    assert caught.value.param == f"input[{position}].approval_request_id"


async def test_answered_request_of_the_history_stays_answered(store: Store) -> None:
    """A continuation cannot answer it again."""
    await store_answer(store, "1", McpApprovalRequest("mcpr_1", "m", "f", "{}"), input="Hi")
    called = McpCall("mcp_2", "m", "f", "{}", "completed", "x", None, "mcpr_1")
    await store_answer(store, "2", called, previous_response_id="resp_1", input=[response("mcpr_1")])
    with pytest.raises(InvalidRequest, match="answered already"):
        await normalize(store, "3", previous_response_id="resp_2", input=[response("mcpr_1")])
    await normalize(store, "4", previous_response_id="resp_1", input=[response("mcpr_1", approve=False)])


async def test_stored_results_come_with_their_items(store: Store) -> None:
    """Included fields are kept as well."""
    call = CodeInterpreterCall("ci_1", "print(1)", "cntr_1", "completed")
    await store_answer(store, "1", call, input="Hi", results={"ci_1": "1\n"})
    include = ["code_interpreter_call.outputs", "web_search_call.action.sources"]
    conversation = await normalize(store, "2", previous_response_id="resp_1", input="And?", include=include)
    assert conversation.results == {"ci_1": "1\n"}
    assert conversation.include == tuple(include)
    assert (await normalize(store, "3", input="Hi")).include == ()


async def test_unstored_request_does_not_read_results(store: Store) -> None:
    """Without the store, a call shows only its own fields."""
    call = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c", "outputs": None}
    await store.close()
    with pytest.raises(StoreFailed):
        await normalize(store, input=[call])
    assert (await normalize(store, input=[call], store=False)).results == {}
