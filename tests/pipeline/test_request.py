from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from copy import deepcopy
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InvalidRequest
from pipeline.protocol.given_items import FunctionCallItem, ItemReference, MessageItem
from pipeline.protocol.given_tools import CustomTool, FunctionTool, GrammarFormat, NamespaceTool, OtherTool, TextFormat
from pipeline.protocol.reading import read_request
from pipeline.protocol.request import CreateResponse
from tests.pipeline.bodies import CLIENTS, CODEX, EVERYTHING

Json: TypeAlias = Any
Place: TypeAlias = tuple[int | str, ...]


def read(body: Json) -> CreateResponse:
    return asyncio.run(read_request(json.dumps(body).encode()))


def refused(body: bytes) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(read_request(body))
    return caught.value.message, caught.value.param


# What is refused


def item(**fields: Json) -> Json:
    return {"input": [fields]}


def part(**fields: Json) -> Json:
    return item(role="user", content=[fields])


def call(**fields: Json) -> Json:
    return item(**{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"} | fields)


def call_output(**fields: Json) -> Json:
    return item(**{"type": "function_call_output", "call_id": "c", "output": "x"} | fields)


def function(**fields: Json) -> Json:
    return {"tools": [{"type": "function", "name": "f"} | fields]}


def custom(**fields: Json) -> Json:
    return {"tools": [{"type": "custom", "name": "f"} | fields]}


def namespace(*tools: Json, **fields: Json) -> Json:
    return {"tools": [{"type": "namespace", "name": "n", "description": "d", "tools": list(tools)} | fields]}


def output_format(**fields: Json) -> Json:
    return {"text": {"format": fields}}


def choice(**fields: Json) -> Json:
    return {"tool_choice": fields}


def more_tools(*tools: Json) -> Json:
    return item(type="additional_tools", role="developer", tools=list(tools))


def raw(**fields: Json) -> Json:
    return {"previous_input_messages": [fields]}


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"input=hello", b'{"input": }', b"\xff\xfe", b'{"input":' + b"[" * 999],
    ids=repr,
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    """A body that is not JSON is refused once, without a param."""
    message, param = refused(body)
    assert message.count("JSON") == 1
    assert param is None


@pytest.mark.parametrize("body", [[], "hello", 5, None, True, [{"input": "hello"}]], ids=repr)
def test_the_body_is_an_object(body: Json) -> None:
    """JSON of any other type is refused without a param."""
    assert refused(json.dumps(body).encode()) == ("Input should be an object", None)


TYPES = [
    ({"model": 5}, "valid string", "model"),
    ({"input": 5}, "valid array", "input"),
    ({"input": {"as_list": 5}}, "valid array", "input"),
    ({"input": ["hello"]}, "an object", "input[0]"),
    ({"input": [{"role": "user", "content": "x"}, None]}, "an object", "input[1]"),
    ({"instructions": ["Be brief."]}, "valid string", "instructions"),
    ({"previous_response_id": 1}, "valid string", "previous_response_id"),
    ({"stream": "true"}, "valid boolean", "stream"),
    ({"stream": 1}, "valid boolean", "stream"),
    ({"stream_options": True}, "an object", "stream_options"),
    ({"stream_options": {"include_obfuscation": 0}}, "valid boolean", "stream_options.include_obfuscation"),
    ({"store": "no"}, "valid boolean", "store"),
    ({"tools": {"type": "function"}}, "valid array", "tools"),
    ({"tool_choice": 5}, "an object", "tool_choice"),
    ({"parallel_tool_calls": "yes"}, "valid boolean", "parallel_tool_calls"),
    ({"max_output_tokens": 16.5}, "valid integer", "max_output_tokens"),
    ({"max_output_tokens": "16"}, "valid integer", "max_output_tokens"),
    ({"max_output_tokens": True}, "valid integer", "max_output_tokens"),
    ({"temperature": "1"}, "valid number", "temperature"),
    ({"temperature": True}, "valid number", "temperature"),
    ({"reasoning": "high"}, "an object", "reasoning"),
    ({"text": "text"}, "an object", "text"),
    ({"text": {"format": "text"}}, "an object", "text.format"),
    ({"include": "reasoning.encrypted_content"}, "valid array", "include"),
    ({"include": [None]}, "valid string", "include[0]"),
    ({"background": "no"}, "valid boolean", "background"),
    ({"user": 5}, "valid string", "user"),
    ({"prompt_cache_key": 5}, "valid string", "prompt_cache_key"),
    ({"safety_identifier": 5}, "valid string", "safety_identifier"),
    ({"service_tier": 5}, "'auto', 'default'", "service_tier"),
    ({"stop": 5}, "valid array", "stop"),
    ({"stop": ["x", 5]}, "valid string", "stop[1]"),
    ({"seed": 1.5}, "valid integer", "seed"),
    ({"top_k": True}, "valid integer", "top_k"),
    ({"min_p": "0"}, "valid number", "min_p"),
    ({"priority": "high"}, "valid integer", "priority"),
    ({"cache_salt": 5}, "valid string", "cache_salt"),
    ({"enable_response_messages": 1}, "valid boolean", "enable_response_messages"),
    ({"previous_input_messages": {}}, "valid array", "previous_input_messages"),
    ({"prompt_cache_options": "30m"}, "an object", "prompt_cache_options"),
]

ITEMS = [
    (item(type="item_reference"), "Field required", "input[0].id"),
    (item(type="item_reference", id=5), "valid string", "input[0].id"),
    (item(type="compaction", encrypted_content="x"), "'compaction' is none of 'message'", "input[0].type"),
    (item(type=["message"]), "none of 'message'", "input[0].type"),
    (item(type="", role="user", content="x"), "'message'", "input[0].type"),
    (item(content="x"), "Field required", "input[0].role"),
    (item(type="message", message={}, content="x"), "Field required", "input[0].role"),
    (item(role="tool", content="x"), "'user', 'assistant', 'system' or 'developer'", "input[0].role"),
    (item(role="user"), "Field required", "input[0].content"),
    (item(role="user", content=None), "valid array", "input[0].content"),
    (item(role="user", content="x", id=5), "valid string", "input[0].id"),
    (item(role="user", content="x", status="done"), "'in_progress', 'completed' or 'incomplete'", "input[0].status"),
    (item(role="assistant", content="x", phase="analysis"), "'commentary' or 'final_answer'", "input[0].phase"),
    (part(), "Field required", "input[0].content[0].type"),
    (part(type="text", text="x"), "'text' is none of 'input_text'", "input[0].content[0].type"),
    (part(type="input_text"), "Field required", "input[0].content[0].text"),
    (part(type="input_text", text=5), "valid string", "input[0].content[0].text"),
    (part(type="input_text", input_text={}), "Field required", "input[0].content[0].text"),
    (part(type="refusal"), "Field required", "input[0].content[0].refusal"),
    (part(type="refusal", refusal=5), "valid string", "input[0].content[0].refusal"),
    (item(role="user", content=["x"]), "an object", "input[0].content[0]"),
    (item(type="reasoning", summary="x"), "valid array", "input[0].summary"),
    (item(type="reasoning", summary=[{"type": "text"}]), "'summary_text'", "input[0].summary[0].type"),
    (item(type="reasoning", content="x"), "valid array", "input[0].content"),
    (item(type="reasoning", content=[{"type": "reasoning_text"}]), "Field required", "input[0].content[0].text"),
    (item(type="reasoning", encrypted_content=5), "valid string", "input[0].encrypted_content"),
    (item(type="function_call", name="f", arguments="{}"), "Field required", "input[0].call_id"),
    (item(type="function_call", call_id="c", arguments="{}"), "Field required", "input[0].name"),
    (item(type="function_call", call_id="c", name="f"), "Field required", "input[0].arguments"),
    (call(call_id=""), "at least 1 character", "input[0].call_id"),
    (call(call_id="c" * 65), "at most 64 characters", "input[0].call_id"),
    (call(name=""), "at least 1 character", "input[0].name"),
    (call(arguments={}), "valid string", "input[0].arguments"),
    (item(type="function_call_output", call_id="c"), "Field required", "input[0].output"),
    (call_output(call_id="c" * 65), "at most 64 characters", "input[0].call_id"),
    (call_output(output=None), "valid array", "input[0].output"),
    (call_output(output=[{"type": "output_text", "text": "x"}]), "is none of", "input[0].output[0].type"),
    (call_output(output=[{"type": "input_text"}]), "Field required", "input[0].output[0].text"),
    (call(namespace="a b"), "pattern", "input[0].namespace"),
    (call(type="custom_tool_call"), "Field required", "input[0].input"),
    (call(type="custom_tool_call", input={}), "valid string", "input[0].input"),
    (item(type="custom_tool_call_output", call_id="c"), "Field required", "input[0].output"),
    (item(type="custom_tool_call_output", call_id="", output=""), "at least 1", "input[0].call_id"),
    (item(type="additional_tools", role="developer"), "Field required", "input[0].tools"),
    (item(type="additional_tools", role="user", tools=[]), "'developer'", "input[0].role"),
    (more_tools({"type": "function"}), "Field required", "input[0].tools[0].name"),
    (more_tools(*namespace({"type": "custom"})["tools"]), "Field required", "input[0].tools[0].tools[0].name"),
]

VALUES = [
    ({"tool_choice": "any"}, "'auto', 'none' or 'required'", "tool_choice"),
    ({"max_output_tokens": 15}, "greater than or equal to 16", "max_output_tokens"),
    ({"max_tool_calls": 0}, "greater than or equal to 1", "max_tool_calls"),
    ({"temperature": -0.1}, "greater than or equal to 0", "temperature"),
    ({"temperature": 2.1}, "less than or equal to 2", "temperature"),
    ({"temperature": float("nan")}, "less than or equal to 2", "temperature"),
    ({"top_p": 0}, "greater than 0", "top_p"),
    ({"top_p": 1.1}, "less than or equal to 1", "top_p"),
    ({"top_logprobs": -1}, "greater than or equal to 0", "top_logprobs"),
    ({"top_logprobs": 21}, "less than or equal to 20", "top_logprobs"),
    ({"truncation": "middle"}, "'auto' or 'disabled'", "truncation"),
    ({"reasoning": {"effort": "huge"}}, "'none', 'minimal', 'low', 'medium', 'high'", "reasoning.effort"),
    ({"reasoning": {"summary": "long"}}, "'auto', 'concise' or 'detailed'", "reasoning.summary"),
    ({"text": {"format": {}}}, "Field required", "text.format.type"),
    (output_format(type="xml"), "'xml' is none of 'text', 'json_schema', 'json_object'", "text.format.type"),
    (output_format(type="json_schema", schema={}), "Field required", "text.format.name"),
    (output_format(type="json_schema", name="x"), "Field required", "text.format.schema"),
    (output_format(type="json_schema", name="x", schema="{}"), "an object", "text.format.schema"),
    (output_format(type="json_schema", name="x y", schema={}), "pattern", "text.format.name"),
    (output_format(type="json_schema", name="x" * 65, schema={}), "pattern", "text.format.name"),
    (output_format(type="json_schema", name="x", schema={}, strict=1), "valid boolean", "text.format.strict"),
    (choice(), "Field required", "tool_choice.type"),
    (choice(type="function"), "Field required", "tool_choice.name"),
    (choice(type="custom", name=5), "valid string", "tool_choice.name"),
    (choice(type="allowed_tools", tools=[]), "Field required", "tool_choice.mode"),
    (choice(type="allowed_tools", mode="none", tools=[]), "'auto' or 'required'", "tool_choice.mode"),
    (choice(type="allowed_tools", mode="auto", tools=["f"]), "an object", "tool_choice.tools[0]"),
    (choice(type="allowed_tools", mode="auto", tools=[{"type": "custom"}]), "required", "tool_choice.tools[0].name"),
    ({"presence_penalty": -2.1}, "greater than or equal to -2", "presence_penalty"),
    ({"frequency_penalty": 2.1}, "less than or equal to 2", "frequency_penalty"),
    ({"repetition_penalty": 0}, "greater than 0", "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "finite", "repetition_penalty"),
    ({"top_k": -2}, "greater than or equal to -1", "top_k"),
    ({"min_p": 1.1}, "less than or equal to 1", "min_p"),
    ({"seed": 2**63}, "less than", "seed"),
    ({"priority": -(2**63) - 1}, "greater than or equal", "priority"),
    ({"stop": ""}, "at least 1 character", "stop"),
    ({"stop": ["a", ""]}, "at least 1 character", "stop[1]"),
    ({"stop": ["a"] * 5}, "at most 4", "stop"),
    ({"cache_salt": ""}, "at least 1 character", "cache_salt"),
    ({"cache_salt": "a/b"}, "pattern", "cache_salt"),
    ({"cache_salt": "a" * 1025}, "at most 1024", "cache_salt"),
    ({"safety_identifier": "a" * 129}, "at most 128", "safety_identifier"),
    ({"prompt_cache_key": "a" * 65}, "at most 64", "prompt_cache_key"),
    ({"prompt_cache_retention": "1h"}, "'in_memory' or '24h'", "prompt_cache_retention"),
    ({"prompt_cache_options": {"ttl": "1h"}}, "'30m' or '12h'", "prompt_cache_options.ttl"),
    ({"reasoning": {"generate_summary": "long"}}, "'concise'", "reasoning.generate_summary"),
    ({"reasoning": {"context": "none"}}, "'auto', 'current_turn' or 'all_turns'", "reasoning.context"),
    (raw(role="user"), "Field required", "previous_input_messages[0].content"),
    (raw(role="critic", content="x"), "'system', 'developer'", "previous_input_messages[0].role"),
    (raw(author={}, content="x"), "Field required", "previous_input_messages[0].author.role"),
    (raw(role="user", content=[{"type": "image"}]), "'text'", "previous_input_messages[0].content[0].type"),
    ({"text": {"verbosity": "chatty"}}, "'low', 'medium' or 'high'", "text.verbosity"),
    ({"metadata": {str(number): "" for number in range(17)}}, "at most 16", "metadata"),
    ({"metadata": {"k" * 65: ""}}, "at most 64 characters", "metadata." + "k" * 65),
    ({"metadata": {"key": "v" * 513}}, "at most 512 characters", "metadata.key"),
    ({"metadata": {"message": 5}}, "valid string", "metadata.message"),
    ({"tools": [5]}, "an object", "tools[0]"),
    ({"tools": [{}]}, "Field required", "tools[0].type"),
    ({"tools": [{"type": None}]}, "valid string", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "Field required", "tools[0].name"),
    ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "Field required", "tools[1].name"),
    (function(name="get weather"), "pattern", "tools[0].name"),
    (function(name="f\n"), "pattern", "tools[0].name"),
    (function(name="f" * 65), "pattern", "tools[0].name"),
    (function(description=5), "valid string", "tools[0].description"),
    (function(parameters="{}"), "an object", "tools[0].parameters"),
    (function(strict="yes"), "valid boolean", "tools[0].strict"),
    (custom(name="a.b"), "pattern", "tools[0].name"),
    (custom(format="text"), "an object", "tools[0].format"),
    (custom(format={"type": "json"}), "'json' is none of 'text', 'grammar'", "tools[0].format.type"),
    (custom(format={"type": "grammar", "syntax": "lark"}), "Field required", "tools[0].format.definition"),
    (custom(format={"type": "grammar", "syntax": "bnf", "definition": ""}), "'lark'", "tools[0].format.syntax"),
    (namespace(name="a b"), "pattern", "tools[0].name"),
    (namespace(tools=None), "valid array", "tools[0].tools"),
    (namespace(5), "an object", "tools[0].tools[0]"),
    (namespace({"type": "web_search"}), "'web_search' is none of", "tools[0].tools[0].type"),
    (namespace({"type": "function", "name": ""}), "pattern", "tools[0].tools[0].name"),
    (namespace(*[{"type": "custom", "name": "f"}] * 501), "at most 500", "tools[0].tools"),
]


@pytest.mark.parametrize(("body", "says", "param"), TYPES + ITEMS + VALUES, ids=lambda value: json.dumps(value)[:60])
def test_a_bad_value_is_refused_with_its_place(body: Json, says: str, param: str) -> None:
    """The message says what is wrong, and ends with the place that ``param`` names."""
    message, found = refused(json.dumps(body).encode())
    assert found == param
    assert says in message
    assert message.endswith(f" (at {param})")


def test_the_first_bad_value_is_told() -> None:
    """Of several mistakes the first is named, in the order of the API's parameters; long lists come last."""
    assert refused(b'{"tools": [5], "input": [{}], "model": "m"}')[1] == "input[0].role"
    assert refused(b'{"tools": [5], "input": [{}], "model": 5, "stream": 5}')[1] == "model"


MESSAGE = {"role": "user", "content": "x"}
PART = {"type": "input_text", "text": "x"}
RESULT = {"type": "function_call_output", "call_id": "c"}
MANY = 5_000
"""Enough elements for several pieces of any kind."""

FAR = [
    (item(role="user", content=[PART] * MANY + [{"type": "input_text"}]), f"input[0].content[{MANY}].text"),
    (item(**RESULT, output=[PART] * MANY + [{"type": "text"}]), f"input[0].output[{MANY}].type"),
    (item(type="reasoning", summary=[{"type": "summary_text", "text": "x"}] * MANY + [5]), f"input[0].summary[{MANY}]"),
    ({"input": [MESSAGE] * MANY + [{"content": "x"}]}, f"input[{MANY}].role"),
    ({"input": [MESSAGE] * MANY + [{"role": "user", "content": [PART, 5]}]}, f"input[{MANY}].content[1]"),
    ({"tools": [{"type": "mcp"}] * MANY + [{"type": "function"}]}, f"tools[{MANY}].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "f", "strict": "x" * MANY}]}, "tools[0].strict"),
    (more_tools(*[{"type": "mcp"}] * MANY, {"type": "function"}), f"input[0].tools[{MANY}].name"),
    (
        {"previous_input_messages": [{"role": "user", "content": "x"}] * MANY + [{"role": "user"}]},
        f"previous_input_messages[{MANY}].content",
    ),
]


@pytest.mark.parametrize(("body", "param"), FAR, ids=[param for _, param in FAR])
def test_a_place_far_down_is_found(body: Json, param: str) -> None:
    """However many pieces a body is read in, ``param`` counts from its start."""
    assert refused(json.dumps(body).encode())[1] == param


@pytest.mark.parametrize(
    "body",
    [
        item(type="x" * 10**6),
        part(type="x" * 10**6),
        {"metadata": {"k" * 10**6: "v"}},
        {"metadata": {str(number): 5 for number in range(10**5)}},
        {"include": ["x"] * 10**5},
    ],
    ids=["item", "part", "key", "keys", "include"],
)
def test_a_refusal_is_short(body: Json) -> None:
    """What a client sent is quoted up to a hundred characters."""
    message, param = refused(json.dumps(body).encode())
    assert len(message) < 400
    assert len(param or "") < 150


# What is accepted


@pytest.mark.parametrize("client", CLIENTS)
def test_what_real_clients_send_is_accepted(client: str) -> None:
    """Bodies of real clients are read whole: nothing of what the API knows is lost."""
    body = CLIENTS[client]
    request = read(body)
    assert len(request.tools or ()) == len(body.get("tools", ()))
    assert len(request.input or ()) == len(body["input"])
    said = request.model_dump(
        include={"model", "instructions", "store", "stream", "include", "tool_choice", "metadata"}, exclude_none=True
    )
    assert said == {name: body[name] for name in CreateResponse.model_fields if name in said and name in body}


def test_keys_that_nobody_knows_are_ignored() -> None:
    """Clients send keys of their own at every depth; they neither fail nor arrive."""
    request = read(CODEX)
    assert not hasattr(request, "client_metadata")
    assert isinstance(request.input, list)
    assert isinstance(request.input[3], FunctionCallItem)
    assert request.input[3].namespace == "multi_agent_v1"
    assert request == read({name: value for name, value in CODEX.items() if name != "client_metadata"})


@pytest.mark.parametrize("name", CreateResponse.model_fields)
def test_null_means_not_said(name: str) -> None:
    """Every parameter may be null, which is the same as leaving it out."""
    assert read({name: None}) == read({})


def test_an_item_without_a_type_is_a_message() -> None:
    """``type`` is optional for messages, and may be null."""
    request = read({"input": [MESSAGE, {"type": None, **MESSAGE}]})
    assert request.input == [MessageItem(role="user", content="x")] * 2


def test_what_has_only_an_id_is_a_reference() -> None:
    """The type of a reference is optional too, and may be null; anything that a message has makes it a message."""
    given = [{"type": "item_reference", "id": "x"}, {"id": "x"}, {"type": None, "id": "x", "status": None}]
    read_as = read({"input": given}).input
    assert isinstance(read_as, list)
    assert [item.id for item in read_as if isinstance(item, ItemReference)] == ["x"] * 3
    assert read({"input": [{"id": "x", **MESSAGE}]}).input == [MessageItem(id="x", role="user", content="x")]


@pytest.mark.parametrize("wide", [1, MANY])
def test_a_tool_is_read_by_its_type(wide: int) -> None:
    """Functions, custom tools and namespaces are read with their fields, any other tool by its type only."""
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a" * wide}
    tools = [
        {"type": "function", "name": "f", "defer_loading": True},
        {"type": "custom", "name": "c", "format": {"type": "text"}},
        {"type": "custom", "name": "g", "format": grammar},
        *namespace({"type": "function", "name": "f"}, {"type": "custom", "name": "c"})["tools"],
        {"type": "mcp", "name": 5, "server_label": "x"},
    ]
    f, c, g, n, m = read({"tools": tools}).tools or []
    assert isinstance(f, FunctionTool)
    assert isinstance(c, CustomTool)
    assert c.format == TextFormat(type="text")
    assert isinstance(g, CustomTool)
    assert g.format == GrammarFormat(type="grammar", syntax="regex", definition="a" * wide)
    assert isinstance(n, NamespaceTool)
    assert [type(inner) for inner in n.tools] == [FunctionTool, CustomTool]
    assert isinstance(m, OtherTool)
    assert [tool.given for tool in (f, c, g, n, m)] == tools


def test_the_trace_is_read_from_headers_only() -> None:
    """Of the headers of a request those of its trace are kept, and no body can say them."""
    said = {"trace_headers": {"traceparent": "00-1"}, "_trace_headers": {"traceparent": "00-1"}}
    request = read({"input": "x", **said})
    assert request.trace_headers == {}
    traced = request.traced({"TraceParent": "00-2", "tracestate": "a=1", "Authorization": "secret"})
    assert traced.trace_headers == {"traceparent": "00-2", "tracestate": "a=1"}
    assert request.trace_headers == {}
    assert traced.input == "x"


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "top_p": 1, "top_logprobs": 0, "max_output_tokens": 16, "max_tool_calls": 1},
        {"temperature": 2, "top_p": 1e-9, "top_logprobs": 20, "max_output_tokens": 10**30},
        {"metadata": {f"{number:064}": "v" * 512 for number in range(16)}},
        {"input": ""},
        {"input": []},
        {"input": "\x00 \U0001f600"},
        function(name="f" * 64, parameters=None),
        item(type="reasoning", summary=None),
        call(call_id="c" * 64, arguments="no JSON"),
        call(namespace=None, id=None, status=None),
        {"top_k": -1, "min_p": 1, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-9},
        {"seed": -(2**63), "priority": 2**63 - 1, "cache_salt": "a" * 1024, "stop": ["a"] * 4},
        {"safety_identifier": "a" * 128, "prompt_cache_key": "a" * 64},
        output_format(type="json_schema", name="x" * 64, schema={}, strict=None),
        namespace(*[{"type": "custom", "name": "f"}] * 500),
        namespace(description=None, name="n" * 64),
    ],
    ids=lambda body: json.dumps(body)[:60],
)
def test_values_on_the_limit_are_accepted(body: Json) -> None:
    """Limits are inclusive."""
    read(body)


