"""Tools of the API that this server runs, or that a client runs in items of their own."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

import jsonschema
import pytest

from pipeline.errors import InvalidRequest, UnsupportedParameter
from pipeline.protocol.tools import HOSTED, FunctionTool, HostedKind, ToolKey, tool_key
from stages.normalize.forms import FORMS
from stages.persist.store import Store
from tests.support.normalized_requests import ALL, USER, additional_tools, allowed_tools, answered, normalized
from tests.support.request_bodies import WEATHER

Json: TypeAlias = dict[str, Any]

CODE: Json = {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "4g"}}
CONTAINER: Json = {"type": "shell", "environment": {"type": "container_auto"}}
WEB: Json = {"type": "web_search"}

SPELLINGS: list[tuple[Json, HostedKind]] = [
    (CODE, "python"),
    ({"type": "code_interpreter", "container": "cntr_1"}, "python"),
    ({"type": "code_interpreter"}, "python"),
    *[
        ({"type": kind, "search_context_size": "low"}, "browser")
        for kind in ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
    ],
    (CONTAINER, "container"),
    ({"type": "shell", "environment": {"type": "container_reference", "container_id": "c"}}, "container"),
]


def label(name: str) -> Json:
    return {"type": "mcp", "server_label": name}


LABELLED: list[tuple[Json, HostedKind]] = [
    *[(label(name), "python") for name in ("python", "code_interpreter")],
    *[(label(name), "browser") for name in ("browser", "web_search", "web_search_preview")],
    *[(label(name), "container") for name in ("container", "shell")],
]


@pytest.mark.parametrize(("tool", "kind"), SPELLINGS + LABELLED, ids=str)
async def test_built_in_tools_are_offered_where_they_work(
    store: Store, tool: Json, kind: HostedKind, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a request calls a built-in tool, the model may call its functions, and the response repeats it."""
    with caplog.at_level(logging.INFO):
        conversation = await normalized(store, input="Hi", tools=[WEATHER, tool], hosted=frozenset({kind}))
    assert conversation.tools.tools[1:] == HOSTED[kind]
    assert conversation.tools.servers == ()
    assert conversation.tools.runs_here
    assert conversation.response.tools == (WEATHER, tool)
    assert not caplog.records


@pytest.mark.defect("40")
@pytest.mark.parametrize(("tool", "kind"), SPELLINGS, ids=str)
async def test_built_in_tools_are_left_out_where_they_do_not_work(
    store: Store, tool: Json, kind: HostedKind, caplog: pytest.LogCaptureFixture
) -> None:
    """One built-in tool being there does not bring the others: the log says which ones were left out."""
    with caplog.at_level(logging.INFO):
        conversation = await normalized(store, input="Hi", tools=[tool, WEATHER], hosted=ALL - {kind})
    assert [tool_key(one) for one in conversation.tools.tools] == [(None, "get_weather")]
    assert conversation.response.tools == (WEATHER,)
    (record,) = caplog.records
    assert tool["type"] in record.getMessage()


async def test_two_spellings_of_one_tool_are_one(store: Store) -> None:
    """A built-in tool is offered once and in its place, however often a request names it; all are repeated."""
    tools = [WEB, WEATHER, {"type": "web_search_preview"}, label("browser"), CODE, {"type": "shell"}, {"type": "shell"}]
    conversation = await normalized(store, input="Hi", tools=tools, hosted=ALL)
    assert conversation.tools.tools[:3] == HOSTED["browser"]
    assert [tool_key(tool) for tool in conversation.tools.tools[3:]] == [
        (None, "get_weather"),
        ("python", "python"),
        (None, "shell"),
    ]
    assert conversation.response.tools == tuple(tools)


