"""Calls and approvals in a request, and what answers them."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest

from penstock.pipeline.errors import InvalidRequest, StoreFailed
from penstock.pipeline.protocol import items as wire
from penstock.services.store.store import Store
from tests.support.request_bodies import WEATHER
from tests.support.requests import normalize, store_answer

Json: TypeAlias = dict[str, Any]

SHELL = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
LOCAL = {"type": "local_shell_call", "id": "l", "call_id": "c", "action": {"command": ["ls"]}}
PATCH = {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}}


def mcp(**fields: Any) -> Json:
    return {"type": "mcp_call", "server_label": "m", "name": "f", "arguments": "{}", **fields}


def request(**fields: Any) -> Json:
    return {**mcp(**fields), "type": "mcp_approval_request"}


def response(request_id: str = "r", **fields: Any) -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True, **fields}


def output(kind: str, output: Any, **fields: Any) -> Json:
    return {"type": f"{kind}_output", "call_id": "c", "output": output, **fields}


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
