"""Items of a request as the server reads, completes and keeps them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec import UNSET
from openai.types.responses import ResponseInputItemParam, ResponseOutputItem
from pydantic import TypeAdapter

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.services.store.store import Store
from penstock.stages.render.harmony.messages import harmony_conversation
from tests.support.request_bodies import CLIENT_SHELLS, CLIENTS, SERVER_TOOLS
from tests.support.requests import ALL_HOSTED, ALL_LEFT_OUT, normalize, output_of

Json: TypeAlias = dict[str, Any]


def user(content: Any, **fields: Any) -> Json:
    return {"type": "message", "role": "user", "content": content, **fields}


def call(kind: str = "function_call", **fields: Any) -> Json:
    return {"type": kind, "call_id": "c", "name": "f", **fields}


def output(content: Any, kind: str = "function_call", **fields: Any) -> Json:
    return {"type": f"{kind}_output", "call_id": "c", "output": content, **fields}


def reasoning(**fields: Any) -> Json:
    return {"type": "reasoning", **fields}


def mcp(**fields: Any) -> Json:
    return {"type": "mcp_call", "server_label": "m", "name": "f", "arguments": "{}", **fields}


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


def patch(**fields: Any) -> Json:
    return {"type": "apply_patch_call", "call_id": "c", **fields}


def texts(*values: str, kind: str = "input_text") -> list[Json]:
    return [{"type": kind, "text": value} for value in values]


COMPLETED: dict[str, Json] = {
    "message": {"id": "msg_1i0000", "status": "completed"},
    "reasoning": {"id": "rs_1i0000", "summary": []},
    "function_call": {"id": "fc_1i0000", "status": "completed"},
    "function_call_output": {"id": "fco_1i0001", "status": "completed"},
    "custom_tool_call": {"id": "ctc_1i0000", "status": "completed"},
    "custom_tool_call_output": {"id": "ctco_1i0001", "status": "completed"},
    "additional_tools": {"id": "at_1i0000"},
    "mcp_list_tools": {"id": "mcpl_1i0000", "tools": []},
    "mcp_call": {"id": "mcp_1i0000", "status": "completed", "output": None, "error": None, "approval_request_id": None},
    "mcp_approval_request": {"id": "mcpr_1i0000"},
    "code_interpreter_call": {
        "id": "ci_1i0000",
        "code": "",
        "container_id": "",
        "status": "completed",
        "outputs": None,
    },
    "web_search_call": {"id": "ws_1i0000", "status": "completed", "action": {"type": "search"}},
    "local_shell_call": {"id": "lsh_1i0000", "status": "completed"},
    "local_shell_call_output": {"id": "c", "status": "completed"},
    "shell_call": {"id": "sh_1i0000", "status": "completed", "environment": None},
    "shell_call_output": {"id": "sho_1i0001", "status": "completed", "max_output_length": None},
    "apply_patch_call": {"id": "apc_1i0000"},
    "apply_patch_call_output": {"id": "apco_1i0001", "status": "completed", "output": None},
    "image_generation_call": {"id": "ig_1i0000", "status": "completed"},
    "program": {"id": "prog_1i0000"},
    "program_output": {"id": "progo_1i0001", "status": "completed"},
}
"""What the server adds to an item of each type that lacks it."""

REFUSAL = {"type": "refusal", "refusal": "No. "}
ANSWERED: list[Json] = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}, REFUSAL]
NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f", "x": 1}], "y": 2}
ERROR = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": "No."}]}
LISTED = {"name": "f", "input_schema": {"type": "object"}, "description": "F.", "annotations": {"readOnlyHint": True}}
LOGS, IMAGE = {"type": "logs", "logs": "x"}, {"type": "image", "url": "u"}
EXEC = {"type": "exec", "command": [], "env": {"A": "b"}, "user": "u"}
REFERENCE = {"type": "container_reference", "container_id": "b"}
SOURCES = {"query": "x", "sources": [{"type": "url", "url": "u"}]}
DELETE = {"type": "delete_file", "path": "a"}
LIST = {"command": ["ls"]}
PASSED_OVER: list[Json] = [
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
]
"""Items of tools that only other servers have."""

PROGRAM: Json = {"type": "program", "call_id": "c", "code": "1", "fingerprint": wire.fingerprint_of("1")}

READ: list[tuple[Json, Json]] = [
    *[({"role": role, "content": "Hi"}, user(texts("Hi"), role=role)) for role in ("user", "system", "developer")],
    (user("Hi", role="assistant"), {"content": [ANSWERED[0] | {"text": "Hi"}]}),
    (user([]), {}),
    (user(texts("a", "b"), id="m"), {}),
    (user(ANSWERED, role="assistant", status="incomplete", phase="commentary"), {}),
    (reasoning(id="r", summary=[], content=texts("a", kind="reasoning_text")), {}),
    (reasoning(summary=texts("a", kind="summary_text"), encrypted_content=None), {"encrypted_content": UNSET}),
    (reasoning(summary=None), {"summary": []}),
    (reasoning(content=[], encrypted_content="x", status="completed"), {}),
    (call(arguments="no JSON"), {}),
    (call(id="i", status="incomplete", arguments=""), {}),
    (call(arguments="{}", namespace="n"), {}),
    (call("custom_tool_call", input="a\nb"), {}),
    (call("custom_tool_call", id="i", input="", namespace="n"), {}),
    ({"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}, NAMESPACE]}, {}),
    (listing(), {}),
    (
        listing(id="i", tools=[LISTED, {"name": "g"}], error=None),
        {"tools": [LISTED, {"name": "g", "input_schema": {}}], "error": UNSET},
    ),
    (listing(error="No."), {}),
    (listing(error={"code": 5}), {"error": '{"code":5}'}),
    (mcp(), {}),
    (mcp(id="i", output="x", status="completed", approval_request_id="r", caller=None), {"caller": UNSET}),
    (mcp(error="No."), {"status": "failed", "error": ERROR}),
    (mcp(error="", status="failed"), {"error": None}),
    (mcp(error=ERROR, status="incomplete"), {}),
    (mcp(status="calling"), {"status": "in_progress"}),
    (mcp(type="mcp_approval_request"), {}),
    (code(code=None, container_id=None, outputs=None), {"code": "", "container_id": ""}),
    (
        code(id="i", code="1", container_id="c", status="interpreting", outputs=[{**LOGS, "y": 1}, IMAGE]),
        {"status": "in_progress", "outputs": [LOGS, IMAGE]},
    ),
    (web(), {}),
    (
        web(id="i", status="searching", action={"type": "open_page", "url": None}),
        {"status": "in_progress", "action": {"type": "open_page"}},
    ),
    (web(status="failed", action={"type": "scroll", "by": 5}), {}),
    (web(action=SOURCES), {"action": {"type": "search", **SOURCES}}),
    (local({**LIST, "timeout_ms": None}), {"action": {"type": "exec", "env": {}, **LIST}}),
    (local(EXEC, id="i", status="incomplete"), {}),
    (shell({"commands": ["ls"], "timeout_ms": 5, "x": 1}), {"action": {"commands": ["ls"], "timeout_ms": 5}}),
    (shell({"commands": []}, id="i", environment={**REFERENCE, "x": 1}), {"environment": REFERENCE}),
    (patch(operation={**DELETE, "diff": None}, status="completed"), {"operation": DELETE}),
    *[({key: sent[key] for key in sent if key not in ("id", "status")}, {}) for sent in PASSED_OVER],
    (PROGRAM, {}),
    (PROGRAM | {"id": "i"}, {}),
    (call(arguments="{}", caller={"type": "direct"}), {}),
]
"""Items as they are sent, and in which values the kept ones differ, but for those of `COMPLETED`."""


def kept(sent: Json, changes: Json) -> Json:
    """The item that is kept, as JSON; what is `UNSET` is left out."""
    item = {"type": "message"} | sent | changes
    whole = COMPLETED[item["type"]] | item
    return {key: value for key, value in whole.items() if value is not UNSET}


def sent_again(item: wire.Item) -> Json:
    return dict(msgspec.json.decode(msgspec.json.encode(item)))


@pytest.mark.parametrize(("sent", "changes"), READ, ids=str)
async def test_items_are_read_in_every_form(store: Store, sent: Json, changes: Json) -> None:
    item = (await normalize(store, input=[sent, *output_of(sent)], hosted=ALL_HOSTED)).facts.input[0]
    assert sent_again(item) == kept(sent, changes)


SHELL, LOCAL, PATCH = shell({"commands": ["ls"]}), local(LIST, id="l"), patch(operation=DELETE)
FUNCTION, CUSTOM = call(arguments="{}"), call("custom_tool_call", input="")
RESULTS = [
    {"stdout": "x", "stderr": None, "outcome": {"type": "exit"}, "created_by": "y"},
    {"outcome": {"type": "timeout", "exit_code": None}},
]
READ_RESULTS = [
    {"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}},
    {"stdout": "", "stderr": "", "outcome": {"type": "timeout"}},
]
NAMELESS: Json = {"call_id": UNSET}

OUTPUTS: list[tuple[Json, Json, Json]] = [
    *[
        (called, output(content, called["type"]), {})
        for called in (FUNCTION, CUSTOM)
        for content in ("rain", "", texts("ra", "in"), [])
    ],
    (SHELL, output([], "shell_call"), {}),
    (
        SHELL,
        output(RESULTS, "shell_call", id="i", status="failed", max_output_length=9),
        {"output": READ_RESULTS, "status": "completed"},
    ),
    (LOCAL, output("x", "local_shell_call"), NAMELESS),
    (LOCAL, output("", "local_shell_call", call_id=None, id="c", status="incomplete"), NAMELESS),
    ({**LOCAL, "id": "c"}, output("", "local_shell_call", call_id=None, id="c"), NAMELESS),
    (LOCAL, output("x"), {}),
    (PATCH, output(None, "apply_patch_call"), {}),
    (PATCH, output("No.", "apply_patch_call", id="i", status="failed"), {}),
    (PROGRAM, {"type": "program_output", "call_id": "c", "result": "2"}, {}),
    (PROGRAM, {"type": "program_output", "id": "i", "call_id": "c", "result": "", "status": "incomplete"}, {}),
    (FUNCTION, output("rain") | {"caller": {"type": "direct"}}, {}),
]
"""Calls of the client, their outputs as they are sent, and in which values the kept ones differ."""


@pytest.mark.defect("V15", "40")
@pytest.mark.parametrize(("called", "sent", "changes"), OUTPUTS, ids=str)
async def test_outputs_of_client_tools_are_read(store: Store, called: Json, sent: Json, changes: Json) -> None:
    before, after = (await normalize(store, input=[called, sent])).facts.input
    assert sent_again(after) == kept(sent, changes)
    assert before.id != after.id
    if isinstance(after, wire.FunctionCallOutput | wire.CustomToolCallOutput) and called != LOCAL:
        assert after.text == ("rain" if sent["output"] else "")


@pytest.mark.parametrize("client", [SERVER_TOOLS, CLIENT_SHELLS], ids=["server", "client"])
async def test_items_are_sent_as_openai_python_reads_them(store: Store, client: Json) -> None:
    items = (await normalize(store, input=client["input"][1:])).facts.input
    adapter = TypeAdapter[Any](ResponseOutputItem)
    for item in items:
        adapter.validate_json(msgspec.json.encode(item), strict=False)


async def test_string_input_is_a_user_message(store: Store) -> None:
    for text in ("Hi", ""):
        (message,) = (await normalize(store, input=text)).facts.input
        assert sent_again(message) == kept(user(texts(text)), {})


async def test_items_without_ids_get_unique_ids(store: Store) -> None:
    resolved = await normalize(store, "ab", input=[{"role": "user", "content": "Hi"}] * 17)
    assert [item.id for item in resolved.facts.input] == [f"msg_abi{position:04x}" for position in range(17)]


@pytest.mark.parametrize("sent", PASSED_OVER, ids=lambda sent: str(sent["id"]))
async def test_items_of_foreign_tools_are_kept_and_not_read(
    store: Store, sent: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A conversation that began at another server goes on here."""
    with caplog.at_level(logging.INFO):
        resolved = await normalize(store, input=[sent, {"role": "user", "content": "Hi"}])
    assert sent_again(resolved.facts.input[0]) == sent
    (record,) = caplog.records
    assert sent["type"] in record.getMessage()
    assert [message.author for message in harmony_conversation(resolved).messages] == ["user"]


