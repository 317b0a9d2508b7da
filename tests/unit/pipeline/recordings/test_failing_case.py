"""The request of a failing case: it repeats every parameter that the response echoes."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.protocol.response import ECHOED
from penstock.pipeline.recordings.failing_case import request_of
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from tests.support.requests import MODEL, normalize

SENT: dict[str, Any] = {
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tool_calls": 3,
    "text": {"format": {"type": "json_object"}},
    "reasoning": {"effort": "high", "summary": None},
    "truncation": "auto",
    "max_output_tokens": 16,
    "top_logprobs": 3,
    "temperature": 0.5,
    "top_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "metadata": {"order": "17"},
    "prompt_cache_key": "k1",
    "prompt_cache_retention": "24h",
    "safety_identifier": "s1",
    "user": "u1",
}


def test_each_parameter_is_sent() -> None:
    assert {*SENT, "previous_response_id"} == {*ECHOED}  # the items of an earlier response are sent with the input


@pytest.mark.parametrize("name", SENT)
async def test_request_repeats_the_parameter(name: str) -> None:
    body = {each: SENT[each] for each in ({name, "tools"} if name == "tool_choice" else {name})}
    again = request_of(await normalize(Store(NullDatabase()), input="Hi", **body))
    assert again == {"model": MODEL, "input": again["input"], **body}
