from __future__ import annotations

import json
from typing import get_args

import pytest
from msgspec.structs import replace

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.items import FunctionCall
from penstock.pipeline.protocol.params import tools
from penstock.pipeline.protocol.params.items import ItemReference, message
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope, trace_headers
from penstock.pipeline.protocol.params.validation import read_request
from tests.support import requests
from tests.support.clock import count_instructions
from tests.support.request_bodies import CLIENTS, CODEX


@pytest.mark.parametrize("client", CLIENTS)
def test_bodies_of_real_clients_are_accepted(client: str) -> None:
    body = CLIENTS[client]
    request = requests.read_body(body)
    assert len(request.tools or ()) == len(body.get("tools", ()))
    assert len(request.input or ()) == len(body["input"])
    read = request.model_dump(
        include={"model", "instructions", "store", "stream", "include", "tool_choice", "metadata"}, exclude_none=True
    )
    assert read == {name: body[name] for name in CreateResponse.model_fields if name in read and name in body}


def test_unknown_keys_are_ignored() -> None:
    """Clients send keys of their own at every depth; these neither fail nor arrive."""
    request = requests.read_body(CODEX)
    assert not hasattr(request, "client_metadata")
    assert isinstance(request.input, list)
    assert isinstance(request.input[3], FunctionCall)
    assert request.input[3].namespace == "multi_agent_v1"
    assert request == requests.read_body({name: value for name, value in CODEX.items() if name != "client_metadata"})


@pytest.mark.parametrize("name", CreateResponse.model_fields)
def test_null_means_absent(name: str) -> None:
    assert requests.read_body({name: None}) == requests.read_body({})


def test_parts_may_mark_where_a_prompt_is_cached() -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
    image = {"type": "input_image", "image_url": "https://a.example/x.png"}
    for parts in ([requests.PART, image], [{"type": "output_text", "text": "x"}]):
        marked = requests.part(**parts[0] | mark)
        marked["input"][0]["content"] += [part | mark for part in parts[1:]]
        assert requests.read_body(marked) == requests.read_body({"input": [{"role": "user", "content": parts}]})


def test_item_without_a_type_is_a_message() -> None:
    request = requests.read_body({"input": [requests.MESSAGE, {"type": None, **requests.MESSAGE}]})
    assert request.input == [message("user", "x")] * 2


def test_item_with_only_an_id_is_a_reference() -> None:
    written = [{"type": "item_reference", "id": "x"}, {"id": "x"}, {"type": None, "id": "x", "status": None}]
    read_as = requests.read_body({"input": written}).input
    assert isinstance(read_as, list)
    assert [each.id for each in read_as if isinstance(each, ItemReference)] == ["x"] * 3
    assert requests.read_body({"input": [{"id": "x", **requests.MESSAGE}]}).input == [
        replace(message("user", "x"), id="x")
    ]


ACTION: requests.Json = {"type": "exec", "env": {}, "command": ["ls"]}
EXIT: requests.Json = {"stdout": "x", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}
ANSWERED = (
    items.Message("msg_1", "completed", "assistant", (items.OutputText("Hi"), items.Refusal("No.")), "commentary"),
    items.Message("msg_2", "completed", "user", (items.InputImage(file_id="file_1"), items.InputFile(file_data="a"))),
    items.Reasoning("rs_1", (items.SummaryText("a"),), (items.ReasoningText("b"),), "sealed", "incomplete"),
    items.FunctionCall("fc_1", "c", "f", "{}", "incomplete", "n", is_async=True),
    items.FunctionCallOutput("fco_1", "c", (items.InputText("x"),), "completed"),
    items.CustomToolCall("ctc_1", "c", "f", "x", "completed"),
    items.CustomToolCallOutput("ctco_1", "c", "x", "completed"),
    items.LocalShellCall("lsh_1", "c", ACTION, "completed"),
    items.LocalShellCallOutput("c", "x", "completed"),
    items.ShellCall("sh_1", "c", {"commands": ["ls"]}, "completed", {"type": "local"}),
    items.ShellCallOutput("sho_1", "c", (EXIT,), "completed", 5),
    items.ApplyPatchCall("apc_1", "c", {"type": "delete_file", "path": "a"}, "completed"),
    items.ApplyPatchCallOutput("apco_1", "c", "failed", "No."),
    items.ToolSearchCall("tsc_1", "c", {"goal": "x"}, "completed", "server"),
    items.ToolSearchOutput("tso_1", "c", ({"type": "custom", "name": "f"},), "completed", "client"),
    items.ComputerCall("cu_1", "c", "completed", ({"id": "s"},), {"type": "wait"}, ({"type": "wait"},)),
    items.ComputerCallOutput("cuo_1", "c", items.Screenshot("data:,"), "failed", ({"id": "s"},)),
    items.McpListTools("mcpl_1", "m", (items.ListedTool("f", {"type": "object"}, "F."),), "No."),
    items.McpCall("mcp_1", "m", "f", "{}", "failed", None, {"type": "x"}, "mcpr_1"),
    items.McpApprovalRequest("mcpr_1", "m", "f", "{}"),
    items.McpApprovalResponse("mcpa_1", "mcpr_1", approve=False, reason="No."),
    items.CodeInterpreterCall("ci_1", "1", "cntr_1", "failed", ({"type": "logs", "logs": "x"},)),
    items.WebSearchCall("ws_1", "completed", {"type": "search", "query": "x"}),
    items.FileSearchCall("fs_1", ("x",), "completed", ({"text": "y"},)),
    items.Compaction("cmp_1", "sealed"),
    items.AdditionalTools("at_1", "developer", ({"type": "custom", "name": "f"},)),
    items.ImageGenerationCall("ig_1", "generating", "aGk="),
    items.Program("prog_1", "c", "f()", "x"),
    items.ProgramOutput("progo_1", "c", "2", "incomplete"),
    items.ConfigurationUpdate("cu_2", {"effort": "low"}, {"format": {"type": "text"}}),
)


