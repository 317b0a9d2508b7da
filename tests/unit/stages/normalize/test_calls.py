"""Items of calls with types of their own, and their outputs."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec
import pytest
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from penstock.pipeline.errors import InvalidRequest, StoreFailed
from penstock.pipeline.protocol import items as wire
from penstock.services.store.store import Store
from tests.support.request_bodies import CLIENT_SHELLS, SERVER_TOOLS, WEATHER
from tests.support.requests import normalize, output_of, store_answer

Json: TypeAlias = dict[str, Any]

ERROR = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "No."}]}
LISTED = {"name": "f", "input_schema": {"type": "object"}, "description": "F.", "annotations": {"readOnlyHint": True}}
DELETE = {"type": "delete_file", "path": "a"}


def mcp(**fields: Any) -> Json:
    return {"type": "mcp_call", "server_label": "m", "name": "f", "arguments": "{}", **fields}


def request(**fields: Any) -> Json:
    return {**mcp(**fields), "type": "mcp_approval_request"}


def response(request_id: str = "r", **fields: Any) -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True, **fields}


def listing(**fields: Any) -> Json:
    return {"type": "mcp_list_tools", "server_label": "m", **fields}


def code(**fields: Any) -> Json:
    return {"type": "code_interpreter_call", **fields}


def web(**fields: Any) -> Json:
    return {"type": "web_search_call", **fields}


def local(action: Json, **fields: Any) -> Json:
    return {"type": "local_shell_call", "call_id": "c", "action": action, **fields}


def shell(action: Json, **fields: Any) -> Json:
    return {"type": "shell_call", "call_id": "c", "action": action, **fields}


TOOLS = (wire.ListedTool("f", {"type": "object"}, "F.", {"readOnlyHint": True}), wire.ListedTool("g", {}))
LOGS = {"type": "logs", "logs": "x"}
IMAGE = {"type": "image", "url": "u"}
EXEC = {"type": "exec", "command": [], "env": {"A": "b"}, "user": "u"}
REFERENCE = {"type": "container_reference", "container_id": "b"}
SOURCES = {"query": "x", "sources": [{"type": "url", "url": "u"}]}


@pytest.mark.parametrize(
    ("written", "item"),
    [
        (listing(), wire.McpListTools("mcpl_1i0000", "m", ())),
        (listing(id="i", tools=[LISTED, {"name": "g"}], error=None), wire.McpListTools("i", "m", TOOLS)),
        (listing(error="No."), wire.McpListTools("mcpl_1i0000", "m", (), "No.")),
        (listing(error={"code": 5}), wire.McpListTools("mcpl_1i0000", "m", (), '{"code":5}')),
        (mcp(), wire.McpCall("mcp_1i0000", "m", "f", "{}", "completed")),
        (
            mcp(id="i", output="x", error=None, status="completed", approval_request_id="r", caller=None),
            wire.McpCall("i", "m", "f", "{}", "completed", "x", None, "r"),
        ),
        (mcp(error="No."), wire.McpCall("mcp_1i0000", "m", "f", "{}", "failed", None, ERROR)),
        (mcp(error="", status="failed"), wire.McpCall("mcp_1i0000", "m", "f", "{}", "failed")),
        (mcp(error=ERROR, status="incomplete"), wire.McpCall("mcp_1i0000", "m", "f", "{}", "incomplete", None, ERROR)),
        (mcp(status="calling"), wire.McpCall("mcp_1i0000", "m", "f", "{}", "in_progress")),
        (request(), wire.McpApprovalRequest("mcpr_1i0000", "m", "f", "{}")),
        (code(code=None, container_id=None, outputs=None), wire.CodeInterpreterCall("ci_1i0000", "", "", "completed")),
        (
            code(id="i", code="1", container_id="c", status="interpreting", outputs=[{**LOGS, "y": 1}, IMAGE]),
            wire.CodeInterpreterCall("i", "1", "c", "in_progress", (LOGS, IMAGE)),
        ),
        (web(), wire.WebSearchCall("ws_1i0000", "completed", {"type": "search"})),
        (
            web(id="i", status="searching", action={"type": "open_page", "url": None}),
            wire.WebSearchCall("i", "in_progress", {"type": "open_page"}),
        ),
        (
            web(status="failed", action={"type": "scroll", "by": 5}),
            wire.WebSearchCall("ws_1i0000", "failed", {"type": "scroll", "by": 5}),
        ),
        (web(action=SOURCES), wire.WebSearchCall("ws_1i0000", "completed", {"type": "search", **SOURCES})),
        (
            local({"command": ["ls"], "timeout_ms": None}),
            wire.LocalShellCall("lsh_1i0000", "c", {"type": "exec", "env": {}, "command": ["ls"]}, "completed"),
        ),
        (local(EXEC, id="i", status="incomplete"), wire.LocalShellCall("i", "c", EXEC, "incomplete")),
        (
            shell({"commands": ["ls"], "timeout_ms": 5, "x": 1}),
            wire.ShellCall("sh_1i0000", "c", {"commands": ["ls"], "timeout_ms": 5}, "completed"),
        ),
        (
            shell({"commands": []}, id="i", environment={**REFERENCE, "x": 1}),
            wire.ShellCall("i", "c", {"commands": []}, "completed", REFERENCE),
        ),
        (
            {"type": "apply_patch_call", "call_id": "c", "operation": {**DELETE, "diff": None}, "status": "completed"},
            wire.ApplyPatchCall("apc_1i0000", "c", DELETE, "completed"),
        ),
    ],
    ids=str,
)
async def test_items_of_servers_and_shells_are_read(store: Store, written: Json, item: wire.Item) -> None:
    assert (await normalize(store, input=[written, *output_of(written)])).facts.input[0] == item


SHELL = shell({"commands": ["ls"]})
LOCAL = local({"command": ["ls"]}, id="l")
PATCH = {"type": "apply_patch_call", "call_id": "c", "operation": DELETE}


def output(kind: str, output: Any, **fields: Any) -> Json:
    return {"type": f"{kind}_output", "call_id": "c", "output": output, **fields}


RESULTS = [
    {"stdout": "x", "stderr": None, "outcome": {"type": "exit"}, "created_by": "y"},
    {"outcome": {"type": "timeout", "exit_code": None}},
]
READ_RESULTS = (
    {"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
)


@pytest.mark.parametrize(
    ("call", "written", "item"),
    [
        (SHELL, output("shell_call", []), wire.ShellCallOutput("sho_1i0001", "c", (), "completed")),
        (
            SHELL,
            output("shell_call", RESULTS, id="i", status="failed", max_output_length=9),
            wire.ShellCallOutput("i", "c", READ_RESULTS, "completed", 9),
        ),
        (LOCAL, output("local_shell_call", "x"), wire.LocalShellCallOutput("c", "x", "completed")),
        (
            LOCAL,
            output("local_shell_call", "", call_id=None, id="c", status="incomplete"),
            wire.LocalShellCallOutput("c", "", "incomplete"),
        ),
        (
            {**LOCAL, "id": "c"},
            output("local_shell_call", "", call_id=None, id="c"),
            wire.LocalShellCallOutput("c", "", "completed"),
        ),
        (LOCAL, output("function_call", "x"), wire.FunctionCallOutput("fco_1i0001", "c", "x", "completed")),
        (PATCH, output("apply_patch_call", None), wire.ApplyPatchCallOutput("apco_1i0001", "c", "completed")),
        (
            PATCH,
            output("apply_patch_call", "No.", id="i", status="failed"),
            wire.ApplyPatchCallOutput("i", "c", "failed", "No."),
        ),
    ],
    ids=str,
)
async def test_outputs_of_client_tools_are_read(store: Store, call: Json, written: Json, item: wire.Item) -> None:
    resolved = await normalize(store, input=[call, written])
    assert resolved.facts.input[1] == item
    assert len({one.id for one in resolved.facts.input}) == 2


@pytest.mark.parametrize("client", [SERVER_TOOLS, CLIENT_SHELLS], ids=["server", "client"])
async def test_items_are_sent_as_openai_python_reads_them(store: Store, client: Json) -> None:
    items = (await normalize(store, input=client["input"][1:])).facts.input
    adapter = TypeAdapter[Any](ResponseOutputItem)
    for item in items:
        adapter.validate_json(msgspec.json.encode(item), strict=False)


# Calls and their outputs


@pytest.mark.parametrize("call", [SHELL, LOCAL, PATCH, None], ids=lambda call: call and call["type"])
@pytest.mark.parametrize(
    "written",
    [
        output("shell_call", []),
        output("local_shell_call", ""),
        output("apply_patch_call", None),
        output("custom_tool_call", ""),
    ],
    ids=lambda written: written["type"],
)
async def test_output_needs_a_call_of_its_kind(store: Store, call: Json | None, written: Json) -> None:
    items = [call or WEATHER_CALL, written]
    if call and written["type"] == f"{call['type']}_output":
        await normalize(store, input=items)
        return
    with pytest.raises(InvalidRequest, match=r"No .* call with call_id 'c' comes before") as caught:
        await normalize(store, input=items)
    assert caught.value.param == "input[1].call_id"


WEATHER_CALL = {"type": "function_call", "call_id": "c", "name": WEATHER["name"], "arguments": "{}"}


async def test_local_shell_call_is_answered_once(store: Store) -> None:
    """Its output has the id of the call, so there can be only one."""
    written = output("local_shell_call", "", call_id=None, id="c")
    with pytest.raises(InvalidRequest, match="Duplicate item") as caught:
        await normalize(store, input=[LOCAL, written, written])
    assert caught.value.param == "input[2].call_id"


async def test_approval_answers_a_request_of_the_history(store: Store) -> None:
    await store_answer(store, "1", wire.McpApprovalRequest("mcpr_1", "m", "f", "{}"), input="Hi")
    written = response("mcpr_1", approve=False, reason="Not now.")
    resolved = await normalize(store, "2", previous_response_id="resp_1", input=[written])
    assert resolved.facts.input == (wire.McpApprovalResponse("mcpa_2i0000", "mcpr_1", False, "Not now."),)


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
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input=items)
    assert caught.value.param == f"input[{position}].approval_request_id"


async def test_answered_request_of_the_history_stays_answered(store: Store) -> None:
    await store_answer(store, "1", wire.McpApprovalRequest("mcpr_1", "m", "f", "{}"), input="Hi")
    called = wire.McpCall("mcp_2", "m", "f", "{}", "completed", "x", None, "mcpr_1")
    await store_answer(store, "2", called, previous_response_id="resp_1", input=[response("mcpr_1")])
    with pytest.raises(InvalidRequest, match="answered already"):
        await normalize(store, "3", previous_response_id="resp_2", input=[response("mcpr_1")])
    await normalize(store, "4", previous_response_id="resp_1", input=[response("mcpr_1", approve=False)])


async def test_stored_results_come_with_their_items(store: Store) -> None:
    call = wire.CodeInterpreterCall("ci_1", "print(1)", "cntr_1", "completed")
    await store_answer(store, "1", call, input="Hi", results={"ci_1": "1\n"})
    include = ["code_interpreter_call.outputs", "web_search_call.action.sources"]
    resolved = await normalize(store, "2", previous_response_id="resp_1", input="And?", include=include)
    assert resolved.results == {"ci_1": "1\n"}
    assert resolved.facts.include == tuple(include)
    assert (await normalize(store, "3", input="Hi")).facts.include == ()


async def test_unstored_request_does_not_read_results(store: Store) -> None:
    call = {"type": "code_interpreter_call", "id": "ci_1", "code": "1", "container_id": "c", "outputs": None}
    await store.close()
    with pytest.raises(StoreFailed):
        await normalize(store, input=[call])
    assert (await normalize(store, input=[call], store=False)).results == {}
