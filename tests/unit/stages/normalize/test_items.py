from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec import UNSET
from openai.types.responses import ResponseInputItemParam

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.services.store.store import Store
from penstock.stages.render.harmony.messages import harmony_conversation
from tests.support.request_bodies import CLIENTS
from tests.support.requests import ALL_HOSTED, ALL_LEFT_OUT, normalize, output_of

NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f", "x": 1}], "y": 2}


def message(role: wire.Role, *parts: wire.MessagePart, item_id: str = "msg_1i0000") -> wire.Message:
    return wire.Message(item_id, "completed", role, parts)


def call(kind: str = "function_call", **fields: Any) -> dict[str, Any]:
    return {"type": kind, "call_id": "c", "name": "f", **fields}


def output(content: Any, kind: str = "function_call_output") -> dict[str, Any]:
    return {"type": kind, "call_id": "c", "output": content}


def reasoning(**fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", **fields}


REFUSAL = {"type": "refusal", "refusal": "No. "}
THOUGHT = {"type": "reasoning_text", "text": "a"}
SUMMARY = {"type": "summary_text", "text": "a"}
PARTS = [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}, REFUSAL]
TEXTS = [{"type": "input_text", "text": text} for text in ("ra", "in")]
COMMENTARY = {"role": "assistant", "status": "incomplete", "phase": "commentary", "content": PARTS}
OUTPUTS = (wire.OutputText("a"), wire.Refusal("No. "))


@pytest.mark.parametrize(
    ("sent", "item"),
    [
        ({"role": "user", "content": "Hi"}, message("user", wire.InputText("Hi"))),
        ({"role": "system", "content": "Hi"}, message("system", wire.InputText("Hi"))),
        ({"role": "developer", "content": "Hi"}, message("developer", wire.InputText("Hi"))),
        ({"role": "assistant", "content": "Hi"}, message("assistant", wire.OutputText("Hi"))),
        ({"type": "message", "role": "user", "content": []}, message("user")),
        (
            {"role": "user", "id": "m", "content": [{"type": "input_text", "text": t} for t in "ab"]},
            message("user", wire.InputText("a"), wire.InputText("b"), item_id="m"),
        ),
        (COMMENTARY, wire.Message("msg_1i0000", "incomplete", "assistant", OUTPUTS, "commentary")),
        (reasoning(id="r", summary=[], content=[THOUGHT]), wire.Reasoning("r", content=(wire.ReasoningText("a"),))),
        (
            reasoning(summary=[SUMMARY], encrypted_content=None),
            wire.Reasoning("rs_1i0000", (wire.SummaryText("a"),), UNSET, UNSET),
        ),
        (reasoning(summary=None), wire.Reasoning("rs_1i0000")),
        (
            reasoning(content=[], encrypted_content="x", status="completed"),
            wire.Reasoning("rs_1i0000", (), (), "x", "completed"),
        ),
        (call(arguments="no JSON"), wire.FunctionCall("fc_1i0000", "c", "f", "no JSON", "completed")),
        (call(id="i", status="incomplete", arguments=""), wire.FunctionCall("i", "c", "f", "", "incomplete")),
        (call(arguments="{}", namespace="n"), wire.FunctionCall("fc_1i0000", "c", "f", "{}", "completed", "n")),
        (call("custom_tool_call", input="a\nb"), wire.CustomToolCall("ctc_1i0000", "c", "f", "a\nb", "completed")),
        (
            call("custom_tool_call", id="i", input="", namespace="n"),
            wire.CustomToolCall("i", "c", "f", "", "completed", "n"),
        ),
        (
            {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}, NAMESPACE]},
            wire.AdditionalTools("at_1i0000", "developer", ({"type": "web_search"}, NAMESPACE)),
        ),
    ],
)
async def test_items_are_read_in_every_form(store: Store, sent: dict[str, Any], item: wire.Item) -> None:
    assert (await normalize(store, input=[sent, *output_of(sent)], hosted=ALL_HOSTED)).facts.input[0] == item