@pytest.mark.parametrize("item", ANSWERED, ids=lambda item: item.id)
def test_item_of_an_answer_is_the_same_item_of_an_input(item: items.Item) -> None:
    assert CreateResponse(input=[item]).input == [item]


def test_all_items_of_an_answer_are_tried() -> None:
    assert {type(item) for item in ANSWERED} == set(get_args(items.Item))


@pytest.mark.parametrize("wide", [1, requests.MANY])
def test_tool_is_read_by_its_type(wide: int) -> None:
    grammar = {"type": "grammar", "syntax": "regex", "definition": "a" * wide}
    sent = [
        {"type": "function", "name": "f", "defer_loading": False},
        {"type": "custom", "name": "c", "format": {"type": "text"}},
        {"type": "custom", "name": "g", "format": grammar},
        *requests.namespace({"type": "function", "name": "f"}, {"type": "custom", "name": "c"})["tools"],
        *requests.server(allowed_tools=["f"] * wide, x=5)["tools"],
        {"type": "code_interpreter", "container": {"type": "auto", "x": 5}},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "unheard_of", "name": 5, "server_label": "x"},
    ]
    f, c, g, n, m, i, s, o = requests.read_body({"tools": sent}).tools or []
    assert isinstance(f, tools.FunctionToolParam)
    assert isinstance(c, tools.CustomToolParam)
    assert c.format == tools.TextFormat(type="text")
    assert isinstance(g, tools.CustomToolParam)
    assert g.format == tools.GrammarFormat(type="grammar", syntax="regex", definition="a" * wide)
    assert isinstance(n, tools.NamespaceToolParam)
    assert [type(inner) for inner in n.tools] == [tools.FunctionToolParam, tools.CustomToolParam]
    assert isinstance(m, tools.McpToolParam)
    assert m.allowed_tools == ["f"] * wide
    assert isinstance(i, tools.CodeInterpreterToolParam)
    assert isinstance(s, tools.ShellToolParam)
    assert s.runs_here
    assert isinstance(o, tools.OtherToolParam)
    assert [tool.sent for tool in (f, c, g, n, m, i, s, o)] == sent


@pytest.mark.parametrize("reference", ["conv_1", {"id": "conv_1"}, {"id": "conv_1", "object": "conversation"}], ids=str)
def test_conversation_is_named_by_its_id(reference: requests.Json) -> None:
    assert requests.read_body({"conversation": reference}).conversation_id == "conv_1"
    assert requests.read_body({}).conversation_id is None


@pytest.mark.parametrize("name", ["envelope", "_envelope", "owner", "trace_headers", "is_recorded"])
def test_body_cannot_set_its_envelope(name: str) -> None:
    for value in ("a", True, {"owner": "a", "traceparent": "00-1"}):
        request = requests.read_body({"input": "x", name: value})
        assert request.envelope == Envelope()
    assert (request.inside(Envelope("b")).envelope.owner, request.inside(Envelope("b")).input) == ("b", "x")
    assert request.envelope.owner == ""


def test_trace_headers_are_found_in_any_case() -> None:
    """All other headers are left out, as they may hold secrets."""
    headers = {"TraceParent": "00-2", "tracestate": "a=1", "Authorization": "secret"}
    assert trace_headers(headers) == {"traceparent": "00-2", "tracestate": "a=1"}


@pytest.mark.parametrize("value", ["a=\udcff", "a=" + "b" * 511])
def test_trace_headers_that_cannot_be_sent_on_are_left_out(value: str) -> None:
    assert trace_headers({"traceparent": "00-2", "tracestate": value}) == {"traceparent": "00-2"}