@pytest.mark.parametrize("blank", [0, 10**5], ids=["at once", "in pieces"])
@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\uDE00", "\ufffd"),
        (r"a\ud83d\ud83d\ude00b", "a\ufffd\U0001f600b"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\\ud83d\ud83d", "\\ud83d\ufffd"),
        (r"\\\ud83d\n", "\\\ufffd\n"),
    ],
)
def test_half_an_emoji_is_replaced(blank: int, written: str, read_as: str) -> None:
    """JavaScript cuts strings between surrogates: the half that is left becomes U+FFFD, and nothing else changes."""
    body = f'{{"input": "{written}", "instructions": "{"x" * blank}"}}'.encode()
    assert asyncio.run(read_request(body)).input == read_as


@pytest.mark.parametrize("wide", [1, MANY])
def test_pieces_make_the_same_request(wide: int) -> None:
    """A body that is read in pieces is read as pydantic reads it at once."""
    body: Json = {
        "model": "m" * wide,
        "instructions": "\u4e16\U0001f600" * wide,
        "input": [
            *[{"role": "user", "content": f"x{number}"} for number in range(wide)],
            {"role": "user", "content": [{"type": "input_text", "text": f"x{number}"} for number in range(wide)]},
            {**RESULT, "output": [PART] * wide, "content": [5] * wide},
        ],
        "tools": [function(name=f"f{number}", parameters={"a": [{}]})["tools"][0] for number in range(wide)],
        "previous_input_messages": [{"role": "user", "content": f"x{number}"} for number in range(wide)],
    }
    body["input"].append(more_tools(*body["tools"])["input"][0])
    assert read(body) == CreateResponse.model_validate(body)


