from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.services import json_size
from penstock.services.json_size import JsonSize, at_most, exactly, exceeds

TEXTS = st.text(alphabet='a{}[],:"\\\n é')
VALUES = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


def size_of(value: Any) -> JsonSize:
    match value:
        case dict():
            inner = [size_of(each) for each in value.values()]
        case list():
            inner = [size_of(each) for each in value]
        case _:
            return JsonSize()
    commas = max(0, len(inner) - 1) + sum(each.commas for each in inner)
    return JsonSize(1 + sum(each.containers for each in inner), commas)


@given(VALUES, st.sampled_from([None, 0, 2]), st.booleans(), st.integers(1, 40))
def test_size_is_that_of_the_value_whatever_its_texts_hold(
    value: Any, indent: int | None, escaped: bool, piece: int
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped).encode()
    before, json_size.PIECE_BYTES = json_size.PIECE_BYTES, piece  # type: ignore[misc]
    try:
        size = exactly(text)
    finally:
        json_size.PIECE_BYTES = before  # type: ignore[misc]
    assert size == size_of(value)
    bound = at_most(text)
    assert (bound.containers >= size.containers, bound.commas >= size.commas) == (True, True)
    assert not exceeds(text, size)
    if size.containers:
        assert exceeds(text, size._replace(containers=size.containers - 1))