@pytest.mark.parametrize(
    "body",
    [
        {"temperature": 0, "top_p": 1, "top_logprobs": 0, "max_output_tokens": 16, "max_tool_calls": 1},
        {"temperature": 2, "top_p": 1e-9, "top_logprobs": 20, "max_output_tokens": 10**30},
        {"metadata": {f"{number:064}": "v" * 512 for number in range(16)}},
        {"input": ""},
        {"input": []},
        {"input": "\x00 \U0001f600"},
        requests.function(name="f" * 64, parameters=None),
        requests.item(type="reasoning", summary=None),
        requests.call(call_id="c" * 64, arguments="no JSON"),
        requests.call(namespace=None, id=None, status=None),
        {"top_k": -1, "min_p": 1, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-9},
        {"seed": -(2**63), "priority": 2**63 - 1, "cache_salt": "a" * 1024, "stop": ["a" * 1000] * 4},
        {"stop_token_ids": [5] * 100, "bad_words": ["a" * 1000] * 128, "allowed_token_ids": [5] * 1024},
        {"logit_bias": {str(token): 1 for token in range(1024)}},
        {"safety_identifier": "a" * 128, "prompt_cache_key": "a" * 64},
        requests.output_format(type="json_schema", name="x" * 64, schema={}, strict=None),
        requests.namespace(*[{"type": "custom", "name": "f"}] * 500),
        requests.namespace(description=None, name="n" * 64),
        requests.server(server_label="m" * 64, server_url="http://[::1]:8000/" + "a" * 2030, authorization="a" * 8192),
        requests.server(headers={"a" * 128: "a" * 8192, "b": "a b\tc", "c": ""} | {str(n): "" for n in range(47)}),
        requests.server(
            server_url=None, headers=None, allowed_tools=None, require_approval=None, connector_id="c" * 64
        ),
    ],
    ids=lambda body: json.dumps(body)[:60],
)
def test_values_on_the_limit_are_accepted(body: requests.Json) -> None:
    requests.read_body(body)


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
def test_lone_surrogate_is_replaced(blank: int, written: str, read_as: str) -> None:
    """JavaScript may cut a string between surrogates: the half becomes U+FFFD, and nothing else changes."""
    body = f'{{"input": "{written}", "instructions": "{"x" * blank}"}}'.encode()
    assert read_request(body).input == read_as


@pytest.mark.parametrize("wide", [1, requests.MANY])
def test_body_in_pieces_makes_the_same_request(wide: int) -> None:
    body: requests.Json = {
        "model": "m" * wide,
        "instructions": "\u4e16\U0001f600" * wide,
        "input": [
            *[{"role": "user", "content": f"x{number}"} for number in range(wide)],
            {"role": "user", "content": [{"type": "input_text", "text": f"x{number}"} for number in range(wide)]},
            {**requests.RESULT, "output": [requests.PART] * wide, "content": [5] * wide},
            {**requests.RESULT, "type": "shell_call_output", "output": [{"outcome": {"type": "timeout"}}] * wide},
            {"type": "mcp_list_tools", "server_label": "m", "tools": [{"name": f"f{n}"} for n in range(wide)]},
            {"type": "code_interpreter_call", "outputs": [{"type": "logs", "logs": "x"}] * wide},
        ],
        "tools": [requests.function(name=f"f{number}", parameters={"a": [{}]})["tools"][0] for number in range(wide)],
        "previous_input_messages": [{"role": "user", "content": f"x{number}"} for number in range(wide)],
    }
    body["input"].append(requests.input_tools(*body["tools"])["input"][0])
    assert requests.read_body(body) == CreateResponse.model_validate(body)


def test_long_list_costs_its_own_length() -> None:
    def cost(tools: int, keys: int) -> int:
        unknown = {f"k{number}": 0 for number in range(keys)}
        body = requests.item(
            type="additional_tools", role="developer", tools=[{"type": "web_search"}] * tools, **unknown
        )
        return count_instructions(lambda: requests.read_body(body))

    assert cost(2_000, 2_000) < 3 * (cost(2_000, 0) + cost(0, 2_000))


def test_program_that_gives_no_field_is_stopped() -> None:
    """A body of a client has unknown keys without harm; in a program they are mistakes."""
    given: requests.Json = {"instruction": "Hi"}
    with pytest.raises(TypeError, match=r"no field of CreateResponse 'instruction' \(did you mean instructions\?\)"):
        CreateResponse(**given)
    assert CreateResponse.model_validate(given).instructions is None


@pytest.mark.parametrize(
    "given", [{"temperature": 9}, {"temperature": "hot"}, {"input": 5}, {"tools": [{"type": "function"}]}]
)
def test_program_that_gives_a_wrong_value_gets_the_refusal_of_a_body(given: requests.Json) -> None:
    over_http = requests.refused(json.dumps({"input": "x"} | given).encode())
    with pytest.raises(InvalidRequest) as caught:
        CreateResponse(**({"input": "x"} | given))
    assert (str(caught.value), caught.value.param) == (str(over_http), over_http.param)
    assert caught.value.code == over_http.code
