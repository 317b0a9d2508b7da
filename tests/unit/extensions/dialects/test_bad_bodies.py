"""Wrong values anywhere in a body of Chat Completions, Completions or Messages: the refusal names the place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.dialects.named import spoken
from penstock.extensions.dialects.chat.body import ChatBody
from penstock.extensions.dialects.completions.body import CompletionBody
from penstock.extensions.dialects.messages.body import CreateMessage
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import REFUSED, UNUSED, Body
from penstock.pipeline.protocol.params.tools import AnyTool

Place: TypeAlias = tuple[str | int, ...]

DIALECTS = {dialect.name: dialect for dialect in spoken()}

SCHEMA: Any = {"type": "object", "properties": {"x": {"type": "integer"}}}
TEXT: Any = {"type": "text", "text": "Hi"}
GENERATING: Any = {
    "model": "tiny",
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
    "metadata": {"a": "b"},
    "user": "u",
    "safety_identifier": "s",
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "seed": 5,
    "stop": ["END"],
    "stop_token_ids": [5],
    "include_stop_str_in_output": False,
    "ignore_eos": False,
    "min_tokens": 1,
    "bad_words": ["bad"],
    "logit_bias": {"5": 1},
    "allowed_token_ids": [5],
    "logprob_token_ids": [5],
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "structured_outputs": {"regex": "a+"},
    "thinking_token_budget": -1,
    "watermarking": False,
    "vllm_xargs": {"x": 1},
    "cache_salt": "salt",
    "priority": 0,
    "request_id": "r",
    "session_id": "s",
    "mm_payload": "none",
    "return_mm_kwargs": False,
    "return_token_ids": True,
    "return_weight_versions": True,
}
"""The parameters that chats and completions share."""
COMPLETION: Any = {
    **GENERATING,
    "prompt": "Hi",
    "max_tokens": 100,
    "n": 1,
    "best_of": 1,
    "logprobs": 2,
    "echo": True,
    "add_special_tokens": True,
    "length_penalty": 1,
    "routed_experts_prompt_start": 0,
}
CHAT: Any = {
    **GENERATING,
    "messages": [
        {"role": "system", "content": "Be brief.", "name": "s"},
        {"role": "developer", "content": [TEXT], "name": "d"},
        {
            "role": "user",
            "content": [TEXT, {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}],
            "name": "u",
        },
        {
            "role": "assistant",
            "content": "Wait.",
            "name": "a",
            "reasoning": "Hm.",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "custom", "custom": {"name": "g", "input": "x"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
        {"role": "tool", "tool_call_id": "c2", "content": [TEXT]},
        {
            "role": "assistant",
            "content": [TEXT, {"type": "refusal", "refusal": "No."}],
            "refusal": "No.",
            "reasoning_content": "So.",
        },
        {"role": "user", "content": "And?"},
    ],
    "n": 1,
    "max_completion_tokens": 100,
    "max_tokens": 100,
    "tools": [
        {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}},
        {
            "type": "custom",
            "custom": {
                "name": "g",
                "description": "d",
                "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}},
            },
        },
    ],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True},
    },
    "reasoning_effort": "low",
    "verbosity": "low",
    "logprobs": True,
    "top_logprobs": 2,
    "web_search_options": {"search_context_size": "low"},
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "store": False,
    "include_reasoning": True,
    "chat_template": "{{ messages }}",
    "chat_template_kwargs": {"x": True},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "function_call": "auto",
    "length_penalty": 1,
    "routed_experts_prompt_start": 0,
}
MESSAGES: Any = {
    "model": "tiny",
    "max_tokens": 100,
    "stream": True,
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "watermarking": False,
    "vllm_xargs": {"x": 1},
    "cache_salt": "salt",
    "return_token_ids": True,
    "return_weight_versions": True,
    "logprobs": True,
    "system": [TEXT],
    "messages": [
        {
            "role": "user",
            "content": [
                TEXT,
                {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
                {"type": "document", "source": {"type": "text", "data": "x"}, "title": "t", "context": "c"},
                {"type": "search_result", "source": "s", "title": "t", "content": [TEXT]},
            ],
        },
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "d"},
                TEXT,
                {"type": "tool_use", "id": "c1", "name": "f", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [TEXT], "is_error": False}],
        },
        {"role": "system", "content": "Note."},
        {"role": "assistant", "content": "Five."},
        {"role": "user", "content": "And?"},
    ],
    "tools": [
        {
            "type": "custom",
            "name": "f",
            "description": "d",
            "input_schema": SCHEMA,
            "strict": True,
            "defer_loading": False,
        },
        {
            "type": "web_search_20250305",
            "max_uses": 2,
            "allowed_domains": ["a.org"],
            "user_location": {"type": "approximate", "city": "Paris"},
        },
    ],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": False},
    "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
    "inference_geo": "global",
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "output_format": {"type": "json_schema", "schema": SCHEMA},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "container": {"id": f"container_{'0' * 36}"},
}
BODIES = {"chat": CHAT, "completions": COMPLETION, "messages": MESSAGES}
"""A body with all parameters that a dialect reads, by its name."""

FREE = re.compile(r".*\.(?:properties\b.*|parameters\.type|schema\.type|x)")
"""The places in schemas, which are checked where they are compiled, and those that are for templates and samplers."""

WRONG: list[Any] = [
    *({"odd": [1]}, [[1]], None, True, 1.5, -5, 10**30, "", "\x00", "\ud800", "wizard", "x" * 100_000),
    *([], [None], {}, [{"type": "wizard"}], {"type": None}, [{"role": "wizard"}]),
]


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


def at(body: Any, place: Place) -> Any:
    for key in place:
        body = body[key]
    return body


def written(place: Place) -> str:
    """The place as a refusal names it."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in place).removeprefix(".")


