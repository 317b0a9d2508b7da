"""Chat Completions: bodies become requests, and the chunks of a stream add up to the answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import Message
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.tools import WebSearchToolParam
from penstock.testing import check_dialect
from tests.support.chat_streams import CHAT, heard_by_openai
from tests.support.paths import HARMONY

USER = {"role": "user", "content": "Hi"}
CONTINUED = {"continue_final_message": True}
BODIES = [
    {"messages": [USER]},
    {"messages": [USER], "stream": True},
    {"messages": [USER], "stream": True, "stream_options": {"include_usage": True}},
]


async def test_it_keeps_all_rules() -> None:
    bodies = [json.dumps(body).encode() for body in BODIES]
    await check_dialect(CHAT, bodies, heard_by_openai, [HARMONY / "greeting", HARMONY / "function_call"])


# Requests


def asked(**fields: Any) -> CreateResponse:
    return CHAT.read(json.dumps({"messages": [USER], **fields}).encode()).request


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        CHAT.read(json.dumps({"messages": [USER], **fields}).encode())
    return error.value


def test_place_of_the_user_is_that_of_the_search() -> None:
    place = {"city": "Oslo", "country": "NO"}
    options = {"search_context_size": "low", "user_location": {"type": "approximate", "approximate": place}}
    [tool] = asked(web_search_options=options).tools or []
    same = {"type": "web_search", "search_context_size": "low", "user_location": {"type": "approximate", **place}}
    assert isinstance(tool, WebSearchToolParam)
    assert tool.sent == WebSearchToolParam.model_validate(same).sent
    assert tool.user_location is not None
    assert tool.user_location.in_words == "Oslo, NO"
    assert (
        refused(web_search_options={"user_location": {"type": "exact"}}).param
        == "web_search_options.user_location.type"
    )


CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASSISTANT: dict[str, Any] = {"role": "assistant", "tool_calls": [CALL]}
TOOL = {"role": "tool", "tool_call_id": "c1", "content": "5"}


@pytest.mark.parametrize(
    ("message", "types"),
    [
        ({"role": "system", "content": "Be brief."}, ["message"]),
        ({"role": "assistant", "content": "Yes."}, ["message"]),
        ({"role": "assistant", "content": ""}, ["message"]),
        (ASSISTANT, ["function_call"]),
        ({**ASSISTANT, "content": ""}, ["function_call"]),
        ({**ASSISTANT, "content": "Wait.", "reasoning": "Hm."}, ["reasoning", "message", "function_call"]),
        ({**ASSISTANT, "reasoning_content": "Hm."}, ["reasoning", "function_call"]),
        ({"role": "assistant", "tool_calls": [{"id": "c1", "function": CALL["function"]}]}, ["function_call"]),
        (
            {"role": "assistant", "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "x"}}]},
            ["custom_tool_call"],
        ),
    ],
)
def test_messages_become_items(message: dict[str, Any], types: list[str]) -> None:
    assert [item.type for item in asked(messages=[message, USER]).input_items] == [*types, "message"]


def test_output_is_of_the_kind_of_its_call() -> None:
    custom = {"role": "assistant", "tool_calls": [{"id": "c1", "type": "custom", "custom": {"name": "f", "input": ""}}]}
    read_items = asked(messages=[USER, ASSISTANT, TOOL, custom, TOOL]).input_items
    assert [item.type for item in read_items if item.type.endswith("output")] == [
        "function_call_output",
        "custom_tool_call_output",
    ]


@pytest.mark.parametrize(
    ("fields", "values"),
    [
        ({"max_tokens": 1}, {"max_output_tokens": 1}),
        ({"max_tokens": 1, "max_completion_tokens": 7}, {"max_output_tokens": 7}),
        ({"reasoning_effort": "none"}, {"reasoning": {"effort": "none"}}),
        ({"verbosity": "low"}, {"text": {"verbosity": "low"}}),
        ({"response_format": {"type": "json_object"}}, {"text": {"format": {"type": "json_object"}}}),
        ({"logprobs": True}, {"top_logprobs": 0, "include": ["message.output_text.logprobs"]}),
        ({"logprobs": True, "top_logprobs": 3}, {"top_logprobs": 3, "include": ["message.output_text.logprobs"]}),
        ({"store": True}, {"store": True}),
        ({"top_k": 3, "seed": 5, "stop": "END"}, {"top_k": 3, "seed": 5, "stop": "END"}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"modalities": ["text"], "prediction": {"type": "content"}, "n": 1}, {}),
    ],
)
def test_parameters_become_those_of_the_pipeline(fields: dict[str, Any], values: dict[str, Any]) -> None:
    given = asked(**fields).model_dump(exclude_unset=True, by_alias=True)
    del given["input"]
    assert given == {"store": False, **values}


def test_tools_are_those_of_the_pipeline() -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    grammar = {"syntax": "regex", "definition": "a+"}
    request = asked(
        tools=[
            {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}},
            {"type": "custom", "custom": {"name": "g", "format": {"type": "grammar", "grammar": grammar}}},
        ],
        tool_choice={
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
        },
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}},
    )
    given = request.model_dump(exclude_unset=True, by_alias=True)
    assert given["tools"] == [
        {"type": "function", "name": "f", "parameters": schema, "strict": True},
        {"type": "custom", "name": "g", "description": None, "format": {"type": "grammar", **grammar}},
    ]
    assert given["tool_choice"]["tools"] == [{"type": "function", "name": "f"}]
    assert given["text"] == {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard"}]}, "messages[0].role"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "smell"}]}]}, "messages[0].content[0].type"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content"),
        ({"messages": [{"role": "function", "name": "f"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{**ASSISTANT, "audio": {"id": "a"}}]}, "messages[0].audio"),
        ({"input": "Hi"}, "input"),
        ({"max_output_tokens": 5}, "max_output_tokens"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"audio": {"voice": "ash"}}, "audio"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"echo": True}, "echo"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"detokenize": False}, "detokenize"),
        ({"enable_response_messages": True}, "enable_response_messages"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": 1}}, "stream_options.continuous_usage_stats"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"messages": [ASSISTANT], "add_generation_prompt": True} | CONTINUED, "continue_final_message"),
        ({"messages": [USER, {"role": "assistant", "reasoning": "Hm"}]} | CONTINUED, "continue_final_message"),
        ({"n": 2, "store": True}, "n"),
    ],
)
def test_a_wrong_value_is_named(fields: dict[str, Any], param: str) -> None:
    assert refused(**fields).param == param


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"functions": [{"name": "f"}]},
            "This server does not support this parameter: send tools (at functions)",
        ),
        (
            {"function_call": {"name": "f"}},
            "This server does not support this value: send tools and tool_choice (at function_call)",
        ),
        (
            {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
            "Send tools, and calls as tool_calls.",
        ),
    ],
)
def test_old_fields_of_functions_are_refused_with_the_new_ones(fields: dict[str, Any], message: str) -> None:
    assert str(refused(**fields)) == message
    assert refused(**fields).code == "unsupported_parameter"


def test_old_choices_that_ask_for_nothing_are_read() -> None:
    assert asked(function_call="none", functions=[]) == asked()


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}])
def test_last_answer_may_be_continued(fields: dict[str, Any]) -> None:
    request = asked(messages=[USER, {"role": "assistant", "content": "Once upon"}], **CONTINUED, **fields)
    assert isinstance(request.input_items[-1], Message)
    assert request.input_items[-1].status == "incomplete"
    items = asked(messages=[USER, ASSISTANT, USER]).input_items
    assert {getattr(item, "status", None) for item in items} == {"completed"}


def test_misspelt_messages_are_named() -> None:
    with pytest.raises(InvalidRequest, match="this API has 'messages'") as error:
        CHAT.read(json.dumps({"messagez": [USER]}).encode())
    assert error.value.param == "messagez"