async def test_what_nobody_runs_is_left_out_beside_what_works(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """Tools of the API that this server has no means for are ignored with a word, others in the list are not."""
    tools = [{"type": "image_generation"}, CODE, {"type": "file_search"}, {"type": "computer"}]
    with caplog.at_level(logging.INFO):
        conversation = await normalized(store, input="Hi", tools=tools, hosted=ALL)
    assert conversation.tools.tools == HOSTED["python"]
    (record,) = caplog.records
    assert "image_generation, file_search, computer:" in record.getMessage()


@pytest.mark.parametrize(("said", "count"), [(False, 0), (True, 3), (None, 3)])
async def test_a_search_without_the_web_is_none(store: Store, said: bool | None, count: int) -> None:
    """Some agents want to search in what was fetched before only: here nothing was, and no page is fetched for them."""
    tools = [{"type": "web_search", "external_web_access": said}]
    conversation = await normalized(store, input="Hi", tools=tools, hosted=ALL)
    assert len(conversation.tools.tools) == count
    assert len(conversation.response.tools) == (1 if count else 0)


async def test_a_conversation_may_bring_built_in_tools(store: Store) -> None:
    """An item offers them as a request does, and whoever continues has them too, as long as they work."""
    await answered(store, "1", input=[additional_tools(CODE, label("browser")), USER], hosted=ALL)
    for hosted, count in ((ALL, 4), (frozenset(), 0)):
        conversation = await normalized(store, "2", previous_response_id="resp_1", input="Go on", hosted=hosted)
        assert len(conversation.tools.tools) == count


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([WEB, {"type": "namespace", "name": "browser", "tools": [WEATHER]}], "tools[1].name"),
        ([{"type": "namespace", "name": "python", "tools": []}, CODE], "tools[1].type"),
        ([CODE, {**label("python"), "server_url": "https://a.example"}], "tools[1].server_label"),
        ([{**label("python"), "server_url": "https://a.example"}, CODE], "tools[1].type"),
        ([{"type": "shell"}, {"type": "function", "name": "shell"}], "tools[1].name"),
        ([{"type": "custom", "name": "apply_patch"}, {"type": "apply_patch"}], "tools[1].type"),
    ],
)
async def test_namesakes_of_built_in_tools_are_refused(store: Store, tools: list[Json], param: str) -> None:
    """A call could mean either."""
    with pytest.raises(InvalidRequest, match="There are two") as caught:
        await normalized(store, input="Hi", tools=tools, hosted=ALL)
    assert caught.value.param == param


async def test_a_namespace_may_be_called_like_a_tool_that_is_not_here(store: Store) -> None:
    """Names are only taken by what is offered."""
    namespace = {"type": "namespace", "name": "browser", "tools": [WEATHER]}
    conversation = await normalized(store, input="Hi", tools=[WEB, namespace])
    assert [tool_key(tool) for tool in conversation.tools.tools] == [("browser", "get_weather")]


# What the client runs

