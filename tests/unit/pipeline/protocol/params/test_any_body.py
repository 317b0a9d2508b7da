from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.protocol.params.vector_stores import AddBatch, CreateVectorStore, SearchVectorStore
from tests.support.request_bodies import EVERYTHING
from tests.support.requests import Json

EQUAL = {"type": "eq", "key": "a", "value": "b"}
AMONG = {"type": "in", "key": "a", "value": ["b", 1, True]}
FILTERS = {"type": "and", "filters": [EQUAL, {"type": "or", "filters": [AMONG, EQUAL]}]}
CHUNKS = {"type": "static", "static": {"max_chunk_size_tokens": 200, "chunk_overlap_tokens": 50}}
WEB_FILTERS = {"allowed_domains": ["a.org"]}
APPROVALS = {"never": {"tool_names": ["t"]}}
TOOLS = [
    {"type": "function", "name": "f", "function": {"name": "g"}},
    {"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": "start: A"}},
    {"type": "file_search", "vector_store_ids": ["vs"], "filters": FILTERS, "ranking_options": {"ranker": "auto"}},
    {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file"]}},
    {"type": "shell", "environment": {"type": "container_reference", "container_id": "c"}},
    {"type": "web_search", "filters": WEB_FILTERS},
    {"type": "mcp", "server_label": "m", "allowed_tools": ["t"], "require_approval": APPROVALS},
]
CHOICE = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}
FILE = {"file_id": "a", "attributes": {"a": 1, "static": "b"}, "chunking_strategy": CHUNKS}

GOOD: Sequence[tuple[type[Body], Json]] = (
    (CreateResponse, EVERYTHING),
    (CreateResponse, {"input": "Hi", "tools": TOOLS, "tool_choice": CHOICE}),
    (SearchVectorStore, {"query": ["a", "b"], "filters": FILTERS, "ranking_options": {"score_threshold": 0.5}}),
    (CreateVectorStore, {"name": "n", "file_ids": ["a"], "chunking_strategy": CHUNKS, "metadata": {"a": "b"}}),
    (AddBatch, {"files": [FILE]}),
)
"""Bodies that are accepted.  Some have a key with the name of a type: no branch of a union is taken for a place."""

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
    changed = inner = json.loads(json.dumps(value))
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


def blamed(shape: type[Body], body: Json) -> str:
    """The ``param`` of the error for a body; empty if the error has none or the body is accepted."""
    try:
        read_body(json.dumps(body).encode(), shape)
    except InvalidRequest as error:
        return error.param or ""
    return ""


@given(json_values | st.dictionaries(st.sampled_from(list(CreateResponse.model_fields)), json_values, max_size=2))
def test_any_body_is_accepted_or_refused_with_a_place_in_it(body: Json) -> None:
    assert leads_somewhere(blamed(CreateResponse, body), body)


@pytest.mark.parametrize(("shape", "good"), GOOD, ids=[shape.__name__ for shape, _ in GOOD])
@given(data=st.data())
def test_refusal_names_the_wrong_value(shape: type[Body], good: Json, data: st.DataObject) -> None:
    """If one value of a good body is replaced, ``param`` names it or a neighbour that its type requires."""
    place, new = data.draw(st.sampled_from(list(places(good)))), data.draw(json_values)
    body = replaced(good, place, new)
    if param := blamed(shape, body):
        assert leads_somewhere(param, body)
        assert param.startswith(spelt(place if len(place) < 2 else place[:-1]))


@pytest.mark.parametrize(("shape", "good"), GOOD, ids=[shape.__name__ for shape, _ in GOOD])
def test_good_body_is_accepted(shape: type[Body], good: Json) -> None:
    """The other tests start from a good body."""
    read_body(json.dumps(good).encode(), shape)


@pytest.mark.parametrize(("shape", "good"), GOOD, ids=[shape.__name__ for shape, _ in GOOD])
@given(data=st.data())
def test_program_is_refused_as_a_client_is(shape: type[Body], good: Json, data: st.DataObject) -> None:
    fields = {name: value for name, value in good.items() if name in shape.model_fields}
    place, new = data.draw(st.sampled_from([each for each in places(fields) if each])), data.draw(json_values)
    body = replaced(fields, place, new)

    def refused(build: Callable[[], object]) -> tuple[str, str | None, str | None] | None:
        try:
            build()
        except InvalidRequest as error:
            return str(error), error.param, error.code
        return None

    assert refused(lambda: shape(**body)) == refused(lambda: read_body(json.dumps(body).encode(), shape))


def test_error_of_an_object_that_needs_one_of_several_fields_names_the_first() -> None:
    with pytest.raises(InvalidRequest, match="file_ids or files") as refused:
        read_body(b"{}", AddBatch)
    assert refused.value.param == "file_ids"
