from __future__ import annotations

import json

import pytest

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import Message
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.conversation import AddItems, CreateConversation, UpdateConversation
from penstock.pipeline.protocol.params.items import ItemReference
from penstock.pipeline.protocol.params.validation import read_body
from tests.support.requests import MANY, MESSAGE, PART, Json


def read_as(shape: type[Body], body: Json) -> Body:
    return read_body(json.dumps(body).encode(), shape)


@pytest.mark.parametrize("wide", [1, MANY])
def test_items_are_read_as_in_requests(wide: int) -> None:
    items = [MESSAGE, {"id": "msg_1"}, {"role": "user", "content": [PART] * wide}]
    for shape in (CreateConversation, AddItems):
        body = read_as(shape, {"items": items, "unknown": 5, "input": 5})
        assert body == shape.model_validate({"items": items})
    assert isinstance(body, AddItems)
    assert [type(item) for item in body.items] == [Message, ItemReference, Message]


@pytest.mark.parametrize("shape", [CreateConversation, AddItems, UpdateConversation])
def test_optional_fields_may_be_missing_or_null(shape: type[Body]) -> None:
    read_as(shape, {"items": [], "metadata": None})
    if shape is CreateConversation:
        assert read_as(shape, {}) == read_as(shape, {"items": None}) == CreateConversation()


PAIRS = {f"{number:064}": "v" * 512 for number in range(16)}


@pytest.mark.parametrize(
    ("shape", "body", "words", "param"),
    [
        (CreateConversation, {"items": 5}, "valid array", "items"),
        (CreateConversation, {"items": [MESSAGE, 5]}, "valid object", "items[1]"),
        (CreateConversation, {"items": [{"type": "unheard_of"}]}, "one of 'message'", "items[0].type"),
        (CreateConversation, {"metadata": {"a": 1}}, "valid string", "metadata.a"),
        (CreateConversation, {"metadata": PAIRS | {"a": "b"}}, "at most 16", "metadata"),
        (UpdateConversation, {}, "Field required", "metadata"),
        (UpdateConversation, {"metadata": "a"}, "valid object", "metadata"),
        (AddItems, {}, "Field required", "items"),
        (AddItems, {"items": None}, "valid array", "items"),
        (AddItems, {"items": [MESSAGE] * 21}, "at most 20 items", "items"),
        (AddItems, {"items": [MESSAGE] * MANY}, "at most 20 items", "items"),
        (
            AddItems,
            {"items": [{"role": "user", "content": [PART] * MANY + [5]}]},
            "object",
            f"items[0].content[{MANY}]",
        ),
        (AddItems, [], "valid object", None),
    ],
)
def test_bad_value_is_refused_with_its_place(shape: type[Body], body: Json, words: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        read_as(shape, body)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("length", [1, MANY])
def test_values_on_the_limit_are_accepted(length: int) -> None:
    body = {"items": [{"role": "user", "content": "x" * length}] * 20, "metadata": PAIRS}
    assert read_as(CreateConversation, body) == CreateConversation.model_validate(body)
