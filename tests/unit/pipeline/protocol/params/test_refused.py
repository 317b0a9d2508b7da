from __future__ import annotations

import json

import pytest

from penstock.pipeline.protocol.params.validation import MOST_NAMES
from tests.support.requests import (
    MANY,
    MESSAGE,
    PART,
    RESULT,
    Json,
    call,
    call_output,
    choice,
    custom,
    function,
    input_tools,
    item,
    namespace,
    output_format,
    part,
    raw_input,
    read_body,
    refusal,
    refused,
    server,
)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"input=hello", b'{"input": }', b"\xff\xfe", b'{"input":' + b"[" * 999], ids=repr
)
def test_body_that_is_not_json_is_refused(body: bytes) -> None:
    message, param = refusal(body)
    assert message.count("JSON") == 1
    assert param is None


@pytest.mark.parametrize("blank", [0, 10**5], ids=["at once", "in pieces"])
@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity"])
def test_nan_and_infinity_are_refused(number: bytes, blank: int) -> None:
    """Python reads them, but JSON does not have them, and no client could read an echo of them."""
    tool = b'{"type": "computer", "x": %b}' % number
    message, param = refusal(b'{"input": "%b", "tools": [%b]}' % (b"x" * blank, tool))
    assert message.startswith("The body is not valid JSON")
    assert param is None


@pytest.mark.parametrize("name", ["inputs", "Input"])
def test_misnamed_input_is_named(name: str) -> None:
    assert refusal(json.dumps({name: "Hi"}).encode()) == (
        f"There is no parameter {name!r}: this API has 'input'.",
        name,
    )
    assert refused(json.dumps({"input": "Hi", name: "Hi", "store": "yes"}).encode()).param == "store"


def test_misnamed_input_is_not_searched_for_among_many_names() -> None:
    """The search would hold the event loop for seconds."""
    names = {f"x{number}": 0 for number in range(MOST_NAMES)}
    assert read_body({"inputs": "Hi"} | names).input is None


@pytest.mark.parametrize("body", [[], "hello", 5, None, True, [{"input": "hello"}]], ids=repr)
def test_body_that_is_no_object_is_refused(body: Json) -> None:
    assert refusal(json.dumps(body).encode()) == ("Input should be a valid object", None)


TYPES = [
    ({"model": 5}, "valid string", "model"),
    ({"input": 5}, "valid array", "input"),
    ({"input": {"as_other": 5}}, "valid array", "input"),
    ({"input": ["hello"]}, "valid object", "input[0]"),
    ({"input": [{"role": "user", "content": "x"}, None]}, "valid object", "input[1]"),
    ({"instructions": ["Be brief."]}, "valid string", "instructions"),
    ({"previous_response_id": 1}, "valid string", "previous_response_id"),
    ({"stream": "true"}, "valid boolean", "stream"),
    ({"stream": 1}, "valid boolean", "stream"),
    ({"stream_options": True}, "valid object", "stream_options"),
    ({"stream_options": {"include_obfuscation": 0}}, "valid boolean", "stream_options.include_obfuscation"),
    ({"store": "no"}, "valid boolean", "store"),
    ({"tools": {"type": "function"}}, "valid array", "tools"),
    ({"tool_choice": 5}, "valid object", "tool_choice"),
    ({"parallel_tool_calls": "yes"}, "valid boolean", "parallel_tool_calls"),
    ({"max_output_tokens": 16.5}, "valid integer", "max_output_tokens"),
    ({"max_output_tokens": "16"}, "valid integer", "max_output_tokens"),
    ({"max_output_tokens": True}, "valid integer", "max_output_tokens"),
    ({"temperature": "1"}, "valid number", "temperature"),
    ({"temperature": True}, "valid number", "temperature"),
    ({"reasoning": "high"}, "valid object", "reasoning"),
    ({"text": "text"}, "valid object", "text"),
    ({"text": {"format": "text"}}, "valid object", "text.format"),
    ({"include": "reasoning.encrypted_content"}, "valid array", "include"),
    ({"include": [None]}, "valid string", "include[0]"),
    ({"background": "no"}, "valid boolean", "background"),
    ({"conversation": 5}, "valid object", "conversation"),
    ({"conversation": ["conv_1"]}, "valid object", "conversation"),
    ({"conversation": {}}, "Field required", "conversation.id"),
    ({"conversation": {"id": None, "as_text": "conv_1"}}, "valid string", "conversation.id"),
    ({"user": 5}, "valid string", "user"),
    ({"user": "u" * 1025}, "at most 1024 characters", "user"),
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
    ({"prompt_cache_options": "30m"}, "valid object", "prompt_cache_options"),
]

