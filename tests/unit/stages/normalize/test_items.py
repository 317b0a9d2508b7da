from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
from msgspec import UNSET
from openai.types.responses import ResponseInputItemParam

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import (
    AdditionalTools,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)
from penstock.stages.services.store.store import Store
from tests.support.request_bodies import CLIENTS
from tests.support.requests import normalize

NAMESPACE = {"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f", "x": 1}], "y": 2}


@pytest.mark.parametrize(
    ("given", "item"),
    [
        ({"role": "user", "content": "Hi"}, Message("msg_1i0000", "completed", "user", (InputText("Hi"),))),
        ({"role": "system", "content": "Hi"}, Message("msg_1i0000", "completed", "system", (InputText("Hi"),))),
        ({"role": "developer", "content": "Hi"}, Message("msg_1i0000", "completed", "developer", (InputText("Hi"),))),
        ({"role": "assistant", "content": "Hi"}, Message("msg_1i0000", "completed", "assistant", (OutputText("Hi"),))),
        ({"type": "message", "role": "user", "content": []}, Message("msg_1i0000", "completed", "user", ())),
        (
            {"role": "user", "id": "m", "content": [{"type": "input_text", "text": t} for t in "ab"]},
            Message("m", "completed", "user", (InputText("a"), InputText("b"))),
        ),
        (
            {
                "role": "assistant",
                "status": "incomplete",
                "phase": "commentary",
                "content": [
                    {"type": "output_text", "text": "a", "annotations": [], "logprobs": []},
                    {"type": "refusal", "refusal": "b"},
                ],
            },
            Message("msg_1i0000", "incomplete", "assistant", (OutputText("a"), Refusal("b")), "commentary"),
        ),
        (
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
            Reasoning("r", content=(ReasoningText("a"),)),
        ),
        (
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "a"}], "encrypted_content": None},
            Reasoning("rs_1i0000", (SummaryText("a"),), UNSET, UNSET),
        ),
        ({"type": "reasoning", "summary": None}, Reasoning("rs_1i0000")),
        (
            {"type": "reasoning", "content": [], "encrypted_content": "x", "status": "completed"},
            Reasoning("rs_1i0000", (), (), "x", "completed"),
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "no JSON"},
            FunctionCall("fc_1i0000", "c", "f", "no JSON", "completed"),
        ),
        (
            {"type": "function_call", "id": "i", "status": "incomplete", "call_id": "c", "name": "f", "arguments": ""},
            FunctionCall("i", "c", "f", "", "incomplete"),
        ),
        (
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "n"},
            FunctionCall("fc_1i0000", "c", "f", "{}", "completed", "n"),
        ),
        (
            {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": "a\nb"},
            CustomToolCall("ctc_1i0000", "c", "f", "a\nb", "completed"),
        ),
        (
            {"type": "custom_tool_call", "id": "i", "call_id": "c", "name": "f", "input": "", "namespace": "n"},
            CustomToolCall("i", "c", "f", "", "completed", "n"),
        ),
        (
            {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}, NAMESPACE]},
            AdditionalTools("at_1i0000", "developer", ({"type": "web_search"}, NAMESPACE)),
        ),
    ],
)
async def test_items_are_read_in_every_form(store: Store, given: dict[str, Any], item: Item) -> None:
    """Every form of an item leads to the same item; missing fields are not made up."""
    assert (await normalize(store, input=[given])).input == (item,)


@pytest.mark.defect("V15")
@pytest.mark.parametrize(
    ("given", "output", "text"),
    [
        ("rain", "rain", "rain"),
        ("", "", ""),
        ([{"type": "input_text", "text": t} for t in ("ra", "in")], (InputText("ra"), InputText("in")), "rain"),
        ([], (), ""),
    ],
)
async def test_outputs_are_texts_or_lists_of_texts(store: Store, given: Any, output: Any, text: str) -> None:
    """The output of a call keeps its form, and reads as one text."""
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [call, {"type": "function_call_output", "call_id": "c", "output": given}]
    result = (await normalize(store, input=items)).input[1]
    assert isinstance(result, FunctionCallOutput)
    assert result == FunctionCallOutput("fco_1i0001", "c", output, "completed")
    assert result.text == text


async def test_string_input_is_a_user_message(store: Store) -> None:
    """This holds even if it is empty."""
    for text in ("Hi", ""):
        message = Message("msg_1i0000", "completed", "user", (InputText(text),))
        assert (await normalize(store, input=text)).input == (message,)


