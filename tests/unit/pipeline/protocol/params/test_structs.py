from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import pytest
from msgspec import Meta

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.items import FORMS, RawMessage
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.structs import BATCH_OBJECTS, ListOf, TextOrObject
from penstock.pipeline.protocol.params.validation import read_body
from tests.support.requests import Json


class Colour(Enum):
    RED = "red"


class Cat(msgspec.Struct, frozen=True, tag_field="kind", tag="cat", forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=2, max_length=4)] | None = None
    lives: Annotated[int, Meta(ge=0, le=9)] = 9
    chip: Annotated[str, Meta(pattern="^c-[0-9]{1,3}$")] = "c-1"
    mood: Literal["calm", "wild"] | None = None
    toys: tuple[str, ...] | str = ()
    notes: dict[str, str] | None = None


class Dog(msgspec.Struct, frozen=True, tag_field="kind", tag="dog"):
    name: str
    mood: Literal["good"] | None = None
    friends: tuple[Cat | Dog, ...] = ()


class Odd(msgspec.Struct, frozen=True):
    """Fields of which msgspec has further sentences; no object of the API has such fields today."""

    even: Annotated[int, Meta(multiple_of=2)] | None = None
    weight: Annotated[float, Meta(gt=0)] | None = None
    pair: tuple[int, int] | None = None
    few: Annotated[list[int], Meta(max_length=1)] | None = None
    keys: Annotated[dict[str, Any], Meta(min_length=1)] | None = None
    counts: dict[str, int] | None = None
    by_number: dict[int, str] | None = None
    level: Literal[1, 2] | None = None
    colour: Colour | None = None
    born: datetime | None = None
    day: date | None = None
    age: timedelta | None = None
    uuid: UUID | None = None
    price: Decimal | None = None
    photo: bytes | None = None


class Pets(Body):
    pets: Annotated[list[Any], ListOf(Cat | Dog)] | None = None
    pet: Annotated[Any, TextOrObject(Dog)] | None = None
    odd: Annotated[list[Any], ListOf(Odd)] | None = None


CODES = {
    *("invalid_type", "invalid_value", "missing_required_parameter", "unknown_parameter", "unsupported_parameter"),
    *("integer_below_min_value", "integer_above_max_value", "decimal_below_min_value", "decimal_above_max_value"),
    *("empty_string", "string_above_max_length", "empty_array", "array_above_max_length"),
    "object_above_max_properties",
}


def refusal(body: Json, shape: type[Body] = Pets) -> InvalidRequest | None:
    try:
        read_body(json.dumps(body).encode(), shape)
    except InvalidRequest as error:
        return error
    return None


REFUSED: list[tuple[Json, str, str, str]] = [
    ({"kind": "cat", "name": "x"}, "name", "empty_string", "Input should be a valid string of length >= 2"),
    (
        {"kind": "cat", "name": "x" * 5},
        "name",
        "string_above_max_length",
        "Input should be a valid string of length <= 4",
    ),
    ({"kind": "cat", "name": 5}, "name", "invalid_type", "Input should be a valid string or null"),
    ({"kind": "cat", "lives": -1}, "lives", "integer_below_min_value", "Input should be a valid integer >= 0"),
    ({"kind": "cat", "lives": 10**400}, "lives", "integer_above_max_value", "Input should be a valid integer <= 9"),
    ({"kind": "cat", "lives": True}, "lives", "invalid_type", "Input should be a valid integer"),
    (
        {"kind": "cat", "chip": "x"},
        "chip",
        "invalid_value",
        "Input should be a valid string matching regex '^c-[0-9]{1,3}$'",
    ),
    ({"kind": "cat", "mood": "{x}"}, "mood", "invalid_value", "Input should be one of 'calm', 'wild'"),
    ({"kind": "cat", "mood": 5}, "mood", "invalid_value", "Input should be one of 'calm', 'wild'"),
    ({"kind": "cat", "toys": 5}, "toys", "invalid_type", "Input should be a valid string or array"),
    ({"kind": "cat", "toys": ["a", 5]}, "toys[1]", "invalid_type", "Input should be a valid string"),
    ({"kind": "cat", "notes": {"a": "b", "c.d": 5}}, "notes.c.d", "invalid_type", "Input should be a valid string"),
    ({"kind": "cat", "x": 5}, "x", "unknown_parameter", "Extra inputs are not permitted"),
    ({"kind": "cat", "a\nb": 5}, "a\nb", "unknown_parameter", "Extra inputs are not permitted"),
    ({"kind": "cat", "a` - at `$[7].b": 5}, "a` - at `$[7].b", "unknown_parameter", "Extra inputs are not permitted"),
    ({"kind": "dog"}, "name", "missing_required_parameter", "Field required"),
    ({}, "kind", "missing_required_parameter", "Field required"),
    ({"kind": "cow"}, "kind", "invalid_value", "Input should be one of 'cat', 'dog'"),
    ({"kind": 5}, "kind", "invalid_value", "Input should be one of 'cat', 'dog'"),
    (
        {"kind": "dog", "name": "d", "friends": [{"kind": "dog", "name": "d", "mood": "calm"}]},
        "friends[0].mood",
        "invalid_value",
        "Input should be one of 'good'",
    ),
]


