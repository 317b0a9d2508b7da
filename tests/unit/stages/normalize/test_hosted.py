"""Tools of the API that this server runs, or that a client runs with items of their own."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any, TypeAlias

import jsonschema
import pytest

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.tools import (
    FunctionTool,
    ToolFilter,
    ToolKey,
    tool_key,
)
from penstock.services.store.store import Store
from penstock.services.tools import ToolAccess
from penstock.stages.normalize.tool_types import CLIENT_TOOLS, named, unversioned
from penstock.stages.render.item_texts import split
from tests.support.request_bodies import WEATHER
from tests.support.requests import (
    ALL_HOSTED,
    ALL_LEFT_OUT,
    USER,
    additional_tools,
    allowed_tools,
    normalize,
    store_answer,
)

Json: TypeAlias = dict[str, Any]

CODE: Json = {"type": "code_interpreter", "container": {"type": "auto", "network_policy": {"type": "disabled"}}}
CONTAINER: Json = {"type": "shell", "environment": {"type": "container_auto"}}
WEB: Json = {"type": "web_search"}

SPELLINGS: list[tuple[Json, str]] = [
    (CODE, "python"),
    ({"type": "code_interpreter"}, "python"),
    *[
        ({"type": kind, "search_context_size": "low"}, "browser")
        for kind in ("web_search", "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11")
    ],
    (CONTAINER, "container"),
]


def label(name: str) -> Json:
    return {"type": "mcp", "server_label": name}


LABELLED: list[tuple[Json, str]] = [
    *[(label(name), "python") for name in ("python", "code_interpreter")],
    *[(label(name), "browser") for name in ("browser", "web_search", "web_search_preview")],
    *[(label(name), "container") for name in ("container", "shell")],
]


@pytest.mark.parametrize(("tool", "kind"), SPELLINGS + LABELLED, ids=str)
async def test_built_in_tools_are_offered_if_available(
    store: Store, tool: Json, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        resolved = await normalize(store, input="Hi", tools=[WEATHER, tool], hosted=frozenset({kind}))
    assert resolved.facts.tools.tools[1:] == kinds()[kind].tools
    assert resolved.facts.tools.servers == ()
    assert resolved.facts.response.tools == (WEATHER, tool)
    assert not caplog.records


@pytest.mark.defect("40")
@pytest.mark.parametrize("hosted", [frozenset(), ALL_HOSTED], ids=["unavailable", "available"])
@pytest.mark.parametrize(("tool", "kind"), SPELLINGS, ids=str)
async def test_operator_can_leave_out_built_in_tools(
    store: Store, tool: Json, kind: str, hosted: frozenset[str], caplog: pytest.LogCaptureFixture
) -> None:
    left_out = frozenset({unversioned(tool["type"])})
    with pytest.raises(UnsupportedParameter):
        await normalize(store, input="Hi", tools=[tool], hosted=ALL_HOSTED - {kind})
    with caplog.at_level(logging.INFO):
        resolved = await normalize(store, input="Hi", tools=[tool, WEATHER], hosted=hosted, left_out=left_out)
    assert [tool_key(one) for one in resolved.facts.tools.tools] == [(None, "get_weather")]
    assert resolved.facts.response.tools == (WEATHER,)
    (record,) = caplog.records
    assert tool["type"] in record.getMessage()


async def test_spellings_of_one_tool_are_merged(store: Store) -> None:
    tools = [WEB, WEATHER, {"type": "web_search_preview"}, label("browser"), CODE, {"type": "shell"}, {"type": "shell"}]
    resolved = await normalize(store, input="Hi", tools=tools, hosted=ALL_HOSTED)
    assert resolved.facts.tools.tools[:3] == kinds()["browser"].tools
    assert [tool_key(tool) for tool in resolved.facts.tools.tools[3:]] == [
        (None, "get_weather"),
        ("python", "python"),
        (None, "shell"),
    ]
    assert resolved.facts.response.tools == tuple(tools)


async def test_unsupported_tools_are_left_out_of_the_list(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    tools = [
        {"type": "image_generation"},
        CODE,
        {"type": "file_search", "vector_store_ids": ["a"]},
        {"type": "computer"},
    ]
    with caplog.at_level(logging.INFO):
        resolved = await normalize(
            store, input="Hi", tools=tools, hosted=ALL_HOSTED, left_out=ALL_LEFT_OUT - {"code_interpreter"}
        )
    assert resolved.facts.tools.tools == kinds()["python"].tools
    (record,) = caplog.records
    assert "image_generation, file_search, computer" in record.getMessage()


@pytest.mark.parametrize("sent", [True, None])
async def test_search_without_web_access_is_refused(store: Store, sent: bool | None) -> None:
    """Nothing was fetched before, and no page is fetched for it."""
    tools = [{"type": "web_search", "external_web_access": sent}]
    resolved = await normalize(store, input="Hi", tools=tools, hosted=ALL_HOSTED)
    assert resolved.facts.tools.tools == kinds()["browser"].tools
    with pytest.raises(UnsupportedParameter) as caught:
        await normalize(store, input="Hi", tools=[{**WEB, "external_web_access": False}], hosted=ALL_HOSTED)
    assert caught.value.param == "tools[0].external_web_access"


async def test_items_may_bring_built_in_tools(store: Store) -> None:
    await store_answer(store, "1", input=[additional_tools(CODE, label("browser")), USER], hosted=ALL_HOSTED)
    for hosted, count in ((ALL_HOSTED, 4), (frozenset(), 0)):
        resolved = await normalize(store, "2", previous_response_id="resp_1", input="Go on", hosted=hosted)
        assert len(resolved.facts.tools.tools) == count


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
        await normalize(store, input="Hi", tools=tools, hosted=ALL_HOSTED)
    assert caught.value.param == param


async def test_namespace_may_have_the_name_of_a_tool_that_was_left_out(store: Store) -> None:
    """Only offered tools take names."""
    namespace = {"type": "namespace", "name": "browser", "tools": [WEATHER]}
    left_out = frozenset({"web_search"})
    resolved = await normalize(store, input="Hi", tools=[WEB, namespace], hosted=ALL_HOSTED, left_out=left_out)
    assert [tool_key(tool) for tool in resolved.facts.tools.tools] == [("browser", "get_weather")]


# Tools that the client runs

FORM_ARGUMENTS: dict[str, tuple[list[Json], list[Json]]] = {
    "shell": (
        [{"commands": ["ls"]}, {"commands": ["ls", "pwd"], "timeout_ms": 5, "max_output_length": 9}],
        [{}, {"commands": "ls"}, {"commands": [], "cmd": "ls"}],
    ),
    "local_shell": (
        [{"command": ["ls"]}, {"command": ["a"], "env": {"A": "b"}, "working_directory": "/", "user": "u"}],
        [{}, {"command": "ls"}, {"command": [], "env": {"A": 5}}],
    ),
    "computer": (
        [{"actions": [{"type": "click", "button": "left", "x": 1, "y": 2}, {"type": "wait"}]}],
        [{"actions": []}, {"actions": [{"type": "jump"}]}, {"actions": [{"type": "click", "x": 1, "y": 2}]}],
    ),
    "computer_use_preview": (
        [{"action": {"type": "type", "text": "Hi"}}],
        [{"action": {"type": "keypress", "keys": []}}, {"actions": []}],
    ),
    "apply_patch": (
        [{"type": "delete_file", "path": "a", "diff": ""}, {"type": "create_file", "path": "a", "diff": "+a"}],
        [{"type": "move_file", "path": "a", "diff": ""}, {"type": "update_file", "path": "", "diff": ""}],
    ),
}


@pytest.mark.parametrize("kind", CLIENT_TOOLS)
@pytest.mark.parametrize("hosted", [frozenset(), ALL_HOSTED], ids=["no sandbox", "sandbox"])
async def test_shells_and_patches_are_functions_of_the_client(store: Store, kind: str, hosted: frozenset[str]) -> None:
    sent = {"type": kind, "environment": {"type": "local"}} if kind == "shell" else {"type": kind}
    resolved = await normalize(store, input="Hi", tools=[sent], hosted=hosted, sees=True)
    (tool,) = resolved.facts.tools.tools
    assert isinstance(tool, FunctionTool)
    assert (tool.name, tool.form, tool.namespace, tool.strict) == (unversioned(kind), kind, None, True)
    assert tool.description
    assert resolved.facts.response.tools == (sent,)
    good, bad = FORM_ARGUMENTS[kind]
    validator = jsonschema.Draft202012Validator(tool.parameters or {})
    assert [validator.is_valid(arguments) for arguments in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


async def test_tool_of_an_unknown_type_is_refused(store: Store) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        await normalize(store, input="Hi", tools=[{"type": "shell_2"}], hosted=ALL_HOSTED)
    assert caught.value.param == "tools[0].type"


# Choices

TOOLS: list[Json] = [WEATHER, CODE, WEB, CONTAINER, {"type": "shell"}, {"type": "apply_patch"}, {"type": "local_shell"}]
BROWSER: tuple[ToolKey, ...] = (("browser", "search"), ("browser", "open"), ("browser", "find"))
PYTHON: tuple[ToolKey, ...] = (("python", "python"),)


async def test_skills_are_named_in_the_description_of_the_shell(store: Store) -> None:
    skills = [{"name": "bills", "description": "How we bill.", "path": "/skills/bills", "x": 1}]
    sent = {"type": "shell", "environment": {"type": "local", "skills": skills}}
    resolved = await normalize(store, input="Hi", tools=[sent, sent], hosted=ALL_HOSTED)
    (shown,) = resolved.facts.tools.tools
    assert isinstance(shown, FunctionTool)
    assert (shown.description or "").startswith(f"{CLIENT_TOOLS['shell'].description}\n\nThere are skills")
    assert (shown.description or "").endswith("\n- bills (in /skills/bills): How we bill.")
    assert resolved.facts.response.tools == (sent, sent)
    plain = {"type": "shell", "environment": {"type": "local", "skills": []}}
    assert (await normalize(store, input="Hi", tools=[plain])).facts.tools.tools == (CLIENT_TOOLS["shell"],)
    with pytest.raises(InvalidRequest, match="two tools named 'shell'"):
        await normalize(store, input="Hi", tools=[sent, plain])


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
    ],
    ids=str,
)
async def test_built_in_tools_can_be_chosen(store: Store, choice: Json, mode: str, keys: tuple[ToolKey, ...]) -> None:
    tools = (await normalize(store, input="Hi", tools=TOOLS, tool_choice=choice, hosted=ALL_HOSTED)).facts.tools
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
async def test_unavailable_tool_cannot_be_chosen(store: Store, choice: Json) -> None:
    with pytest.raises(InvalidRequest) as caught:
        tools = [WEATHER, CODE, CONTAINER, {"type": "image_generation"}, {"type": "apply_patch"}]
        await normalize(store, input="Hi", tools=tools, tool_choice=choice, left_out=ALL_LEFT_OUT)
    assert (caught.value.param or "").partition(".")[0] == "tool_choice"


async def test_choice_ignores_tools_that_were_left_out(store: Store) -> None:
    choice = allowed_tools({"type": "shell"}, {"type": "code_interpreter"}, {"type": "function", "name": "get_weather"})
    sent = [WEATHER, CODE, CONTAINER]
    resolved = await normalize(store, input="Hi", tools=sent, tool_choice=choice, left_out=ALL_LEFT_OUT)
    tools = resolved.facts.tools
    assert tools.allowed == ((None, "get_weather"),)


@pytest.mark.parametrize("name", ["code_interpreter", "container", "web_search_preview"])
async def test_url_beside_a_label_of_vllm_is_not_used(store: Store, name: str) -> None:
    """VLLM's own tests send one.  Without the built-in tool it is the server of that URL."""
    tool = label(name) | {"server_url": "http://localhost:8888"}
    resolved = await normalize(store, input="Hi", tools=[tool], hosted=ALL_HOSTED)
    assert (resolved.facts.tools.tools, resolved.facts.tools.servers) == (kinds().by_label[name].tools, ())
    resolved = await normalize(store, input="Hi", tools=[tool])
    assert [server.url for server in resolved.facts.tools.servers] == ["http://localhost:8888"]


