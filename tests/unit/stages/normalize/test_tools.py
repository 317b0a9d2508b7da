from __future__ import annotations

import logging
from typing import Any, TypeAlias

import pytest
from msgspec import UNSET

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.tools import CustomTool, FunctionTool, Grammar, ToolKey, Toolset
from penstock.services.store.store import Store
from penstock.services.tools import ToolAccess
from penstock.stages.normalize.tool_types import MISSING, unversioned
from tests.support.request_bodies import CODEX_APPLY_PATCH, CODEX_KNOWN_MODEL, WEATHER
from tests.support.requests import (
    ALL_HOSTED,
    ALL_LEFT_OUT,
    USER,
    additional_tools,
    allowed_tools,
    last_choice,
    normalize,
    normalize_cost,
    store_answer,
)

Json: TypeAlias = dict[str, Any]

LARK = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
PATCH: Json = {"type": "custom", "name": "patch", "description": "Edit.", "format": LARK, "defer_loading": False}
SAY: Json = {"type": "custom", "name": "say"}
AGENTS: Json = {"type": "namespace", "name": "agents", "description": "Helpers.", "tools": [WEATHER, SAY], "x": 1}
WEATHER_TOOL = FunctionTool("get_weather", WEATHER["description"], WEATHER["parameters"], True)
PATCH_TOOL = CustomTool("patch", "Edit.", Grammar("lark", "start: /x/"))


def of(namespace: str, tool: FunctionTool | CustomTool) -> FunctionTool | CustomTool:
    if isinstance(tool, FunctionTool):
        return FunctionTool(tool.name, tool.description, tool.parameters, tool.strict, namespace)
    return CustomTool(tool.name, tool.description, tool.grammar, namespace)


async def test_tools_are_read_into_one_set(store: Store) -> None:
    tools = (await normalize(store, input="Hi", tools=[WEATHER, PATCH, SAY, AGENTS])).facts.tools
    assert tools.tools == (
        WEATHER_TOOL,
        PATCH_TOOL,
        CustomTool("say"),
        of("agents", WEATHER_TOOL),
        of("agents", CustomTool("say")),
    )
    assert tools.descriptions == {"agents": "Helpers."}
    assert (tools.choice, tools.allowed, tools.parallel) == ("auto", None, True)


async def test_text_format_is_no_grammar(store: Store) -> None:
    """A custom tool takes any text unless it has a grammar."""
    sent = [{**SAY, "format": {"type": "text"}}]
    assert (await normalize(store, input="Hi", tools=sent)).facts.tools == Toolset((CustomTool("say"),))


async def test_tools_are_echoed(store: Store) -> None:
    bare = {"type": "function", "name": "f", "defer_loading": False, "output_schema": {}}
    response = (await normalize(store, input="Hi", tools=[bare, PATCH, AGENTS])).facts.response
    function = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    assert response.tools == (function | {"output_schema": {}}, PATCH, AGENTS)


def left_out_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("Left out")]