@pytest.mark.parametrize("cut", range(4))
def test_a_broken_body_of_many_pieces_is_refused(cut: int) -> None:
    """A mistake deep in a long body makes all of it something that is not JSON."""
    broken = [b'{"role": user}', rb'"\x"', b"[" * 100_000, b'"\xff"'][cut]
    message, param = refused(b'{"input": [%b%b]}' % (b'{"role": "user", "content": "x"}, ' * MANY, broken))
    assert message.startswith("The body is not valid JSON: ")
    assert param is None


async def test_a_long_body_lets_others_go_on() -> None:
    """The loop gets many turns while a body of a megabyte is read."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    await read_request(json.dumps({"input": [MESSAGE] * 20_000}).encode())
    counting.cancel()
    assert turns > 4


# Any body at all


def places(value: Json, place: Place = ()) -> Iterator[Place]:
    """Every place in a JSON value, itself included."""
    yield place
    children = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    for step, child in children:
        yield from places(child, (*place, step))


def spelt(place: Place) -> str:
    """A place as ``param`` spells it."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return "".join(steps).removeprefix(".")


def replaced(value: Json, place: Place, new: Json) -> Json:
    """The value with ``new`` at one place."""
    if not place:
        return new
    changed = inner = deepcopy(value)
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = new
    return changed


