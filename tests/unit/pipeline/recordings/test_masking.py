"""Redacted texts, and names that a user chose."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline.frames import ChatTurn
from penstock.pipeline.protocol.items import FunctionCall, Program, caller_named, fingerprint_of
from penstock.pipeline.recordings.masking import mask, mask_json, mask_texts
from tests.support.stored_responses import response

SCHEMA = {"type": "object", "properties": {"Alice": {"const": "Bob"}}}


@given(st.text())
def test_shape_has_the_length_of_its_text(text: str) -> None:
    shaped = mask(text)
    assert len(shaped) == len(text)
    assert mask(shaped) == shaped
    assert all(old == new or (new in "x0" and not old.isspace()) for old, new in zip(text, shaped, strict=True))
    assert not {character for character in shaped if character.isalnum()} - {"x", "0"}


def test_template_variables_are_left_out() -> None:
    """Their names are left out too, as an operator or a client chose them."""
    assert mask_texts(ChatTurn({"customer": "Alice"})).variables == {}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "name": "f", "parameters": SCHEMA},
        {"type": "shell", "environment": {"type": "container_auto", "env": {"ALICE": "Bob"}}},
    ],
)
def test_names_inside_tools_are_left_out(tool: dict[str, object]) -> None:
    masked = mask_texts(replace(response(), tools=[tool]))
    assert "lice" not in str(masked).lower()
    assert masked.tools[0]["type"] == tool["type"]


def test_answer_schema_is_left_out_and_its_name_stays() -> None:
    form = {"type": "json_schema", "name": "person", "schema": SCHEMA}
    assert mask_texts(replace(response(), text={"format": form})).text == {"format": form | {"schema": {}}}


def test_program_keeps_the_fingerprint_of_its_code() -> None:
    """A replay of the masked code makes the same item."""
    masked = mask_texts(Program("prog_1", "call_1", "print(42)", fingerprint_of("print(42)")))
    assert masked == Program("prog_1", "call_1", "xxxxx(00)", fingerprint_of("xxxxx(00)"))


def test_caller_stays() -> None:
    call = FunctionCall("fc_1", "call_2", "f", "{}", "completed", caller=caller_named("call_1"))
    assert mask_texts(call) == call


def test_code_of_an_error_stays_and_that_of_a_call_does_not() -> None:
    error = {"message": "Alice", "type": "invalid_request_error", "code": "not_found"}
    assert mask_json(error) == error | {"message": "xxxxx"}
    assert mask_json({"type": "program", "code": "alice()"}) == {"type": "program", "code": "xxxxx()"}