@pytest.mark.defect("40")
@pytest.mark.parametrize(
    "kind",
    [
        *("file_search", "code_interpreter"),
        *("computer", "computer_use_preview", "programmatic_tool_calling"),
    ],
)
async def test_unavailable_hosted_tools_are_refused_or_left_out(
    store: Store, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The operator decides, and the log names them."""
    tools = [{"type": kind, "x": 1, "vector_store_ids": ["vs_1"]}, WEATHER]
    name = unversioned(kind)
    with pytest.raises(UnsupportedParameter, match=f"--leave-out-tool {name}") as caught:
        await normalize(store, input="Hi", tools=tools, left_out=ALL_LEFT_OUT - {name})
    assert caught.value.param == "tools[0].type"
    with pytest.raises(UnsupportedParameter) as caught:
        await normalize(store, input=[USER, additional_tools(*tools)])
    assert caught.value.param == "input[1].tools[0].type"
    with caplog.at_level(logging.INFO):
        resolved = await normalize(store, input="Hi", tools=tools, left_out=frozenset({name}))
    assert resolved.facts.response.tools == (WEATHER,)
    assert resolved.facts.response.left_out_tools == (kind,)
    assert resolved.facts.tools == Toolset((WEATHER_TOOL,))
    assert left_out_lines(caplog) == [f"Left out tools: {kind}"]


@pytest.mark.defect("40")
@pytest.mark.parametrize(
    "missing",
    [
        *({"type": kind} for kind in ("web_search", "web_search_preview_2025_03_11", "image_generation")),
        {"type": "web_search", "external_web_access": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("own", [WEATHER, PATCH, AGENTS, {"type": "local_shell"}], ids=str)
async def test_tool_that_agents_declare_unasked_is_left_out(
    store: Store, missing: Json, own: Json, caplog: pytest.LogCaptureFixture
) -> None:
    """Coding agents declare it beside their own tools in each request; the response and the log name it."""
    with caplog.at_level(logging.INFO):
        resolved = await normalize(store, input="Hi", tools=[missing, own])
    assert (resolved.facts.response.tools, resolved.facts.response.left_out_tools) == ((own,), (missing["type"],))
    assert left_out_lines(caplog) == [f"Left out tools: {missing['type']}"]
    in_items = await normalize(store, input=[USER, additional_tools(missing, own)])
    assert in_items.facts.response.left_out_tools == (missing["type"],)


async def test_cached_search_of_an_agent_leaves_the_web_alone(store: Store) -> None:
    """Without the search, the model reaches no page, as the request wants it."""
    search = {"type": "web_search", "external_web_access": False}
    resolved = await normalize(store, input="Hi", tools=[search, WEATHER], hosted=ALL_HOSTED)
    assert (resolved.facts.tools, resolved.facts.response.left_out_tools) == (Toolset((WEATHER_TOOL,)), ("web_search",))
    with pytest.raises(UnsupportedParameter, match="no cache of the web"):
        await normalize(store, input="Hi", tools=[search], hosted=ALL_HOSTED)


@pytest.mark.parametrize("choice", [{"type": "web_search"}, allowed_tools({"type": "web_search"}, mode="required")])
async def test_tool_that_the_choice_forces_is_never_left_out(store: Store, choice: Json) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input="Hi", tools=[{"type": "web_search"}, WEATHER], tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, "tool_choice")


@pytest.mark.parametrize("kind", ["web_search", "image_generation"])
async def test_tool_that_stands_alone_is_refused(store: Store, kind: str) -> None:
    with pytest.raises(UnsupportedParameter, match=f"does not run tools of type '{kind}'"):
        await normalize(store, input="Hi", tools=[{"type": kind}])


async def test_all_missing_tools_can_be_left_out(store: Store) -> None:
    tools = [{"type": kind} for kind in ("web_search", "image_generation", "unheard_of", "code_interpreter")]
    hosted: frozenset[str] = frozenset({"python"})
    resolved = await normalize(store, input="Hi", tools=tools, hosted=hosted, left_out=frozenset({MISSING}))
    assert resolved.facts.response.left_out_tools == ("web_search", "image_generation", "unheard_of")
    assert resolved.facts.response.tools == ({"type": "code_interpreter"},)
    assert (await normalize(store, input="Hi")).facts.response.left_out_tools is UNSET


@pytest.mark.parametrize(
    ("kind", "option"),
    [("web_search_preview", "--web-search"), ("code_interpreter", "--sandbox"), ("image_generation", None)],
)
async def test_refusal_names_the_option_that_provides_the_tool(store: Store, kind: str, option: str | None) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        await normalize(store, input="Hi", tools=[{"type": kind}])
    provided = f"provide it by {option}, or " if option else ""
    left_out = f"Its operator can {provided}have it left out of requests: --leave-out-tool {unversioned(kind)}."
    assert caught.value.message == f"This server does not run tools of type {kind!r}. {left_out}"


@pytest.mark.parametrize(
    ("access", "whose"),
    [
        (ToolAccess(frozenset({"browser"})), "Clients of this server"),
        (ToolAccess(None, lambda _: frozenset({"browser"})), "This API key"),
    ],
)
async def test_refusal_of_a_denied_tool_names_who_may_not_use_it(store: Store, access: ToolAccess, whose: str) -> None:
    with pytest.raises(UnsupportedParameter, match=f"{whose} may not use tools of type 'shell'") as caught:
        tool = {"type": "shell", "environment": {"type": "container_auto"}}
        await normalize(store, input="Hi", tools=[tool], hosted=ALL_HOSTED, access=access)
    assert caught.value.param == "tools[0].type"


TYPE_OF_LABEL = {"python": "code_interpreter", "browser": "web_search", "container": "shell"}
"""The types of built-in tools that have labels of other names."""


@pytest.mark.parametrize(("label", "kind"), TYPE_OF_LABEL.items())
async def test_label_in_place_of_a_type_gets_the_type(store: Store, label: str, kind: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        await normalize(store, input="Hi", tools=[{"type": label}], hosted=ALL_HOSTED)
    assert caught.value.message == f"A tool of type {label!r} is {kind!r}, or 'mcp' with this server_label."


async def test_unknown_tool_type_is_refused(store: Store) -> None:
    kind = "unheard_of"
    tools = [WEATHER, {"type": kind, "name": "x"}]
    with pytest.raises(UnsupportedParameter, match=kind) as caught:
        await normalize(store, input="Hi", tools=tools)
    assert caught.value.param == "tools[1].type"
    with pytest.raises(UnsupportedParameter, match=kind) as caught:
        await normalize(store, input=[USER, additional_tools(*tools)])
    assert caught.value.param == "input[1].tools[1].type"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([WEATHER, PATCH, WEATHER], "tools[2].name"),
        ([WEATHER, {"type": "custom", "name": "get_weather"}], "tools[1].name"),
        ([{**AGENTS, "tools": [SAY, SAY]}], "tools[0].tools[1].name"),
        ([AGENTS, {**AGENTS, "tools": [PATCH, SAY]}], "tools[1].tools[1].name"),
        ([WEATHER, {**AGENTS, "name": "functions"}], "tools[1].tools[0].name"),
        ([{**AGENTS, "name": "functions"}, SAY], "tools[1].name"),
        ([PATCH, {**AGENTS, "name": "functions"}], None),
        ([WEATHER, AGENTS, {**AGENTS, "name": "others"}], None),
    ],
)
async def test_repeated_tool_name_is_refused(store: Store, tools: list[Json], param: str | None) -> None:
    """Namespaces separate names, except ``functions``, the model's namespace for plain functions."""
    if param is None:
        await normalize(store, input="Hi", tools=tools)
        return
    with pytest.raises(InvalidRequest, match="two tools named") as caught:
        await normalize(store, input="Hi", tools=tools)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(("sent", "parallel"), [(None, True), (True, True), (False, False)])
async def test_parallel_calls_are_allowed_unless_refused(store: Store, sent: bool | None, parallel: bool) -> None:
    resolved = await normalize(store, input="Hi", tools=[WEATHER], parallel_tool_calls=sent)
    assert resolved.facts.tools.parallel is resolved.facts.response.parallel_tool_calls is parallel


# Callable tools

CHOSEN_PATCH = {"type": "custom", "name": "patch"}
NAMED = {"type": "function", "name": "get_weather"}
WEATHER_KEY, PATCH_KEY = (None, "get_weather"), (None, "patch")


@pytest.mark.parametrize(
    ("choice", "mode", "keys"),
    [
        ("auto", "auto", None),
        ("none", "none", None),
        ("required", "required", None),
        (NAMED, "required", (WEATHER_KEY,)),
        ({**NAMED, "namespace": "agents"}, "required", (("agents", "get_weather"),)),
        ({"type": "custom", "name": "patch", "x": 1}, "required", (PATCH_KEY,)),
        ({"type": "custom", "name": "say"}, "required", (("agents", "say"),)),
        (allowed_tools(NAMED), "auto", (WEATHER_KEY,)),
        (
            allowed_tools({"type": "custom", "name": "patch"}, NAMED, NAMED, mode="required"),
            "required",
            (PATCH_KEY, WEATHER_KEY),
        ),
        (allowed_tools(NAMED, {"type": "web_search"}), "auto", (WEATHER_KEY,)),
        (
            allowed_tools({"type": "namespace", "name": "agents"}),
            "auto",
            (("agents", "get_weather"), ("agents", "say")),
        ),
        (allowed_tools(), "none", None),
        (allowed_tools({"type": "web_search"}), "none", None),
    ],
    ids=str,
)
async def test_choice_limits_callable_tools(
    store: Store, choice: Any, mode: str, keys: tuple[ToolKey, ...] | None
) -> None:
    """A bare name means the plain tool, if there is one; an empty choice allows no call."""
    tools, left_out = [WEATHER, PATCH, AGENTS, {"type": "web_search"}], frozenset({"web_search"})
    resolved = await normalize(store, input="Hi", tools=tools, tool_choice=choice, left_out=left_out)
    assert (resolved.facts.tools.choice, resolved.facts.tools.allowed) == (mode, keys)
    assert resolved.facts.response.tool_choice == choice


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "patch"},
        {"type": "custom", "name": "get_weather"},
        {**NAMED, "namespace": "others"},
        {"type": "function", "name": "x" * 10**5},
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "x", "name": "y"},
        {"type": "shell"},
        {"type": "apply_patch"},
        {"type": "programmatic_tool_calling"},
        {"type": "unheard_of"},
        allowed_tools(mode="required"),
        allowed_tools({"type": "web_search"}, mode="required"),
        allowed_tools(NAMED, {"type": "function", "name": "x"}),
        allowed_tools(NAMED, {"type": "mcp", "server_label": "x"}),
        allowed_tools(NAMED, {"type": "namespace", "name": "others"}),
    ],
    ids=lambda choice: str(choice)[:60],
)
async def test_choice_that_no_call_can_satisfy_is_refused(store: Store, choice: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input="Hi", tools=[WEATHER, PATCH, AGENTS], tool_choice=choice)
    assert (caught.value.status, caught.value.param) == (400, last_choice(choice))
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("tools", [[], [{"type": "web_search"}]])
async def test_required_choice_needs_a_tool(store: Store, tools: list[Json]) -> None:
    left_out = frozenset({"web_search"})
    for choice in ("auto", "none"):
        await normalize(store, input="Hi", tools=tools, tool_choice=choice, left_out=left_out)
    with pytest.raises(InvalidRequest, match="no tool") as caught:
        await normalize(store, input="Hi", tools=tools, tool_choice="required", left_out=left_out)
    assert caught.value.param == "tool_choice"