@pytest.mark.parametrize("name", ["python", "browser", "shell"])
async def test_url_beside_any_other_label_names_a_server(store: Store, name: str) -> None:
    tool = label(name) | {"server_url": "https://mcp.example/"}
    resolved = await normalize(store, input="Hi", tools=[tool], hosted=ALL_HOSTED)
    assert [server.url for server in resolved.facts.tools.servers] == ["https://mcp.example/"]


async def test_settings_of_a_built_in_tool_are_kept(store: Store) -> None:
    headers = {"X-Who": "client-0001"}
    tools = [
        label("code_interpreter") | {"headers": headers, "allowed_tools": ["*"]},
        label("container") | {"allowed_tools": ["feed_chars"]},
    ]
    resolved = await normalize(store, input="Hi", tools=tools, hosted=ALL_HOSTED)
    assert resolved.facts.tools.hosted
    python, container = resolved.facts.tools.hosted
    assert (python.label, python.headers.reveal(), python.allowed) == ("python", headers, None)
    assert (container.label, container.allowed) == ("container", ToolFilter(("feed_chars",)))
    assert "client-0001" not in str(resolved.facts.response.tools)


ACCESS = ToolAccess(named(["web_search", "code_interpreter"]), {"alice": named(["shell"]), "bob": named(["none"])}.get)