@pytest.mark.parametrize(("pet", "path", "code", "message"), REFUSED, ids=lambda part: str(part)[:40])
@pytest.mark.parametrize("before", [0, BATCH_OBJECTS + 1])
def test_wrong_field_is_named_with_what_is_expected(pet: Json, path: str, code: str, message: str, before: int) -> None:
    refused = refusal({"pets": [{"kind": "cat"}] * before + [pet]})
    assert refused is not None
    param = f"pets[{before}].{path}"
    assert (refused.param, refused.code, str(refused)) == (param, code, f"{message} (at {param})")


@pytest.mark.parametrize(
    ("pet", "param", "message"),
    [
        (5, "pet", "Input should be a valid object"),
        ({"kind": "dog"}, "pet.name", "Field required"),
        ({"kind": "cat"}, "pet.kind", "Input should be one of 'dog'"),
        ({"name": "d", "friends": [{"kind": "cat", "lives": -1}]}, "pet.friends[0].lives", "valid integer >= 0"),
    ],
)
def test_wrong_field_of_one_object_is_named(pet: Json, param: str, message: str) -> None:
    refused = refusal({"pet": pet})
    assert refused is not None
    assert refused.param == param
    assert message in str(refused)


@pytest.mark.parametrize("field", Odd.__struct_fields__)
def test_any_sentence_of_msgspec_is_a_refusal_with_its_place(field: str) -> None:
    for value in (3, -1, 2**70, 1e300, "x", "2", "", "2026-02-30", [], [1, 2, "x"], {}, {"a": "b"}, {"x": 1.5}, True):
        if refused := refusal({"odd": [{field: value}]}):
            assert str(refused.param).startswith(f"odd[0].{field}")
            assert refused.code in CODES
            assert str(refused).startswith("Input ")
            assert "msgspec" not in str(refused)


HOSTILE: list[Json] = [
    *(None, True, 1.5, -5, 2**70, 10**400, "", "\x00", "\ud800", "wizard", "a\nb", "a` - at `$[3].z", "x" * 10_000),
    *([], [None], [5], {}, {"odd": [1]}, {"a\nb": 5}, {"type": "{x}"}, [{"type": None}], [{"role": "wizard"}]),
]


@pytest.mark.parametrize(("parameter", "kinds"), [("input", FORMS), ("previous_input_messages", [RawMessage])])
def test_hostile_value_in_any_field_is_read_or_refused_with_its_place(parameter: str, kinds: Any) -> None:
    for kind in kinds:
        tag = {kind.__struct_config__.tag_field: kind.__struct_config__.tag} if kind.__struct_config__.tag else {}
        for field in (*kind.__struct_encode_fields__, *tag, "a\nb", "a` - at `$[3].z"):
            for value in HOSTILE:
                if refused := refusal({parameter: [tag | {field: value}]}, CreateResponse):
                    assert str(refused.param).startswith(f"{parameter}[0]")
                    assert refused.code in CODES
                    assert f"(at {refused.param})" in str(refused)
                    assert len(str(refused)) < 1000
