from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from typing import TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.request import CreateResponse
from tests.support.request_bodies import EVERYTHING
from tests.support.requests import Json, read_body

Place: TypeAlias = tuple[int | str, ...]


def places(value: Json, place: Place = ()) -> Iterator[Place]:
    """Yield every place in a JSON value, the value itself included."""
    yield place
    children = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for step, child in children:
        yield from places(child, (*place, step))


def spelt(place: Place) -> str:
    """The spelling of a place in ``param``."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return "".join(steps).removeprefix(".")


def replaced(value: Json, place: Place, new: Json) -> Json:
    """A copy of the value with ``new`` at one place."""
    if not place:
        return new
    changed = inner = deepcopy(value)
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = new
    return changed


def leads_somewhere(param: str, value: Json) -> bool:
    """True if a path ends at a place in a value, or at a missing key of an object in it."""
    if not param:
        return True
    if isinstance(value, list) and (index := re.match(r"\[(\d+)\]\.?", param)):
        return int(index[1]) < len(value) and leads_somewhere(param[index.end() :], value[int(index[1])])
    if not isinstance(value, dict):
        return False
    known = [key for key in value if re.match(re.escape(key) + r"([.\[]|$)", param)]
    return (
        any(leads_somewhere(param[len(key) :].removeprefix("."), value[key]) for key in known) or param.isidentifier()
    )


TAGS = "message function_call refusal input_text as_text as_other function custom other text [key] _sent sent _envelope"
WORDS = sorted({step for place in places(EVERYTHING) for step in place if isinstance(step, str)}.union(TAGS.split()))
words = st.sampled_from(WORDS) | st.text(max_size=5)
json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)


def blamed(body: Json) -> str:
    """The ``param`` of the error for a body; empty if the error has none or the body is accepted."""
    try:
        read_body(body)
    except InvalidRequest as error:
        return error.param or ""
    return ""


@given(json_values | st.dictionaries(st.sampled_from(list(CreateResponse.model_fields)), json_values, max_size=2))
def test_any_body_is_accepted_or_refused_with_a_place_in_it(body: Json) -> None:
    assert leads_somewhere(blamed(body), body)


@given(place=st.sampled_from(list(places(EVERYTHING))), new=json_values)
def test_refusal_names_the_wrong_value(place: Place, new: Json) -> None:
    """If one value of a good body is replaced, ``param`` names it or a neighbour that its type requires."""
    body = replaced(EVERYTHING, place, new)
    if param := blamed(body):
        assert leads_somewhere(param, body)
        assert param.startswith(spelt(place if len(place) < 2 else place[:-1]))


def test_body_with_everything_is_accepted() -> None:
    """The other tests start from a good body."""
    read_body(EVERYTHING)