@pytest.mark.parametrize(
    ("owner", "kinds"), [("", ["python", "browser"]), ("carol", ["python", "browser"]), ("alice", ["container"])]
)
async def test_clients_get_the_built_in_tools_that_they_may_use(store: Store, owner: str, kinds: list[str]) -> None:
    allowed = list[str | None]()
    for tool in (CODE, CONTAINER, WEB):
        with suppress(UnsupportedParameter):
            resolved = await normalize(store, input="Hi", owner=owner, tools=[tool], hosted=ALL_HOSTED, access=ACCESS)
            allowed.append(resolved.facts.tools.tools[0].namespace)
    assert allowed == kinds


@pytest.mark.parametrize("tool", [label("python"), label("code_interpreter"), label("x") | {"connector_id": "python"}])
async def test_no_name_of_a_tool_gets_around_the_access(store: Store, tool: Json) -> None:
    """The operator's server in place of a built-in tool could also be named as an MCP server."""
    own = frozenset({"python", "docs"})
    with pytest.raises(InvalidRequest, match="does not offer the built-in tool"):
        await normalize(store, input="Hi", owner="bob", tools=[tool], hosted=ALL_HOSTED, labels=own, access=ACCESS)
    resolved = await normalize(
        store, input="Hi", owner="bob", tools=[label("docs")], hosted=ALL_HOSTED, labels=own, access=ACCESS
    )
    assert [server.label for server in resolved.facts.tools.servers] == ["docs"]