ITEMS = [
    (item(type="item_reference"), "Field required", "input[0].id"),
    (item(type="item_reference", id=5), "valid string", "input[0].id"),
    (item(type="unheard_of", code="x"), "one of 'message', 'reasoning'", "input[0].type"),
    (item(type=["message"]), "one of 'message'", "input[0].type"),
    (item(type="", role="user", content="x"), "'message'", "input[0].type"),
    (item(content="x"), "Field required", "input[0].role"),
    (item(type="message", message={}, content="x"), "Field required", "input[0].role"),
    (item(role="tool", content="x"), "'assistant', 'developer', 'system', 'user'", "input[0].role"),
    (item(role="user"), "Field required", "input[0].content"),
    (item(role="user", content=None), "valid string or array", "input[0].content"),
    (item(role="user", content="x", id=5), "valid string", "input[0].id"),
    (item(role="user", content="x", status="done"), "'completed', 'in_progress', 'incomplete'", "input[0].status"),
    (item(role="assistant", content="x", phase="analysis"), "'commentary', 'final_answer'", "input[0].phase"),
    (part(), "Field required", "input[0].content[0].type"),
    (part(type="text", text="x"), "one of 'input_text'", "input[0].content[0].type"),
    (part(type="input_text"), "Field required", "input[0].content[0].text"),
    (part(type="input_text", text=5), "valid string", "input[0].content[0].text"),
    (part(type="input_text", input_text={}), "Field required", "input[0].content[0].text"),
    (part(type="refusal"), "Field required", "input[0].content[0].refusal"),
    (part(type="refusal", refusal=5), "valid string", "input[0].content[0].refusal"),
    (item(role="user", content=["x"]), "valid object", "input[0].content[0]"),
    (item(type="reasoning", summary="x"), "valid array", "input[0].summary"),
    (item(type="reasoning", summary=[{"type": "text"}]), "'summary_text'", "input[0].summary[0].type"),
    (item(type="reasoning", content="x"), "valid array", "input[0].content"),
    (item(type="reasoning", content=[{"type": "reasoning_text"}]), "Field required", "input[0].content[0].text"),
    (item(type="reasoning", content=[{"text": "x"}]), "Field required", "input[0].content[0].type"),
    (item(type="reasoning", encrypted_content=5), "valid string", "input[0].encrypted_content"),
    (item(type="function_call", name="f", arguments="{}"), "Field required", "input[0].call_id"),
    (item(type="function_call", call_id="c", arguments="{}"), "Field required", "input[0].name"),
    (item(type="function_call", call_id="c", name="f"), "Field required", "input[0].arguments"),
    (call(call_id=""), "length >= 1", "input[0].call_id"),
    (call(call_id="c" * 65), "length <= 64", "input[0].call_id"),
    (call(name=""), "length >= 1", "input[0].name"),
    (call(arguments={}), "valid string", "input[0].arguments"),
    (item(type="function_call_output", call_id="c"), "Field required", "input[0].output"),
    (call_output(call_id="c" * 65), "length <= 64", "input[0].call_id"),
    (call_output(output=None), "valid string or array", "input[0].output"),
    (call_output(output=[{"type": "output_text", "text": "x"}]), "one of", "input[0].output[0].type"),
    (call_output(output=[{"type": "input_text"}]), "Field required", "input[0].output[0].text"),
    (call(namespace="a b"), "regex", "input[0].namespace"),
    (call(namespace="a\n"), "regex", "input[0].namespace"),
    (call(type="custom_tool_call"), "Field required", "input[0].input"),
    (call(type="custom_tool_call", input={}), "valid string", "input[0].input"),
    (item(type="custom_tool_call_output", call_id="c"), "Field required", "input[0].output"),
    (item(type="custom_tool_call_output", call_id="", output=""), "length >= 1", "input[0].call_id"),
    (item(type="additional_tools", role="developer"), "Field required", "input[0].tools"),
    (item(type="additional_tools", role="user", tools=[]), "'developer'", "input[0].role"),
    (input_tools({"type": "function"}), "Field required", "input[0].tools[0].name"),
    (input_tools(*namespace({"type": "custom"})["tools"]), "Field required", "input[0].tools[0].tools[0].name"),
]