def test_choice_costs_do_not_grow_with_namespaces() -> None:
    tools = [{"type": "namespace", "name": f"n{number}", "tools": [SAY]} for number in range(600)]
    chosen = [{**SAY, "namespace": f"n{number}"} for number in range(300)]
    assert normalize_cost(input="Hi", tools=tools, tool_choice=allowed_tools(*chosen)) < 2.5 * normalize_cost(
        input="Hi", tools=tools
    )


# Tools within the conversation


async def test_added_tools_join_those_of_the_request(store: Store) -> None:
    mild = {**WEATHER, "description": "Mild."}
    item = additional_tools(mild, AGENTS)
    choice = {"type": "custom", "name": "say"}
    resolved = await normalize(store, input=[item, USER], tools=[WEATHER, PATCH], tool_choice=choice)
    assert resolved.facts.tools.tools == (
        FunctionTool("get_weather", "Mild.", WEATHER["parameters"], True),
        PATCH_TOOL,
        of("agents", WEATHER_TOOL),
        of("agents", CustomTool("say")),
    )
    assert resolved.facts.tools.allowed == (("agents", "say"),)
    assert resolved.facts.tools.descriptions == {"agents": "Helpers."}
    assert resolved.facts.response.tools == (WEATHER, PATCH)
    assert len(resolved.facts.input) == 2