def leads_somewhere(param: str, value: Json) -> bool:
    """Whether a path ends at a place in a value, or at a missing key of an object in it."""
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


WORDS = sorted(
    {step for place in places(EVERYTHING) for step in place if isinstance(step, str)}
    | {"message", "function_call", "refusal", "input_text", "as_text", "as_list", "function", "custom", "other", "text"}
    | {"[key]", "_given", "given", "_trace_headers"}
)
words = st.sampled_from(WORDS) | st.text(max_size=5)
json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=4),
    max_leaves=8,
)


def blamed(body: Json) -> str:
    """The place that a body is refused for; empty where there is none, or nothing is wrong."""
    try:
        read(body)
    except InvalidRequest as error:
        return error.param or ""
    return ""


@settings(max_examples=100, deadline=None)
@given(json_values | st.dictionaries(st.sampled_from(list(CreateResponse.model_fields)), json_values, max_size=2))
def test_any_body_is_read_or_refused_with_a_place_in_it(body: Json) -> None:
    """Whatever JSON arrives, it is understood or refused, and ``param`` is a place that the client can find."""
    assert leads_somewhere(blamed(body), body)


@settings(max_examples=100, deadline=None)
@given(place=st.sampled_from(list(places(EVERYTHING))), new=json_values)
def test_a_refusal_blames_what_is_wrong(place: Place, new: Json) -> None:
    """When one value of a good body is replaced, ``param`` names it, or a neighbour that its type asks for."""
    body = replaced(EVERYTHING, place, new)
    if param := blamed(body):
        assert leads_somewhere(param, body)
        assert param.startswith(spelt(place if len(place) < 2 else place[:-1]))


def test_the_body_with_everything_is_accepted() -> None:
    """The property above starts from a good body."""
    read(EVERYTHING)