FORM_ARGUMENTS: dict[str, tuple[list[Json], list[Json]]] = {
    "shell": (
        [{"commands": ["ls"]}, {"commands": ["ls", "pwd"], "timeout_ms": 5, "max_output_length": 9}],
        [{}, {"commands": "ls"}, {"commands": [], "cmd": "ls"}],
    ),
    "local_shell": (
        [{"command": ["ls"]}, {"command": ["a"], "env": {"A": "b"}, "working_directory": "/", "user": "u"}],
        [{}, {"command": "ls"}, {"command": [], "env": {"A": 5}}],
    ),
    "apply_patch": (
        [{"type": "delete_file", "path": "a"}, {"type": "create_file", "path": "a", "diff": "+a"}],
        [{"type": "move_file", "path": "a"}, {"type": "create_file"}],
    ),
}


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("hosted", [frozenset(), ALL], ids=["no sandbox", "sandbox"])
async def test_shells_and_patches_are_functions_of_the_client(store: Store, kind: str, hosted: frozenset[str]) -> None:
    """A tool of the API that its client runs is a function for the model, whose schema says what its item can hold."""
    said = {"type": kind, "environment": {"type": "local"}} if kind == "shell" else {"type": kind}
    conversation = await normalized(store, input="Hi", tools=[said], hosted=hosted)
    (tool,) = conversation.tools.tools
    assert isinstance(tool, FunctionTool)
    assert (tool.name, tool.form, tool.namespace, tool.strict) == (kind, kind, None, None)
    assert tool.description
    assert conversation.response.tools == (said,)
    assert not conversation.tools.runs_here
    good, bad = FORM_ARGUMENTS[kind]
    validator = jsonschema.Draft202012Validator(tool.parameters or {})
    assert [validator.is_valid(arguments) for arguments in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


async def test_a_tool_of_a_new_type_is_refused_beside_them(store: Store) -> None:
    """What might be for the client to run is not left out in silence."""
    with pytest.raises(UnsupportedParameter) as caught:
        await normalized(store, input="Hi", tools=[{"type": "shell_2"}], hosted=ALL)
    assert caught.value.param == "tools[0].type"


# Choices

TOOLS: list[Json] = [WEATHER, CODE, WEB, CONTAINER, {"type": "shell"}, {"type": "apply_patch"}, {"type": "local_shell"}]
BROWSER: tuple[ToolKey, ...] = (("browser", "search"), ("browser", "open"), ("browser", "find"))
PYTHON: tuple[ToolKey, ...] = (("python", "python"),)
SHELLS: tuple[ToolKey, ...] = (("container", "exec"), (None, "shell"))


@pytest.mark.parametrize(
    ("choice", "mode", "keys"),
    [
        ({"type": "code_interpreter"}, "required", PYTHON),
        ({"type": "web_search"}, "required", BROWSER),
        ({"type": "web_search_preview_2025_03_11"}, "required", BROWSER),
        ({"type": "shell"}, "required", SHELLS),
        ({"type": "apply_patch"}, "required", ((None, "apply_patch"),)),
        ({"type": "local_shell"}, "required", ((None, "local_shell"),)),
        ({"type": "mcp", "server_label": "code_interpreter"}, "required", PYTHON),
        ({"type": "mcp", "server_label": "browser", "name": "open"}, "required", (("browser", "open"),)),
        (allowed_tools({"type": "code_interpreter"}, {"type": "web_search_preview"}), "auto", PYTHON + BROWSER),
        (allowed_tools({"type": "apply_patch"}, mode="required"), "required", ((None, "apply_patch"),)),
        (allowed_tools({"type": "code_interpreter"}, {"type": "image_generation"}), "auto", PYTHON),
    ],
    ids=str,
)
async def test_built_in_tools_may_be_chosen(store: Store, choice: Json, mode: str, keys: tuple[ToolKey, ...]) -> None:
    """A choice by type means all that the tool brought, of this server and of the client alike."""
    tools = (await normalized(store, input="Hi", tools=TOOLS, tool_choice=choice, hosted=ALL)).tools
    assert (tools.choice, tools.allowed) == (mode, keys)
    assert {tool_key(tool) for tool in tools.callable} == set(keys)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "code_interpreter"},
        {"type": "shell"},
        {"type": "image_generation"},
        {"type": "function", "name": "apply_patch"},
        {"type": "mcp", "server_label": "python"},
        allowed_tools({"type": "code_interpreter"}, mode="required"),
        allowed_tools({"type": "local_shell"}),
    ],
    ids=str,
)
async def test_what_is_not_there_cannot_be_chosen(store: Store, choice: Json) -> None:
    """A tool that was left out is no choice, and neither is one that was not declared, or under another type."""
    with pytest.raises(InvalidRequest) as caught:
        tools = [WEATHER, CODE, CONTAINER, {"type": "image_generation"}, {"type": "apply_patch"}]
        await normalized(store, input="Hi", tools=tools, tool_choice=choice)
    assert caught.value.param == "tool_choice"


async def test_tools_that_were_left_out_narrow_nothing_else(store: Store) -> None:
    """Among others a choice of such a tool is passed over."""
    choice = allowed_tools({"type": "shell"}, {"type": "code_interpreter"}, {"type": "function", "name": "get_weather"})
    tools = (await normalized(store, input="Hi", tools=[WEATHER, CODE, CONTAINER], tool_choice=choice)).tools
    assert tools.allowed == ((None, "get_weather"),)