async def test_further_function_of_an_operators_server_can_be_chosen(store: Store) -> None:
    tool, choice = label("container"), {"type": "mcp", "server_label": "container", "name": "feed_chars"}
    own = frozenset({"container"})
    body: Json = {"input": "Hi", "tools": [tool], "tool_choice": choice}
    resolved = await normalize(store, hosted=ALL_HOSTED, labels=own, **body)
    assert resolved.facts.tools.allowed == (("container", "feed_chars"),)
    with pytest.raises(InvalidRequest, match="no such tool"):
        await normalize(store, hosted=ALL_HOSTED, **body)


# Restrictions

HOSTED_LABELS = frozenset({"python", "browser", "container"})
AUTO: Json = {"type": "auto"}


def shell(**environment: Any) -> Json:
    return {"type": "shell", "environment": {"type": "container_auto"} | environment}


RESTRICTIONS: list[tuple[Json, str]] = [
    ({"type": "code_interpreter", "container": "cntr_1"}, "container"),
    *[
        ({"type": "code_interpreter", "container": AUTO | {name: value}}, f"container.{name}")
        for name, value in (("file_ids", ["file_1"]), ("memory_limit", "1g"))
    ],
    (
        {
            "type": "code_interpreter",
            "container": AUTO | {"network_policy": {"type": "allowlist", "allowed_domains": ["a.example"]}},
        },
        "container.network_policy.type",
    ),
    (shell(file_ids=["file_1"]), "environment.file_ids"),
    (shell(memory_limit="64g"), "environment.memory_limit"),
    (shell(skills=[{"type": "skill_reference", "skill_id": "s"}]), "environment.skills"),
    (shell(type="local", skills=[{"name": "s", "description": "d"}]), "environment.skills[0].path"),
    (shell(type="container_reference", container_id="cntr_1"), "environment.container_id"),
    (WEB | {"filters": {"allowed_domains": ["https://a.example"]}}, "filters.allowed_domains[0]"),
    (WEB | {"filters": {"blocked_domains": ["https://a.example"]}}, "filters.blocked_domains[0]"),
    (WEB | {"filters": {"languages": ["fr"]}}, "filters.languages"),
    (WEB | {"type": "web_search_preview", "search_content_types": ["image"]}, "search_content_types"),
    ({"type": "apply_patch", "allowed_callers": ["programmatic"]}, "allowed_callers"),
    (WEATHER | {"allowed_callers": ["programmatic"]}, "allowed_callers"),
    (WEATHER | {"defer_loading": True}, "defer_loading"),
    ({"type": "custom", "name": "c", "defer_loading": True}, "defer_loading"),
    ({"type": "custom", "name": "c", "async": True}, "async"),
    (label("python") | {"defer_loading": True}, "defer_loading"),
    (label("python") | {"tunnel_id": "t"}, "tunnel_id"),
]