PLACES = [
    (name, place) for name, body in BODIES.items() for place in places(body) if not FREE.fullmatch(written(place))
]
LEAVES = [(name, place) for name, place in PLACES if not isinstance(at(BODIES[name], place), dict | list)]


@pytest.mark.parametrize("dialect", BODIES)
def test_tools_are_kept_as_a_client_of_the_responses_api_sends_them(dialect: str) -> None:
    tools = DIALECTS[dialect].read(json.dumps(BODIES[dialect]).encode()).request.tools or ()
    kept = [json.loads(json.dumps(tool.sent)) for tool in tools]
    assert [AnyTool.model_validate(tool).root for tool in kept] == list(tools)


def refusal(dialect: str, body: Any) -> InvalidRequest | None:
    try:
        DIALECTS[dialect].read(json.dumps(body).encode())
    except InvalidRequest as error:
        return error
    return None


def changed(body: Any, place: Place, value: Any) -> Any:
    """The body with another value at a place, or without it if the value is ``...``."""
    body = json.loads(json.dumps(body))  # a copy in which no two places are the same object
    holder = at(body, place[:-1])
    if value is ...:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return body


APART = frozenset({"compaction", "thread"})
"""Parameters of Messages that exclude some of the others."""


@pytest.mark.parametrize(
    ("dialect", "body"), [("chat", ChatBody), ("completions", CompletionBody), ("messages", CreateMessage)]
)
def test_each_parameter_is_tried(dialect: str, body: type[Body]) -> None:
    unread = {name for name, field in body.model_fields.items() if {REFUSED, UNUSED} & set(field.metadata)}
    assert body.model_fields.keys() - unread - APART == BODIES[dialect].keys()


@pytest.mark.parametrize("dialect", BODIES)
def test_whole_body_is_read(dialect: str) -> None:
    assert refusal(dialect, BODIES[dialect]) is None


@pytest.mark.parametrize(
    ("dialect", "place"), LEAVES, ids=lambda part: part if isinstance(part, str) else written(part)
)
def test_an_object_is_refused_where_a_value_belongs(dialect: str, place: Place) -> None:
    refused = refusal(dialect, changed(BODIES[dialect], place, {"odd": [1]}))
    assert refused is not None
    assert refused.param in (written(place), f"{written(place)}.type")  # where an object might belong, it has none
    assert f"(at {refused.param})" in refused.message


@given(st.sampled_from(PLACES), st.sampled_from([*WRONG, ...]))
def test_a_refusal_names_the_place_of_the_wrong_value(where: tuple[str, Place], value: Any) -> None:
    dialect, place = where
    refused = refusal(dialect, changed(BODIES[dialect], place, value))
    if refused is not None:
        assert refused.param is not None
        related = {"stream": "stream_options", "logprobs": "top_logprobs"}  # the second needs the first
        named = [written(place), related.get(written(place), "")]
        assert any(refused.param.startswith(name) or name.startswith(refused.param) for name in named)
        assert "as_" not in refused.param, "it names a branch of a type of ours"
        assert "\n" not in refused.message
        assert len(refused.message) < 500
