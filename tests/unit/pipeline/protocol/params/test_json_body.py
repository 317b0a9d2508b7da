"""Bodies of any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import BodyTooLarge, InvalidRequest
from penstock.pipeline.protocol.params.json_body import MOST_COMMAS, PIECE_BYTES, read_json

Json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
)


@given(Json, st.integers(1, 40))
def test_body_equals_what_json_reads(value: Any, times: int) -> None:
    body = {"many": [value] * times * 20, "one": value, "long": "x" * PIECE_BYTES}
    assert read_json(json.dumps(body).encode()) == body


@pytest.mark.parametrize(
    "body", [b"[" + b"{}," * (MOST_COMMAS + 1) + b"{}]", b'{"a":"' + b"," * (MOST_COMMAS + 1) + b'"}']
)
def test_body_with_too_many_commas_is_refused(body: bytes) -> None:
    """Values are counted before any of them is made, which would take gigabytes."""
    with pytest.raises(BodyTooLarge, match="1,000,000 commas"):
        read_json(body)


def test_text_may_have_commas_up_to_limit() -> None:
    text = "," * MOST_COMMAS
    assert read_json(json.dumps(text).encode()) == text


@pytest.mark.parametrize("flaw", [b"]", b"{", b",", b"x", b'"'])
def test_long_body_with_a_flaw_is_refused(flaw: bytes) -> None:
    some = b'{"a": [1, 2]},' * PIECE_BYTES
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        read_json(b"[" + some + flaw + some + b"{}]")
