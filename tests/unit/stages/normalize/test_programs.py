"""Programs in a request: who may call which tools, and which items belong together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import pytest
from msgspec import UNSET

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol import items as wire
from penstock.pipeline.protocol.superseded import unsuperseded
from penstock.pipeline.protocol.tools import FunctionTool, HostedTool, Toolset, tool_key
from penstock.services.store.store import Store
from tests.support.requests import additional_tools, normalize, store_answer

Json: TypeAlias = dict[str, Any]

PROGRAMS: Json = {"type": "programmatic_tool_calling"}
ALONE: Json = {"allowed_callers": ["programmatic"]}
BOTH: Json = {"allowed_callers": ["direct", "programmatic"]}
HOSTED = frozenset({"program", "python", "browser", "container", "file_search"})


def function(name: str, **fields: Any) -> Json:
    return {"type": "function", "name": name, "parameters": {"type": "object"}, **fields}


def mcp(label: str = "m", **fields: Any) -> Json:
    return {"type": "mcp", "server_label": label, "server_url": "https://a.example", **fields}


def shell(kind: str = "container_auto", **fields: Any) -> Json:
    return {"type": "shell", "environment": {"type": kind}, **fields}


async def toolset(store: Store, *tools: Json, **body: Any) -> Toolset:
    resolved = await normalize(store, input="Hi", tools=list(tools), hosted=HOSTED, **body)
    return resolved.facts.tools


def names(tools: Sequence[Any]) -> list[str]:
    return [tool.name for tool in tools]


async def refusal(store: Store, *tools: Json, **body: Any) -> tuple[str, str | None]:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, **{"input": "Hi", "tools": list(tools), "hosted": HOSTED} | body)
    assert caught.value.status == 400
    return caught.value.message, caught.value.param


CALLABLE: list[Json] = [
    function("f"),
    {"type": "custom", "name": "f"},
    {"type": "code_interpreter"},
    shell(),
    {"type": "web_search"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "mcp", "server_label": "python"},
]


@pytest.mark.parametrize("tool", CALLABLE, ids=lambda tool: tool["type"])
async def test_callers_say_who_sees_a_tool(store: Store, tool: Json) -> None:
    alone = await toolset(store, PROGRAMS, tool | ALONE)
    both = await toolset(store, tool | BOTH, PROGRAMS)
    direct = await toolset(store, PROGRAMS, tool | {"allowed_callers": ["direct"]})
    assert names(alone.tools) == ["program"]
    assert direct.in_programs == ()
    assert alone.in_programs
    assert names(alone.in_programs) == names(both.in_programs or ()) == names(direct.tools[1:])
    assert names(both.tools) == [*names(alone.in_programs), "program"]


@pytest.mark.parametrize("tool", CALLABLE, ids=lambda tool: tool["type"])
async def test_without_programs_a_tool_is_the_models(store: Store, tool: Json) -> None:
    offered = await toolset(store, tool | BOTH)
    assert offered.in_programs is UNSET
    assert offered.tools
    message, param = await refusal(store, function("g"), tool | ALONE)
    assert (message.partition(":")[0], param) == ("Only programs may call this", "tools[1].allowed_callers")


async def test_tools_of_a_namespace_have_callers_of_their_own(store: Store) -> None:
    tools = [function("a"), function("b", **ALONE), {"type": "custom", "name": "c", **BOTH}]
    offered = await toolset(store, {"type": "namespace", "name": "n", "description": "", "tools": tools}, PROGRAMS)
    assert [tool_key(tool) for tool in offered.tools] == [("n", "a"), ("n", "c"), ("program", "program")]
    assert [tool_key(tool) for tool in offered.in_programs or ()] == [("n", "b"), ("n", "c")]


async def test_servers_tell_who_may_call_their_tools(store: Store) -> None:
    offered = await toolset(store, mcp("a"), mcp("b", **ALONE), mcp("c", **BOTH), PROGRAMS)
    assert [server.callers for server in offered.servers] == [UNSET, "programs", "both"]
    assert [server.callers for server in (await toolset(store, mcp("c", **BOTH))).servers] == [UNSET]
    assert (await refusal(store, mcp(**ALONE)))[1] == "tools[0].allowed_callers"


SCHEMA: Json = {"type": "object", "properties": {"mm": {"type": "number"}}}


async def test_schema_of_results_is_for_programs(store: Store) -> None:
    sent = function("f", output_schema=SCHEMA, **{"async": True}, **BOTH)
    resolved = await normalize(store, input="Hi", tools=[PROGRAMS, sent], hosted=HOSTED)
    (tool,) = resolved.facts.tools.in_programs or [None]
    assert isinstance(tool, FunctionTool)
    assert (tool.output_schema, tool.is_async) == (SCHEMA, UNSET)
    assert resolved.facts.response.tools[1] == sent | {"description": None, "strict": None}


REFUSED: list[tuple[list[Json], Json, str]] = [
    ([PROGRAMS, PROGRAMS], {}, "tools[1].type"),
    ([PROGRAMS, function("f"), function("f", **ALONE)], {}, "tools[2].name"),
    ([PROGRAMS, function("f", **ALONE), function("f")], {}, "tools[2].name"),
    ([PROGRAMS, function("f", allowed_callers=[])], {}, "tools[1].allowed_callers"),
    ([PROGRAMS, function("f", allowed_callers=["code"])], {}, "tools[1].allowed_callers[0]"),
    ([PROGRAMS, shell("local", **ALONE)], {}, "tools[1].allowed_callers"),
    ([PROGRAMS, {"type": "apply_patch", **ALONE}], {}, "tools[1].allowed_callers"),
    ([PROGRAMS, {"type": "tool_search"}, function("f", defer_loading=True, **BOTH)], {}, "tools[2].defer_loading"),
    ([PROGRAMS, {"type": "tool_search"}, mcp(defer_loading=True, **ALONE)], {}, "tools[2].defer_loading"),
    ([PROGRAMS, function("f", **ALONE)], {"tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
    ([PROGRAMS, mcp(**ALONE)], {"tool_choice": {"type": "mcp", "server_label": "m"}}, "tool_choice"),
    ([function("f")], {"tool_choice": PROGRAMS}, "tool_choice"),
]


@pytest.mark.parametrize(("tools", "body", "param"), REFUSED, ids=str)
async def test_what_no_program_could_do_is_refused(store: Store, tools: list[Json], body: Json, param: str) -> None:
    assert (await refusal(store, *tools, **body))[1] == param


async def test_choice_of_programs_leaves_them_their_tools(store: Store) -> None:
    tools = [PROGRAMS, function("f", **ALONE), function("g", **BOTH), function("h")]
    offered = await toolset(store, *tools, tool_choice=PROGRAMS)
    assert names(offered.callable) == ["program"]
    assert offered.choice == "required"
    assert names(offered.in_programs or ()) == ["f", "g"]


async def test_allowed_tools_limit_programs_too(store: Store) -> None:
    named = [PROGRAMS, {"type": "function", "name": "f"}, {"type": "function", "name": "h"}]
    tools = [PROGRAMS, function("f", **ALONE), function("g", **BOTH), function("h")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": named}
    offered = await toolset(store, *tools, tool_choice=choice)
    assert names(offered.callable) == ["program", "h"]
    assert names(offered.in_programs or ()) == ["f"]
    only = choice | {"mode": "required", "tools": named[1:2]}
    assert "Only programs" in (await refusal(store, *tools, tool_choice=only))[0]


@pytest.mark.parametrize(
    ("others", "spoken"),
    [
        ([], "python"),
        ([{"type": "code_interpreter"}], ""),
        ([{"type": "code_interpreter", **ALONE}], "python"),
        ([function("python")], ""),
        ([{"type": "namespace", "name": "python", "description": "", "tools": [function("f")]}], ""),
    ],
    ids=str,
)
async def test_programs_are_called_python_if_nothing_else_is(store: Store, others: list[Json], spoken: str) -> None:
    offered = (await toolset(store, PROGRAMS, *others)).tools
    assert [tool.spoken for tool in offered if isinstance(tool, HostedTool) and tool.name == "program"] == [spoken]


async def test_items_bring_tools_for_programs(store: Store) -> None:
    brought = [additional_tools(function("f", **ALONE)), {"role": "user", "content": "Hi"}]
    resolved = await normalize(store, input=brought, tools=[PROGRAMS], hosted=HOSTED)
    assert names(resolved.facts.tools.in_programs or ()) == ["f"]
    assert (await refusal(store, input=brought))[1] == "input[0].tools[0].allowed_callers"


async def test_history_without_programs_is_no_error(store: Store) -> None:
    brought = [additional_tools(function("f", **ALONE), function("g")), {"role": "user", "content": "Hi"}]
    message = wire.Message("msg_1", "completed", "assistant", (wire.OutputText("Hi"),))
    await store_answer(store, "1", message, input=brought, tools=[PROGRAMS], hosted=HOSTED)
    after = await normalize(store, "2", previous_response_id="resp_1", input="And?", hosted=HOSTED)
    assert names(after.facts.tools.tools) == ["g"]
    own = [PROGRAMS, function("f"), function("g", **ALONE)]
    again = await normalize(store, "3", previous_response_id="resp_1", input="And?", tools=own, hosted=HOSTED)
    assert names(again.facts.tools.tools) == ["program", "f"]
    assert names(again.facts.tools.in_programs or ()) == ["g"]


async def test_operator_leaves_out_programs_with_what_only_they_call(store: Store) -> None:
    tools = [PROGRAMS, function("f", **ALONE), function("g", **BOTH), mcp(**ALONE)]
    left_out = frozenset({"programmatic_tool_calling"})
    resolved = await normalize(store, input="Hi", tools=tools, left_out=left_out)
    assert names(resolved.facts.tools.tools) == ["g"]
    assert resolved.facts.tools.servers == ()
    assert resolved.facts.tools.in_programs is UNSET


# Items

CODE = "print(await f())"


def program(call_id: str = "p", **fields: Any) -> Json:
    return {"type": "program", "call_id": call_id, "code": CODE, "fingerprint": wire.fingerprint_of(CODE), **fields}


def by(call_id: str) -> Json:
    return {"caller": {"type": "program", "caller_id": call_id}}


def call(call_id: str = "c", **fields: Any) -> Json:
    return {"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}", **fields}


def output(call_id: str = "c", **fields: Any) -> Json:
    return {"type": "function_call_output", "call_id": call_id, "output": "1", **fields}


def approval(request_id: str = "r", **fields: Any) -> Json:
    return {
        "type": "mcp_approval_request",
        "id": request_id,
        "server_label": "m",
        "name": "f",
        "arguments": "{}",
        **fields,
    }


def approved(request_id: str = "r") -> Json:
    return {"type": "mcp_approval_response", "approval_request_id": request_id, "approve": True}


ENDED: Json = {"type": "program_output", "call_id": "p", "result": "1", "status": "completed"}
NESTED = call(**by("p"))
SERVED: Json = {"type": "mcp_call", "server_label": "m", "name": "f", "arguments": "{}", "output": "1"}

FITTING: list[list[Json]] = [
    [program(), NESTED, output()],
    [program(), NESTED, output(**by("p"))],
    [program(), NESTED, call("d", **by("p")), output("d"), output()],
    [program(), NESTED, approval(**by("p")), output(), approved()],
    [program(), NESTED, output(), ENDED],
    [program(), SERVED | by("p"), ENDED],
    [program(fingerprint="of another server"), NESTED, output(), ENDED],
    [program(), approval(**by("p")), {"role": "user", "content": "No."}],
    [program(), NESTED, output(), approval(**by("p")), {"role": "user", "content": "No."}],
    [program(), ENDED, program("q"), call(**by("q")), output()],
]


@pytest.mark.parametrize("items", FITTING, ids=range(len(FITTING)))
async def test_items_of_a_program_fit(store: Store, items: list[Json]) -> None:
    resolved = await normalize(store, input=items)
    assert [item.type for item in resolved.facts.input if not isinstance(item, wire.Message)] == [
        item["type"] for item in items if "type" in item
    ]


UNFIT: list[tuple[list[Json], str]] = [
    ([NESTED, output()], "input[0].caller.caller_id"),
    ([program("q"), NESTED, output()], "input[1].caller.caller_id"),
    ([program(), call(caller={"type": "program"}), output()], "input[1].caller.caller_id"),
    ([program(), ENDED, NESTED, output()], "input[2].caller.caller_id"),
    ([program(), ENDED, SERVED | by("p")], "input[2].caller.caller_id"),
    ([program(), call(), output(**by("p"))], "input[2].caller.caller_id"),
    ([program(), NESTED, output(**by("q"))], "input[2].caller.caller_id"),
    ([program(), NESTED, call("d", **by("p")), output()], "input"),
    ([program(), NESTED, approval(**by("p")), output()], "input"),
    ([program(), approval("q", **by("p")), approval(**by("p")), approved()], "input"),
    ([ENDED], "input[0].call_id"),
    ([program(), ENDED, ENDED], "input[2].call_id"),
    ([program(fingerprint="x"), NESTED, output()], "input[0].fingerprint"),
    ([program(code="print(await g())"), NESTED, output()], "input[0].fingerprint"),
]


@pytest.mark.parametrize(("items", "param"), UNFIT, ids=[f"{at}-{param}" for at, (_, param) in enumerate(UNFIT)])
async def test_items_of_a_program_that_do_not_fit_are_refused(store: Store, items: list[Json], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input=items)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_round_is_answered_in_one_request(store: Store) -> None:
    """Also if the program is in the history."""
    written = wire.Program("prog_1", "p", CODE, wire.fingerprint_of(CODE))
    caller = wire.caller_named("p")
    calls = [wire.FunctionCall(f"fc_{name}", name, "f", "{}", "completed", caller=caller) for name in "ab"]
    await store_answer(store, "1", written, *calls, input="Hi")
    with pytest.raises(InvalidRequest, match="No tool output found for function call b") as caught:
        await normalize(store, "2", previous_response_id="resp_1", input=[output("a")])
    assert caught.value.param == "input"
    resolved = await normalize(store, "2", previous_response_id="resp_1", input=[output("b"), output("a", **by("p"))])
    assert [item.call_id for item in wire.of_type(resolved.facts.input, wire.FunctionCallOutput)] == ["b", "a"]


async def test_compaction_leaves_an_open_program_whole(store: Store) -> None:
    """It could not go on without the outcomes of its calls; of one that has ended nothing is left to do."""
    rounds = [program(), SERVED | by("p"), NESTED, output(), approval(**by("p")), approved(), call("d", **by("p"))]
    begun = [{"role": "user", "content": "Hi"}, *rounds, output("d")]
    for ended in ([], [ENDED]):
        items = (await normalize(store, input=[*begun, *ended])).facts.input
        compacted = wire.Compaction("cmp_1", "sealed")
        left = unsuperseded((*items, compacted), ())
        assert left == ((items[0], compacted) if ended else (*items, compacted))