async def test_unknown_item_is_refused_by_type(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="one of 'message'") as caught:
        await normalize(store, input=[{"role": "user", "content": "Hi"}, {"type": "unheard_of", "id": "x"}])
    assert caught.value.param == "input[1].type"


def test_every_sdk_item_type_is_covered() -> None:
    accepted = {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call"}
    accepted |= {"computer_call", "computer_call_output", "file_search_call"}
    accepted |= {"program", "program_output", "configuration_update", "tool_search_call", "tool_search_output"}
    accepted |= {"custom_tool_call_output", "item_reference", "additional_tools", "compaction", "compaction_trigger"}
    accepted |= {item["type"] for name in ("server tools", "client shells") for item in CLIENTS[name]["input"][1:]}
    kinds = {kind for item in get_args(ResponseInputItemParam) for kind in sdk_types(item)}
    assert kinds == accepted | {item["type"] for item in PASSED_OVER}


def sdk_types(item: type) -> Iterator[str]:
    """The values that a TypedDict of the SDK takes for ``type``."""

    def literals(annotation: Any) -> Iterator[str]:
        if get_origin(annotation) is Literal:
            yield from get_args(annotation)
        else:
            for inner in get_args(annotation):
                yield from literals(inner)

    return literals(get_type_hints(item)["type"])


@pytest.mark.defect("V12")
@pytest.mark.parametrize("client", ["agents", "pydantic-ai"])
async def test_client_histories_arrive_whole(store: Store, client: str) -> None:
    body = {**CLIENTS[client], "tool_choice": "auto"}
    kinds = [type(item) for item in (await normalize(store, **body, left_out=ALL_LEFT_OUT)).facts.input]
    assert kinds == [wire.Message, wire.Reasoning, wire.FunctionCall, wire.FunctionCallOutput]


@pytest.mark.defect("20")
@pytest.mark.parametrize("client", ["langchain", "codex", "codex apply_patch", "codex known model", "structured"])
async def test_client_requests_are_read_item_by_item(store: Store, client: str) -> None:
    sent = CLIENTS[client]["input"]
    items = (await normalize(store, **CLIENTS[client], left_out=ALL_LEFT_OUT)).facts.input
    assert len(items) == (1 if isinstance(sent, str) else len(sent))


@pytest.mark.defect("V13")
async def test_all_parts_of_a_message_are_read(store: Store) -> None:
    text = {"type": "output_text", "text": "Sorry."}
    for parts, joined in (([REFUSAL, text, text], "No. Sorry.Sorry."), ([REFUSAL], "No. "), ([], "")):
        (item,) = (await normalize(store, input=[{"role": "assistant", "content": parts}])).facts.input
        assert isinstance(item, wire.Message)
        assert (len(item.content), item.text) == (len(parts), joined)


@pytest.mark.defect("V14")
async def test_images_are_refused_with_their_place(store: Store) -> None:
    """A model that never saw what a client says must not answer; what a tool returned is kept."""
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": "data:,"}]
    said, answer = {"role": "user", "content": parts}, {"role": "assistant", "content": "Yes?"}
    for items, place in (([said], "input[0].content[1]"), ([answer, said], "input[1].content[1]")):
        with pytest.raises(InvalidRequest, match="input_image") as caught:
            await normalize(store, input=items)
        assert caught.value.param == place
    (_, after) = (await normalize(store, input=[call(arguments="{}"), output(parts)])).facts.input
    assert isinstance(after, wire.FunctionCallOutput)
    assert [type(part) for part in after.output] == [wire.InputText, wire.InputImage]


@pytest.mark.parametrize("body", [{}, {"input": None}, {"input": []}], ids=str)
async def test_request_needs_an_input(store: Store, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="needs an input") as caught:
        await normalize(store, **body)
    assert caught.value.param == "input"
