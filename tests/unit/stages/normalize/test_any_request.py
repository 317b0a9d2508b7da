from __future__ import annotations

import json
from contextlib import aclosing
from typing import Any, TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.core import source_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_request
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.recall import Recall
from tests.support.examples import examples
from tests.support.request_bodies import CLIENTS, EVERYTHING
from tests.support.requests import ALL_HOSTED
from tests.support.toolboxes import toolbox_of

Json: TypeAlias = Any


def parts(value: Json) -> list[Json]:
    """A JSON value and all values inside it."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [value, *(part for child in inner for part in parts(child))]


PARTS = [part for body in (EVERYTHING, *CLIENTS.values()) for part in parts(body)]
KEYS = sorted({key for part in PARTS if isinstance(part, dict) for key in part})
words = st.sampled_from(KEYS) | st.text(max_size=5)
json_values: st.SearchStrategy[Json] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
    | st.sampled_from(PARTS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)
bodies = st.dictionaries(st.sampled_from(list(CreateResponse.model_fields)), json_values, max_size=4)


async def understood(body: Json) -> ResolvedRequest | InvalidRequest:
    """The conversation or the refusal for a body; any other exception propagates."""
    try:
        request = read_request(json.dumps(body).encode())
        normalize = normalizing(
            Recall(store=Store(NullDatabase()), models=("gpt-oss-20b",)), toolbox_of(ALL_HOSTED, {"docs"})
        )
        async with aclosing(normalize(source_of([request]))) as conversations:
            return await anext(conversations)
    except InvalidRequest as error:
        return error


@examples(150)
@given(body=bodies, usual=st.sampled_from([{}, {"input": "Hi"}, *CLIENTS.values()]))
async def test_any_request_is_accepted_or_refused(body: Json, usual: Json) -> None:
    result = await understood(usual | body)
    if isinstance(result, InvalidRequest):
        assert 400 <= result.status < 500
        assert result.param
        assert len(result.message) < 900