@pytest.mark.defect("V15")
@pytest.mark.parametrize(
    ("sent", "content", "text"),
    [
        ("rain", "rain", "rain"),
        ("", "", ""),
        (
            [{"type": "input_text", "text": t} for t in ("ra", "in")],
            (wire.InputText("ra"), wire.InputText("in")),
            "rain",
        ),
        ([], (), ""),
    ],
)
async def test_outputs_are_texts_or_lists_of_texts(store: Store, sent: Any, content: Any, text: str) -> None:
    items = [call(arguments="{}"), output(sent)]
    result = (await normalize(store, input=items)).facts.input[1]
    assert isinstance(result, wire.FunctionCallOutput)
    assert result == wire.FunctionCallOutput("fco_1i0001", "c", content, "completed")
    assert result.text == text


async def test_string_input_is_a_user_message(store: Store) -> None:
    for text in ("Hi", ""):
        assert (await normalize(store, input=text)).facts.input == (message("user", wire.InputText(text)),)


async def test_items_without_ids_get_unique_ids(store: Store) -> None:
    resolved = await normalize(store, "ab", input=[{"role": "user", "content": "Hi"}] * 17)
    assert [item.id for item in resolved.facts.input] == [f"msg_abi{position:04x}" for position in range(17)]


@pytest.mark.defect("40")
async def test_custom_tool_outputs_are_read_the_same_way(store: Store) -> None:
    for sent, content in (("x", "x"), ([{"type": "input_text", "text": "x"}], (wire.InputText("x"),))):
        items = [
            call("custom_tool_call", input=""),
            {"type": "custom_tool_call_output", "call_id": "c", "output": sent},
        ]
        result = (await normalize(store, input=items)).facts.input[1]
        assert result == wire.CustomToolCallOutput("ctco_1i0001", "c", content, "completed")


PASSED_OVER: list[dict[str, Any]] = [
    {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": "aGk="},
    {"type": "program", "id": "p_1", "call_id": "c", "code": "f()", "fingerprint": "x"},
    {"type": "program_output", "id": "po_1", "call_id": "c", "result": "2", "status": "completed"},
]
"""Items of tools that only other servers have."""


@pytest.mark.parametrize("sent", PASSED_OVER, ids=lambda sent: str(sent["id"]))
async def test_items_of_foreign_tools_are_kept_and_not_read(
    store: Store, sent: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A conversation that began at another server goes on here."""
    with caplog.at_level(logging.INFO):
        resolved = await normalize(store, input=[sent, {"role": "user", "content": "Hi"}])
    assert msgspec.json.decode(msgspec.json.encode(resolved.facts.input[0])) == sent
    (record,) = caplog.records
    assert sent["type"] in record.getMessage()
    assert [message.author for message in harmony_conversation(resolved).messages] == ["user"]


@pytest.mark.parametrize("sent", PASSED_OVER, ids=lambda sent: str(sent["id"]))
async def test_items_of_foreign_tools_may_lack_ids_and_statuses(store: Store, sent: dict[str, Any]) -> None:
    bare = {key: value for key, value in sent.items() if key not in ("id", "status")}
    (item, _) = (await normalize(store, input=[bare, {"role": "user", "content": "Hi"}])).facts.input
    completed = {"status": "completed"} if "status" in sent else {}
    assert msgspec.json.decode(msgspec.json.encode(item)) == {**sent, "id": f"{item.id_prefix}_1i0000", **completed}


async def test_unknown_item_is_refused_by_type(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="one of 'message'") as caught:
        await normalize(store, input=[{"role": "user", "content": "Hi"}, {"type": "unheard_of", "id": "x"}])
    assert caught.value.param == "input[1].type"


def test_every_sdk_item_type_is_covered() -> None:
    accepted = {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call"}
    accepted |= {"computer_call", "computer_call_output", "file_search_call"}
    accepted |= {"configuration_update", "tool_search_call", "tool_search_output"}
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


@pytest.mark.defect("B28")
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
    (_, kept) = (await normalize(store, input=[call(arguments="{}"), output(parts)])).facts.input
    assert isinstance(kept, wire.FunctionCallOutput)
    assert [type(part) for part in kept.output] == [wire.InputText, wire.InputImage]


@pytest.mark.parametrize("body", [{}, {"input": None}, {"input": []}], ids=str)
async def test_request_needs_an_input(store: Store, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="needs an input") as caught:
        await normalize(store, **body)
    assert caught.value.param == "input"
