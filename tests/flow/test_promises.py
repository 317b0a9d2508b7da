"""Formats and calls that a request requires, if the engine's grammar breaks down in the middle.

Without its grammar, the engine lets the model only end its turn.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.protocol.items import CustomToolCall, FunctionCall
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.event_streams import final, harmony_pipeline, run_request

Json = dict[str, Any]

COUNT: Json = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
STRICT: Json = {"type": "function", "name": "count", "parameters": COUNT, "strict": True}
LOOSE: Json = {"type": "function", "name": "look"}
PATCH: Json = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "a+"}}
IN_JSON: Json = {"text": {"format": {"type": "json_schema", "name": "count", "schema": COUNT, "strict": True}}}

THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.count <|constrain|>json<|message|>{"n":'
MORE = " one two three four five six"
LOOKED = "<|channel|>commentary to=functions.look json<|message|>{"


async def response_from(markup: str, body: Json, size: int = 1) -> Response:
    engine = ScriptedEngine(Script(load_encoding().encode_markup(markup), chunk_size=size))
    pipeline = harmony_pipeline(engine)
    return final(await run_request(pipeline, {"input": "?", **body}))


BROKEN: dict[str, tuple[Json, str]] = {
    "a strict call": ({"tools": [STRICT]}, THOUGHT + CALLED),
    "a call that must be": ({"tools": [LOOSE], "tool_choice": "required"}, THOUGHT + LOOKED),
    "the one call that may be": ({"tools": [LOOSE], "parallel_tool_calls": False}, THOUGHT + LOOKED),
    "a call with a grammar": ({"tools": [PATCH]}, f"{THOUGHT}<|channel|>commentary to=functions.patch code<|message|>"),
    "an answer in a schema": (IN_JSON, f'{THOUGHT}<|channel|>final<|message|>{{"n":'),
    "an answer in any JSON": (
        {"text": {"format": {"type": "json_object"}}},
        f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>",
    ),
}


@pytest.mark.defect("22")
@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(("body", "markup"), BROKEN.values(), ids=BROKEN)
async def test_broken_promise_fails_the_response(body: Json, markup: str, size: int) -> None:
    response = await response_from(f"{markup}<|return|>", body, size)
    assert response.status == "failed"
    assert response.error is not None
    assert "could not hold the model to the" in response.error.message
    assert [item.status for item in response.output] == ["completed", "incomplete"]


@pytest.mark.parametrize("markup", ["", f"{THOUGHT}<|channel|>", THOUGHT.partition("<|end|>")[0]])
async def test_missing_required_call_fails_the_response(markup: str) -> None:
    response = await response_from(f"{markup}<|return|>", {"tools": [LOOSE], "tool_choice": "required"})
    assert response.status == "failed"


@pytest.mark.parametrize(("body", "markup"), BROKEN.values(), ids=BROKEN)
async def test_promise_cut_by_the_token_limit_is_incomplete(body: Json, markup: str) -> None:
    """The client's own limit is no failure."""
    limit = len(load_encoding().encode_markup(f"{markup}{MORE}"))
    response = await response_from(f"{markup}{MORE} ten", {**body, "max_output_tokens": max(16, limit)})
    assert response.status == "incomplete"


async def test_turn_that_ends_as_promised_completes() -> None:
    body = {"tools": [STRICT, PATCH], **IN_JSON}
    response = await response_from(f'{THOUGHT}<|channel|>final<|message|>{{"n":1}}<|return|>', body)
    assert response.status == "completed"
    patch = "<|end|><|start|>assistant to=functions.patch<|channel|>commentary code<|message|>aa<|call|>"
    response = await response_from(f"{CALLED}1}}{patch}", body)
    assert response.status == "completed"
    assert [type(item) for item in response.output] == [FunctionCall, CustomToolCall]
