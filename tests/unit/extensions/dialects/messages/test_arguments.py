"""What clients parse of a call's arguments is the beginning of a JSON object, whatever a model writes."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from jiter import from_json

from penstock.extensions.dialects.messages.arguments import DEEPEST, ObjectReader
from tests.support.examples import examples

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text()
)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)
OBJECTS = st.dictionaries(st.text(), VALUES)
PIECES = (
    *('{"', '"', "{", "}", "[", "]", ":", ",", " ", "\n", "a", "1", "-", ".5", "e3", "true", "nul", "\\", "\\u", "d8"),
    *("3d", "\\ude00", "\\ud83d", "\\n", "\x00", "é", "{}", '{"a":', '"b"', "NaN", "01"),
)
ALMOST_JSON = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)


def passed(text: str, cuts: list[int]) -> str:
    reader = ObjectReader()
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return "".join(reader.feed(text[start:end]) for start, end in pairwise(places))


CUTS = st.lists(st.integers(0, 1000), max_size=6)


@examples(200)
@given(OBJECTS, st.sampled_from([(", ", ": "), (",", ":")]), st.booleans(), st.sampled_from([None, 1]), CUTS)
def test_an_object_passes_whole(
    value: dict[str, Any], separators: tuple[str, str], ascii_only: bool, indent: int | None, cuts: list[int]
) -> None:
    text = json.dumps(value, separators=separators, ensure_ascii=ascii_only, indent=indent)
    if any("\ud800" <= character <= "\udfff" for character in json.dumps(value, ensure_ascii=False)):
        return
    assert passed(text, cuts) == text


@examples(500)
@given(st.one_of(ALMOST_JSON, st.text(), st.builds(str.__add__, st.just("{"), ALMOST_JSON)), CUTS)
@example('{"a": "\\ud83d\\ude00", "b": tru', [9, 12])
@example('{"a": 01}', [])
@example("{}{}", [1])
@example("[" * 5, [])
def test_any_text_becomes_the_beginning_of_an_object(text: str, cuts: list[int]) -> None:
    read = passed(text, cuts)
    assert text.startswith(read)
    assert read == passed(text, [])
    if read:
        assert isinstance(from_json(read.encode(), partial_mode=True) if read.strip() else {}, dict)


def test_arguments_end_where_they_are_too_deep() -> None:
    text = '{"a":' + "[" * 2 * DEEPEST
    assert len(passed(text, [])) < len(text)
    from_json(passed(text, []).encode(), partial_mode=True)