@pytest.mark.parametrize(("tool", "place"), RESTRICTIONS, ids=str)
async def test_restriction_that_nothing_obeys_is_refused(store: Store, tool: Json, place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input="Hi", tools=[WEATHER | {"name": "other"}, tool], hosted=ALL_HOSTED)
    assert (caught.value.status, caught.value.param) == (400, f"tools[1].{place}")
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input=[USER, additional_tools(tool)], hosted=ALL_HOSTED)
    assert caught.value.param == f"input[1].tools[0].{place}"


async def test_domains_and_context_size_reach_the_browser(store: Store) -> None:
    sent = WEB | {"filters": {"allowed_domains": ["Example.org"]}, "search_context_size": "low"}
    resolved = await normalize(store, input="Hi", tools=[sent, sent], hosted=ALL_HOSTED)
    options = {"domains": ["example.org"], "context_size": "low", "path": "tools[0]"}
    assert resolved.facts.options == {"browser": options}
    assert resolved.facts.response.tools == (sent, sent)
    for other in (WEB, label("browser"), WEB | {"filters": {"allowed_domains": ["b.example"]}}):
        with pytest.raises(InvalidRequest, match="different options"):
            await normalize(store, input="Hi", tools=[sent, other], hosted=ALL_HOSTED)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            {"city": "Bonn", "region": "NRW", "country": "DE", "timezone": "Europe/Berlin"},
            "Bonn, NRW, DE (time zone Europe/Berlin)",
        ),
        ({"country": "FR"}, "FR"),
        ({"timezone": "Asia/Tokyo"}, "time zone Asia/Tokyo"),
        ({"city": None}, ""),
    ],
)
async def test_place_of_the_user_is_a_line_for_the_model(store: Store, place: Json, words: str) -> None:
    sent = WEB | {"user_location": {"type": "approximate", **place}}
    resolved = await normalize(store, input="Hi", instructions="Be kind.", tools=[sent], hosted=ALL_HOSTED)
    assert resolved.facts.options.get("browser", {}).get("location", "") == words
    instructions, _ = split(resolved)
    line = f"The user is here: {words}. Search for what fits the place, if it matters."
    assert instructions == ("Be kind.\n\n" + line if words else "Be kind.",)


async def test_domains_of_an_item_hold_in_later_turns(store: Store) -> None:
    sent = WEB | {"filters": {"allowed_domains": ["example.org"]}}
    await store_answer(store, "1", input=[additional_tools(sent), USER], hosted=ALL_HOSTED)
    resolved = await normalize(store, "2", previous_response_id="resp_1", input="Go on", hosted=ALL_HOSTED)
    assert resolved.facts.options["browser"]["domains"] == ["example.org"]


@pytest.mark.parametrize(
    ("tool", "place"),
    [
        (WEB | {"filters": {"allowed_domains": ["a.example"]}}, "filters"),
        (CODE, "container.network_policy"),
        (shell(network_policy={"type": "disabled"}), "environment.network_policy"),
    ],
    ids=str,
)
async def test_operators_server_cannot_be_restricted(store: Store, tool: Json, place: str) -> None:
    """It would not be told."""
    with pytest.raises(UnsupportedParameter) as caught:
        await normalize(store, input="Hi", tools=[tool], hosted=ALL_HOSTED, labels=HOSTED_LABELS)
    assert caught.value.param == f"tools[0].{place}"