VALUES = [
    ({"tool_choice": "any"}, "'auto', 'none' or 'required'", "tool_choice"),
    ({"max_output_tokens": 15}, "greater than or equal to 16", "max_output_tokens"),
    ({"max_tool_calls": 0}, "greater than or equal to 1", "max_tool_calls"),
    ({"temperature": -0.1}, "greater than or equal to 0", "temperature"),
    ({"temperature": 2.1}, "less than or equal to 2", "temperature"),
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
    (output_format(type="json_schema", name="x", schema="{}"), "valid object", "text.format.schema"),
    (output_format(type="json_schema", name="x y", schema={}), "pattern", "text.format.name"),
    (output_format(type="json_schema", name="x" * 65, schema={}), "pattern", "text.format.name"),
    (output_format(type="json_schema", name="x", schema={}, strict=1), "valid boolean", "text.format.strict"),
    (choice(), "Field required", "tool_choice.type"),
    (choice(type="function"), "Field required", "tool_choice.name"),
    (choice(type="custom", name=5), "valid string", "tool_choice.name"),
    (choice(type="allowed_tools", tools=[]), "Field required", "tool_choice.mode"),
    (choice(type="allowed_tools", mode="none", tools=[]), "'auto' or 'required'", "tool_choice.mode"),
    (choice(type="allowed_tools", mode="auto", tools=["f"]), "valid object", "tool_choice.tools[0]"),
    (choice(type="allowed_tools", mode="auto", tools=[{"type": "custom"}]), "required", "tool_choice.tools[0].name"),
    ({"presence_penalty": -2.1}, "greater than or equal to -2", "presence_penalty"),
    ({"frequency_penalty": 2.1}, "less than or equal to 2", "frequency_penalty"),
    ({"repetition_penalty": 0}, "greater than 0", "repetition_penalty"),
    ({"top_k": -2}, "greater than or equal to -1", "top_k"),
    ({"min_p": 1.1}, "less than or equal to 1", "min_p"),
    ({"seed": 2**63}, "less than", "seed"),
    ({"priority": -(2**63) - 1}, "greater than or equal", "priority"),
    ({"stop": ""}, "at least 1 character", "stop"),
    ({"stop": ["a", ""]}, "at least 1 character", "stop[1]"),
    ({"stop": ["a"] * 5}, "at most 4", "stop"),
    ({"stop": "a" * 1001}, "at most 1000 characters", "stop"),
    ({"stop_token_ids": [5] * 101}, "at most 100", "stop_token_ids"),
    ({"bad_words": ["a"] * 129}, "at most 128", "bad_words"),
    ({"bad_words": ["a" * 1001]}, "at most 1000 characters", "bad_words[0]"),
    ({"allowed_token_ids": [5] * 1025}, "at most 1024", "allowed_token_ids"),
    ({"logprob_token_ids": [5] * 129}, "at most 128", "logprob_token_ids"),
    ({"logit_bias": {str(token): 1 for token in range(1025)}}, "at most 1024", "logit_bias"),
    *[({"request_id": sent}, "pattern", "request_id") for sent in ("", "two words", "x" * 129, "a\n", "é")],
    ({"stop_token_ids": [-1]}, "greater than or equal to 0", "stop_token_ids[0]"),
    ({"min_tokens": -1}, "greater than or equal to 0", "min_tokens"),
    ({"bad_words": [""]}, "at least 1 character", "bad_words[0]"),
    ({"allowed_token_ids": []}, "at least 1 item", "allowed_token_ids"),
    ({"logit_bias": {"x": 1}}, "pattern", "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "less than or equal to 100", "logit_bias.5"),
    *[
        ({"vllm_xargs": {name: {"remote_host": "x"}}}, f"{name} cannot be set", "vllm_xargs")
        for name in ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode", "penstock_let_go")
    ],
    ({"background_options": {"completion_window": "1m"}}, "'2h'", "background_options.completion_window"),
    ({"cache_salt": ""}, "at least 1 character", "cache_salt"),
    ({"cache_salt": "a/b"}, "pattern", "cache_salt"),
    ({"cache_salt": "a" * 1025}, "at most 1024", "cache_salt"),
    ({"safety_identifier": "a" * 129}, "at most 128", "safety_identifier"),
    ({"prompt_cache_key": "a" * 65}, "at most 64", "prompt_cache_key"),
    ({"prompt_cache_retention": "1h"}, "'in_memory' or '24h'", "prompt_cache_retention"),
    ({"prompt_cache_options": {"ttl": "1h"}}, "'30m' or '12h'", "prompt_cache_options.ttl"),
    ({"reasoning": {"generate_summary": "long"}}, "'concise'", "reasoning.generate_summary"),
    ({"reasoning": {"context": "none"}}, "'auto', 'current_turn' or 'all_turns'", "reasoning.context"),
    (raw_input(tool_calls=[{}]), "Field required", "previous_input_messages[0].tool_calls[0].id"),
    (
        raw_input(tool_calls=[{"id": "c", "function": {"name": 5}}]),
        "valid string",
        "previous_input_messages[0].tool_calls[0].function.name",
    ),
    (raw_input(reasoning=5), "valid string", "previous_input_messages[0].reasoning"),
    (raw_input(role="critic", content="x"), "'assistant', 'developer'", "previous_input_messages[0].role"),
    (raw_input(author={}, content="x"), "Field required", "previous_input_messages[0].author.role"),
    (raw_input(role="user", content=[{"type": "image"}]), "'text'", "previous_input_messages[0].content[0].type"),
    ({"text": {"verbosity": "chatty"}}, "'low', 'medium' or 'high'", "text.verbosity"),
    ({"metadata": {str(number): "" for number in range(17)}}, "at most 16", "metadata"),
    ({"metadata": {"k" * 65: ""}}, "at most 64 characters", "metadata." + "k" * 65),
    ({"metadata": {"key": "v" * 513}}, "at most 512 characters", "metadata.key"),
    ({"metadata": {"message": 5}}, "valid string", "metadata.message"),
    ({"tools": [5]}, "valid object", "tools[0]"),
    ({"tools": [{}]}, "Field required", "tools[0].type"),
    ({"tools": [{"type": None}]}, "valid string", "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "Field required", "tools[0].name"),
    ({"tools": [{"type": "web_search"}, {"type": "function"}]}, "Field required", "tools[1].name"),
    (function(name="get weather"), "pattern", "tools[0].name"),
    (function(name="f\n"), "pattern", "tools[0].name"),
    (function(name="f" * 65), "pattern", "tools[0].name"),
    (function(description=5), "valid string", "tools[0].description"),
    (function(parameters="{}"), "valid object", "tools[0].parameters"),
    (function(strict="yes"), "valid boolean", "tools[0].strict"),
    (function(output_schema="{}"), "valid object", "tools[0].output_schema"),
    (function(**{"async": "yes"}), "valid boolean", "tools[0].async"),
    (custom(name="a.b"), "pattern", "tools[0].name"),
    (custom(format="text"), "valid object", "tools[0].format"),
    (custom(format={"type": "json"}), "'json' is none of 'text', 'grammar'", "tools[0].format.type"),
    (custom(format={"type": "grammar", "syntax": "lark"}), "Field required", "tools[0].format.definition"),
    (custom(format={"type": "grammar", "syntax": "bnf", "definition": ""}), "'lark'", "tools[0].format.syntax"),
    (namespace(name="a b"), "pattern", "tools[0].name"),
    (namespace(tools=None), "valid array", "tools[0].tools"),
    (namespace(5), "valid object", "tools[0].tools[0]"),
    (namespace({"type": "web_search"}), "'web_search' is none of", "tools[0].tools[0].type"),
    (namespace({"type": "function", "name": ""}), "pattern", "tools[0].tools[0].name"),
    (namespace(*[{"type": "custom", "name": "f"}] * 501), "at most 500", "tools[0].tools"),
]

SHELL = {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}}
SHELL_OUTPUT = {"type": "shell_call_output", "call_id": "c", "output": []}
MCP_CALL = {"type": "mcp_call", "server_label": "m", "name": "f", "arguments": "{}"}
APPROVAL = {"type": "mcp_approval_response", "approval_request_id": "r", "approve": True}
PATCH = {"type": "apply_patch_call", "call_id": "c"}

CALLS = [
    (item(type="local_shell_call", call_id="c"), "Field required", "input[0].action"),
    (item(type="local_shell_call", call_id="c", action={}), "Field required", "input[0].action.command"),
    (item(type="local_shell_call", call_id="c", action={"env": {"A": "b", "C": 5}}), "string", "input[0].action.env.C"),
    (item(type="local_shell_call_output", output=""), "Field required", "input[0].call_id"),
    (item(type="local_shell_call_output", output="", id=5), "valid string", "input[0].id"),
    (item(type="local_shell_call_output", call_id="c", output=[]), "valid string", "input[0].output"),
    (item(**SHELL | {"action": {"commands": "ls"}}), "valid array", "input[0].action.commands"),
    (item(**SHELL | {"action": {"commands": [5]}}), "valid string", "input[0].action.commands[0]"),
    (item(**SHELL | {"action": {"commands": [], "timeout_ms": -1}}), "integer >= 0", "input[0].action.timeout_ms"),
    (item(**SHELL, environment={}), "Field required", "input[0].environment.type"),
    (item(**SHELL_OUTPUT | {"output": "x"}), "valid array", "input[0].output"),
    (item(**SHELL_OUTPUT | {"output": [{}]}), "Field required", "input[0].output[0].outcome"),
    (item(**SHELL_OUTPUT | {"output": [{"outcome": {"type": "x"}}]}), "'exit'", "input[0].output[0].outcome.type"),
    (item(**PATCH), "Field required", "input[0].operation"),
    (item(**PATCH, operation={"type": "move", "path": "x"}), "'create_file'", "input[0].operation.type"),
    (item(**PATCH, operation={"type": "delete_file"}), "Field required", "input[0].operation.path"),
    (item(type="apply_patch_call_output", call_id="c", status="x"), "'failed'", "input[0].status"),
    (item(type="mcp_list_tools"), "Field required", "input[0].server_label"),
    (item(type="mcp_list_tools", server_label="m", tools=[{}]), "Field required", "input[0].tools[0].name"),
    (item(type="mcp_list_tools", server_label="m", error=5), "valid string or object", "input[0].error"),
    (item(**MCP_CALL | {"name": ""}), "length >= 1", "input[0].name"),
    (item(**MCP_CALL | {"arguments": {}}), "valid string", "input[0].arguments"),
    (item(**MCP_CALL, output=[]), "valid string", "input[0].output"),
    (item(**MCP_CALL | {"type": "mcp_approval_request", "server_label": None}), "string", "input[0].server_label"),
    (item(**APPROVAL | {"approval_request_id": ""}), "length >= 1", "input[0].approval_request_id"),
    (item(**APPROVAL | {"approve": "yes"}), "valid boolean", "input[0].approve"),
    (item(type="code_interpreter_call", code=5), "valid string", "input[0].code"),
    (item(type="code_interpreter_call", outputs=[{"type": "x"}]), "'image', 'logs'", "input[0].outputs[0].type"),
    (item(type="web_search_call", action="x"), "valid object", "input[0].action"),
    (item(type="web_search_call", action={"url": 5}), "valid string", "input[0].action.url"),
]

TOOLS = [
    ({"tools": [{"type": "mcp"}]}, "Field required", "tools[0].server_label"),
    (server(server_label="a b"), "pattern", "tools[0].server_label"),
    *[
        (server(server_label=label), f"labelled '{label}'", "tools[0].server_label")
        for label in ("functions", "assistant", "user", "system", "developer", "tool", "all")
    ],
    (server(server_url=5), "valid string", "tools[0].server_url"),
    *[
        (server(server_url=url), "http or https, with a host", "tools[0].server_url")
        for url in ("", "docs.example", "ftp://a", "file:///etc", "http://", "http://:80", "http://a:b", "http://[a")
    ],
    *[
        (server(server_url=url), "pattern", "tools[0].server_url")
        for url in ("http://a b", "http://a\n.example", "http://a\\@b", "http://a\x00")
    ],
    (server(server_url="http://" + "a" * 2048), "at most 2048", "tools[0].server_url"),
    *[
        (server(server_url=f"http://{user}@a.example"), "user or password is not allowed", "tools[0].server_url")
        for user in ("", "u", "u:p", ":p")
    ],
    (server(connector_id="c"), "exclude each other", "tools[0].connector_id"),
    (server(headers=["a"]), "valid object", "tools[0].headers"),
    (server(headers={"a": 5}), "valid string", "tools[0].headers.a"),
    (server(headers={"a b": "x"}), "pattern", "tools[0].headers.a b"),
    (server(headers={"a": "x\r\nb: y"}), "pattern", "tools[0].headers.a"),
    (server(headers={"a": "\u00e9"}), "pattern", "tools[0].headers.a"),
    (server(headers={"a": "x", "A": "y"}), "should be unique", "tools[0].headers"),
    (server(headers={"Host": "a.example"}), "cannot be set", "tools[0].headers"),
    (server(headers={str(number): "" for number in range(51)}), "at most 50", "tools[0].headers"),
    (server(authorization=""), "pattern", "tools[0].authorization"),
    (server(authorization="a b"), "pattern", "tools[0].authorization"),
    (server(authorization="a", headers={"AUTHORIZATION": "b"}), "exclude", "tools[0].authorization"),
    (server(allowed_tools="f"), "valid object", "tools[0].allowed_tools"),
    (server(allowed_tools=[5]), "valid string", "tools[0].allowed_tools[0]"),
    (server(allowed_tools={"tool_names": "f"}), "valid array", "tools[0].allowed_tools.tool_names"),
    (server(allowed_tools={"read_only": 1}), "valid boolean", "tools[0].allowed_tools.read_only"),
    (server(require_approval="sometimes"), "'always' or 'never'", "tools[0].require_approval"),
    (server(require_approval=[]), "valid object", "tools[0].require_approval"),
    (server(require_approval={"never": []}), "valid object", "tools[0].require_approval.never"),
    ({"tools": [{"type": "code_interpreter", "container": {}}]}, "required", "tools[0].container.type"),
    ({"tools": [{"type": "code_interpreter", "container": 5}]}, "valid object", "tools[0].container"),
    ({"tools": [{"type": "shell", "environment": {"type": "x"}}]}, "'local'", "tools[0].environment.type"),
    (choice(type="mcp"), "Field required", "tool_choice.server_label"),
    (choice(type="mcp", server_label="m", name=5), "valid string", "tool_choice.name"),
    (
        choice(type="allowed_tools", mode="auto", tools=[{"type": "mcp"}]),
        "required",
        "tool_choice.tools[0].server_label",
    ),
]


@pytest.mark.parametrize(
    ("body", "words", "param"), TYPES + ITEMS + VALUES + CALLS + TOOLS, ids=lambda value: json.dumps(value)[:60]
)
def test_bad_value_is_refused_with_its_place(body: Json, words: str, param: str) -> None:
    message, found = refusal(json.dumps(body).encode())
    assert found == param
    assert words in message
    assert message.endswith(f" (at {param})")


MISTAKES = [
    ({"model": 5}, "invalid_type"),
    ({"max_output_tokens": 16.5}, "invalid_type"),
    ({"tool_choice": 5}, "invalid_type"),
    (item(role="user", content="x", status="done"), "invalid_value"),
    (part(type="text", text="x"), "invalid_value"),
    (function(name="a b"), "invalid_value"),
    (server(server_url="docs.example"), "invalid_value"),
    (item(content="x"), "missing_required_parameter"),
    (part(text="x"), "missing_required_parameter"),
    ({"max_output_tokens": 15}, "integer_below_min_value"),
    ({"top_logprobs": 21}, "integer_above_max_value"),
    ({"seed": 2**63}, "integer_above_max_value"),
    ({"temperature": -0.1}, "decimal_below_min_value"),
    ({"top_p": 0}, "decimal_below_min_value"),
    ({"temperature": 3}, "decimal_above_max_value"),
    ({"stop": ""}, "empty_string"),
    ({"prompt_cache_key": "a" * 65}, "string_above_max_length"),
    ({"structured_outputs": {"choice": []}}, "empty_array"),
    ({"stop": ["a"] * 5}, "array_above_max_length"),
    ({"metadata": {str(number): "" for number in range(17)}}, "object_above_max_properties"),
]


@pytest.mark.parametrize(("body", "code"), MISTAKES, ids=lambda value: json.dumps(value)[:60])
def test_refusal_has_the_code_on_which_clients_branch(body: Json, code: str) -> None:
    assert refused(json.dumps(body).encode()).code == code


def test_first_bad_value_is_named() -> None:
    """Of several mistakes the first is named, in the order of the API's parameters; long lists come last."""
    assert refusal(b'{"tools": [5], "input": [{}], "model": "m"}')[1] == "input[0].role"
    assert refusal(b'{"tools": [5], "input": [{}], "model": 5, "stream": 5}')[1] == "model"


FAR = [
    (item(role="user", content=[PART] * MANY + [{"type": "input_text"}]), f"input[0].content[{MANY}].text"),
    (item(**RESULT, output=[PART] * MANY + [{"type": "text"}]), f"input[0].output[{MANY}].type"),
    (item(type="reasoning", summary=[{"type": "summary_text", "text": "x"}] * MANY + [5]), f"input[0].summary[{MANY}]"),
    ({"input": [MESSAGE] * MANY + [{"content": "x"}]}, f"input[{MANY}].role"),
    ({"input": [MESSAGE] * MANY + [{"role": "user", "content": [PART, 5]}]}, f"input[{MANY}].content[1]"),
    ({"tools": [{"type": "computer"}] * MANY + [{"type": "function"}]}, f"tools[{MANY}].name"),
    ({"input": "x", "tools": [{"type": "function", "name": "f", "strict": "x" * MANY}]}, "tools[0].strict"),
    (input_tools(*[{"type": "computer"}] * MANY, {"type": "function"}), f"input[0].tools[{MANY}].name"),
    (
        {"previous_input_messages": [{"role": "user", "content": "x"}] * MANY + [{"content": 1}]},
        f"previous_input_messages[{MANY}].content",
    ),
]


@pytest.mark.parametrize(("body", "param"), FAR, ids=[param for _, param in FAR])
def test_distant_place_is_found(body: Json, param: str) -> None:
    assert refusal(json.dumps(body).encode())[1] == param


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
def test_refusal_is_short(body: Json) -> None:
    message, param = refusal(json.dumps(body).encode())
    assert len(message) < 900
    assert len(param or "") < 150


@pytest.mark.parametrize("cut", range(4))
def test_syntax_error_deep_in_a_long_body_is_refused(cut: int) -> None:
    broken = [b'{"role": user}', rb'"\x"', b"[" * 100_000, b'"\xff"'][cut]
    message, param = refusal(b'{"input": [%b%b]}' % (b'{"role": "user", "content": "x"}, ' * MANY, broken))
    assert message.startswith("The body is not valid JSON: ")
    assert param is None
