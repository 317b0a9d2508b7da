from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.protocol.events import Event, OutputItemDone, ResponseCompleted
from penstock.pipeline.protocol.items import Logprob, Message, OutputText, TopLogprob
from penstock.pipeline.protocol.pieces import MANY_ELEMENTS, in_pieces, is_long
from tests.support.stored_responses import response

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
MANY = MANY_ELEMENTS + 1


def longer(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and objects of some values, or of the same ones many times."""
    lists = st.lists(values, max_size=3)
    objects = st.dictionaries(st.text(), values, max_size=3)
    many = objects.map(lambda few: few | {f"{n} {name}": few[name] for name in few for n in range(MANY)})
    return lists | lists.map(lambda few: few * MANY) | lists.map(tuple) | objects | many


@given(st.recursive(SCALARS, longer, max_leaves=6))
def test_value_is_written_as_before(value: Any) -> None:
    assert msgspec.json.encode(in_pieces(value)) == msgspec.json.encode(value)


def scored(tokens: int) -> tuple[Logprob, ...]:
    top = tuple(TopLogprob("b", (98,), -float(number)) for number in range(20))
    return tuple(Logprob("a", (97,), -float(number), top) for number in range(tokens))


@pytest.mark.parametrize("tokens", [0, MANY_ELEMENTS, MANY, 3 * MANY_ELEMENTS + 5])
def test_event_is_written_as_before(tokens: int) -> None:
    part = OutputText("a" * tokens, logprobs=scored(tokens))
    message = Message("msg_1", "completed", "assistant", (part,))
    ended = response(output=(message,), tools=({"type": "function", "name": "f"},) * tokens)
    events: list[Event] = [OutputItemDone(1, 0, message), ResponseCompleted(2, ended)]
    written = [in_pieces(event) for event in events]
    assert [msgspec.json.encode(event) for event in written] == [msgspec.json.encode(event) for event in events]
    assert is_long(ended) == (tokens > MANY_ELEMENTS)
    assert (written == events) == (tokens <= MANY_ELEMENTS)