async def test_items_without_ids_get_unique_ids(store: Store) -> None:
    """An id is made of the response's id and the item's position."""
    conversation = await normalize(store, "ab", input=[{"role": "user", "content": "Hi"}] * 17)
    assert [item.id for item in conversation.input] == [f"msg_abi{position:04x}" for position in range(17)]


@pytest.mark.defect("40")
async def test_custom_tool_outputs_are_read_the_same_way(store: Store) -> None:
    """They are texts or lists of texts."""
    call = {"type": "custom_tool_call", "call_id": "c", "name": "f", "input": ""}
    for given, output in (("x", "x"), ([{"type": "input_text", "text": "x"}], (InputText("x"),))):
        items = [call, {"type": "custom_tool_call_output", "call_id": "c", "output": given}]
        result = (await normalize(store, input=items)).input[1]
        assert result == CustomToolCallOutput("ctco_1i0001", "c", output, "completed")


UNSUPPORTED_ITEMS = [
    *("compaction", "compaction_trigger", "configuration_update", "file_search_call", "computer_call"),
    *("computer_call_output", "tool_search_call", "tool_search_output", "image_generation_call"),
    *("program", "program_output"),
]


@pytest.mark.parametrize("kind", UNSUPPORTED_ITEMS)
async def test_unsupported_items_are_refused_by_type(store: Store, kind: str) -> None:
    """The error has type and place; no item is left out."""
    with pytest.raises(InvalidRequest, match=f"'{kind}'") as caught:
        await normalize(store, input=[{"role": "user", "content": "Hi"}, {"type": kind, "id": "x"}])
    assert caught.value.param == "input[1].type"


def test_every_sdk_item_type_is_covered() -> None:
    """The lists of this file name every type of input item that openai-python knows."""
    accepted = {"message", "reasoning", "function_call", "function_call_output", "custom_tool_call"}
    accepted |= {"custom_tool_call_output", "item_reference", "additional_tools"}
    accepted |= {item["type"] for name in ("server tools", "client shells") for item in CLIENTS[name]["input"][1:]}
    kinds = {kind for item in get_args(ResponseInputItemParam) for kind in sdk_types(item)}
    assert kinds == accepted | set(UNSUPPORTED_ITEMS)


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
    """A replayed history keeps its order and every kind of item in it."""
    body = {**CLIENTS[client], "tool_choice": "auto"}
    kinds = [type(item) for item in (await normalize(store, **body)).input]
    assert kinds == [Message, Reasoning, FunctionCall, FunctionCallOutput]


@pytest.mark.defect("20")
@pytest.mark.parametrize("client", ["langchain", "codex", "codex apply_patch", "codex known model", "structured"])
async def test_client_requests_are_read_item_by_item(store: Store, client: str) -> None:
    """Ids, types and nulls may be present or missing."""
    given = CLIENTS[client]["input"]
    items = (await normalize(store, **CLIENTS[client])).input
    assert len(items) == (1 if isinstance(given, str) else len(given))


@pytest.mark.defect("V13")
async def test_all_parts_of_a_message_are_read(store: Store) -> None:
    """A message may have several parts, refusals included, or none."""
    refusal, text = {"type": "refusal", "refusal": "No. "}, {"type": "output_text", "text": "Sorry."}
    for parts, said in (([refusal, text, text], "No. Sorry.Sorry."), ([refusal], "No. "), ([], "")):
        (message,) = (await normalize(store, input=[{"role": "assistant", "content": parts}])).input
        assert isinstance(message, Message)
        assert (len(message.content), message.text) == (len(parts), said)


@pytest.mark.defect("V14")
@pytest.mark.parametrize("kind", ["input_image", "input_file"])
async def test_images_and_files_are_refused_with_their_place(store: Store, kind: str) -> None:
    """A model that never saw them must not answer."""
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": kind, "image_url": "data:,"}]
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    for items, place in (
        ([{"role": "user", "content": parts}], "input[0].content[1]"),
        ([call, {"type": "function_call_output", "call_id": "c", "output": parts}], "input[1].output[1]"),
    ):
        with pytest.raises(InvalidRequest, match=kind) as caught:
            await normalize(store, input=items)
        assert caught.value.param == place


@pytest.mark.parametrize("body", [{}, {"input": None}, {"input": []}], ids=str)
async def test_request_needs_an_input(store: Store, body: dict[str, Any]) -> None:
    """An input may be missing only in a continuation."""
    with pytest.raises(InvalidRequest, match="needs an input") as caught:
        await normalize(store, **body)
    assert caught.value.param == "input"