async def test_added_tools_are_inherited(store: Store) -> None:
    await store_answer(store, "1", input=[additional_tools(AGENTS), USER], tools=[WEATHER])
    resolved = await normalize(store, "2", previous_response_id="resp_1", input="Go on")
    assert resolved.facts.tools.tools == (of("agents", WEATHER_TOOL), of("agents", CustomTool("say")))
    by_reference = await normalize(store, "3", input=[{"id": "at_1i0000"}, USER])
    assert by_reference.facts.tools == resolved.facts.tools


def described(description: str) -> Json:
    return {**WEATHER, "description": description}


def described_in(tools: Toolset) -> list[tuple[str | None, str, str | None]]:
    ours = [tool for tool in tools.tools if isinstance(tool, FunctionTool | CustomTool)]
    return [(tool.namespace, tool.name, tool.description) for tool in ours]


async def test_latest_definition_of_a_tool_counts(store: Store) -> None:
    """The input's tools replace the request's, which replace inherited ones; the order stays."""
    inherited = additional_tools(described("old"), {**AGENTS, "description": "old"})
    await store_answer(store, "1", input=[inherited, additional_tools(described("older"), SAY), USER], tools=[PATCH])
    own = [PATCH, described("own"), {**AGENTS, "tools": [SAY]}]
    tools = (await normalize(store, "2", previous_response_id="resp_1", input="Go on", tools=own)).facts.tools
    assert described_in(tools) == [
        (None, "patch", "Edit."),
        (None, "get_weather", "own"),
        ("agents", "say", None),
        ("agents", "get_weather", WEATHER["description"]),
        (None, "say", None),
    ]
    assert tools.descriptions == {"agents": "Helpers."}
    last = [additional_tools(described("new"), {**AGENTS, "name": "functions", "tools": [PATCH]}), USER]
    tools = (await normalize(store, "3", previous_response_id="resp_1", input=last, tools=own)).facts.tools
    assert described_in(tools)[:2] == [("functions", "patch", "Edit."), (None, "get_weather", "new")]


@pytest.mark.defect("20")
async def test_codex_tools_are_read(store: Store) -> None:
    patched = await normalize(store, **CODEX_APPLY_PATCH, left_out=ALL_LEFT_OUT)
    assert [(tool.namespace, tool.name) for tool in patched.facts.tools.tools] == [
        (None, "get_weather"),
        ("multi_agent_v1", "get_weather"),
        (None, "apply_patch"),
    ]
    known = await normalize(store, **CODEX_KNOWN_MODEL, left_out=ALL_LEFT_OUT)
    assert [(tool.namespace, tool.name) for tool in known.facts.tools.tools] == [
        ("functions", "exec"),
        ("functions", "wait"),
    ]
    assert not known.facts.tools.parallel
    assert known.facts.response.tools == ()
