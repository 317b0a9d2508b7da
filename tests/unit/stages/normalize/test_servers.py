"""MCP servers that a request names."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any, TypeAlias

import msgspec
import pytest

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import AdditionalTools
from penstock.pipeline.protocol.params.tools import McpToolParam
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.protocol.tools import ANY_NAME, McpServer, ToolFilter, ToolKey
from penstock.pipeline.secret import unwritten
from penstock.services.store.store import Store
from penstock.stages.normalize.toolset import ToolsetBuilder
from tests.support.request_bodies import WEATHER
from tests.support.requests import (
    ALL_HOSTED,
    USER,
    additional_tools,
    allowed_tools,
    last_choice,
    normalize,
    store_answer,
)

Json: TypeAlias = dict[str, Any]

URL = "https://docs.example/mcp"
LABELS = frozenset({"home", "drive"})


def mcp(label: str = "docs", **fields: Any) -> Json:
    return {"type": "mcp", "server_label": label, **fields}


def remote(label: str = "docs", **fields: Any) -> Json:
    return mcp(label, **{"server_url": URL} | fields)


async def server_of(store: Store, tool: Json) -> McpServer:
    (server,) = (await normalize(store, input="Hi", tools=[tool], labels=LABELS)).facts.tools.servers
    return server


@pytest.mark.parametrize(
    ("tool", "server"),
    [
        (remote(), McpServer("docs", URL)),
        (remote(server_description="Documents."), McpServer("docs", URL, description="Documents.")),
        (mcp("home"), McpServer("home")),
        (mcp("mine", connector_id="drive"), McpServer("mine", connector="drive")),
        (remote("home"), McpServer("home", URL)),
        (remote(allowed_tools=["a", "b"]), McpServer("docs", URL, allowed=ToolFilter(("a", "b")))),
        (remote(allowed_tools=[]), McpServer("docs", URL, allowed=ToolFilter(()))),
        (remote(allowed_tools={"read_only": True}), McpServer("docs", URL, allowed=ToolFilter(None, True))),
        (
            remote(allowed_tools={"tool_names": ["a"], "read_only": False}),
            McpServer("docs", URL, allowed=ToolFilter(("a",), False)),
        ),
        (remote(allowed_tools={}), McpServer("docs", URL)),
        (remote(allowed_tools=["*"]), McpServer("docs", URL)),
        (remote(allowed_tools=["a", "*"]), McpServer("docs", URL)),
        (remote(allowed_tools={"tool_names": ["*"]}), McpServer("docs", URL)),
        (
            remote(allowed_tools={"tool_names": ["*"], "read_only": True}),
            McpServer("docs", URL, allowed=ToolFilter(None, True)),
        ),
        (
            remote(require_approval={"never": {"tool_names": ["*"]}}),
            McpServer("docs", URL, never=ToolFilter(), approves_rest=True),
        ),
        (remote(require_approval="always"), McpServer("docs", URL)),
        (remote(require_approval="never"), McpServer("docs", URL, approves_rest=False)),
        (remote(require_approval={}), McpServer("docs", URL)),
        (remote(require_approval={"never": {"tool_names": ["a"]}}), McpServer("docs", URL, never=ToolFilter(("a",)))),
        (
            remote(require_approval={"always": {"read_only": False}, "never": {}}),
            McpServer("docs", URL, always=ToolFilter(None, False)),
        ),
        (
            remote(headers=None, authorization=None, connector_id=None, allowed_tools=None, require_approval=None, x=1),
            McpServer("docs", URL),
        ),
    ],
    ids=str,
)
async def test_server_is_read_with_its_options(store: Store, tool: Json, server: McpServer) -> None:
    assert await server_of(store, tool) == server


@pytest.mark.parametrize(
    ("sent", "headers"),
    [
        ({}, {}),
        ({"headers": {"X-Key": "a", "y": ""}}, {"X-Key": "a", "y": ""}),
        ({"authorization": "t"}, {"Authorization": "Bearer t"}),
        ({"authorization": "t", "headers": {"X-Key": "a"}}, {"X-Key": "a", "Authorization": "Bearer t"}),
        ({"headers": {"authorization": "Basic t"}}, {"authorization": "Basic t"}),
    ],
    ids=str,
)
async def test_headers_go_with_calls_and_stay_in_the_process(store: Store, sent: Json, headers: dict[str, str]) -> None:
    assert (await server_of(store, remote(**sent))).headers.reveal() == headers


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([mcp("nobody")], "tools[0].server_label"),
        ([WEATHER, mcp("python")], "tools[1].server_label"),
        ([mcp("home", connector_id="nothing")], "tools[0].connector_id"),
        ([mcp("python", connector_id="python")], "tools[0].connector_id"),
        ([remote(), remote()], "tools[1].server_label"),
        ([mcp("home"), remote("home")], "tools[1].server_label"),
        ([{"type": "namespace", "name": "docs", "tools": [WEATHER]}, remote()], "tools[1].server_label"),
        ([remote(), {"type": "namespace", "name": "docs", "tools": []}], "tools[1].name"),
    ],
    ids=str,
)
async def test_ambiguous_server_label_is_refused(store: Store, tools: list[Json], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input="Hi", tools=tools, labels=LABELS)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "mode", "keys"),
    [
        ("required", "required", None),
        (mcp(), "required", (("docs", ANY_NAME),)),
        (mcp(name="a"), "required", (("docs", "a"),)),
        (mcp(name=None), "required", (("docs", ANY_NAME),)),
        (allowed_tools(mcp("home"), mcp(name="a")), "auto", (("home", ANY_NAME), ("docs", "a"))),
    ],
    ids=str,
)
async def test_server_can_be_chosen(store: Store, choice: Any, mode: str, keys: tuple[ToolKey, ...] | None) -> None:
    tools = [remote(allowed_tools=["a"]), mcp("home")]
    read = (await normalize(store, input="Hi", tools=tools, tool_choice=choice, labels=LABELS)).facts.tools
    assert (read.choice, read.allowed) == (mode, keys)


@pytest.mark.parametrize("choice", [mcp("other"), mcp(name="b"), allowed_tools(mcp("other")), mcp("python")], ids=str)
async def test_unavailable_server_cannot_be_chosen(store: Store, choice: Json) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, input="Hi", tools=[remote(allowed_tools=["a"])], tool_choice=choice, hosted=ALL_HOSTED)
    assert caught.value.param == last_choice(choice)


# Servers within the conversation


async def test_items_may_bring_configured_servers(store: Store) -> None:
    brought = additional_tools(mcp("home", require_approval="never"), mcp("drive"))
    await store_answer(store, "1", input=[brought, USER], labels=LABELS)
    again = await normalize(store, "2", previous_response_id="resp_1", input="Go on", labels=LABELS)
    assert again.facts.tools.servers == (McpServer("home", approves_rest=False), McpServer("drive"))
    own = [remote("home")]
    resolved = await normalize(store, "3", previous_response_id="resp_1", input="Go on", tools=own)
    assert resolved.facts.tools.servers == (McpServer("home", URL),)


async def test_namespace_replaces_an_inherited_server(store: Store) -> None:
    """An accepted item never makes a continuation fail."""
    await store_answer(store, "1", input=[additional_tools(mcp("home")), USER], labels=LABELS)
    own = {"type": "namespace", "name": "home", "tools": [WEATHER]}
    resolved = await normalize(store, "2", previous_response_id="resp_1", input="Go on", tools=[own], labels=LABELS)
    assert resolved.facts.tools.servers == ()
    assert [tool.namespace for tool in resolved.facts.tools.tools] == ["home"]


@pytest.mark.parametrize(
    ("fields", "key"),
    [({"server_url": URL}, "server_url"), ({"headers": {}}, "headers"), ({"authorization": "t"}, "authorization")],
    ids=str,
)
async def test_items_cannot_bring_servers_by_url(store: Store, fields: Json, key: str) -> None:
    """Items are stored, and the secrets of such a server must not be."""
    with pytest.raises(InvalidRequest, match="belongs in tools") as caught:
        await normalize(store, input=[USER, additional_tools(WEATHER, mcp("home", **fields))], labels=LABELS)
    assert caught.value.param == f"input[1].tools[1].{key}"


# Secrets

CANARY = "canary9137"
SECRET_FIELDS: list[Json] = [
    {"headers": {"X-Key": CANARY}},
    {"headers": {"Authorization": f"Bearer {CANARY}"}},
    {"authorization": CANARY},
    {"server_url": f"https://docs.example:8443/{CANARY}/mcp"},
    {"server_url": f"https://docs.example/mcp?key={CANARY}"},
    {"server_url": f"https://docs.example#{CANARY}"},
    {"oauth": {"token": CANARY}},
]
CONTAINER = {
    "type": "container_auto",
    "network_policy": {"type": "allowlist", "domain_secrets": [{"domain": "a", "name": "b", "value": CANARY}]},
}
SANDBOX_TOOLS: list[Json] = [
    {"type": "code_interpreter", "container": {**CONTAINER, "type": "auto"}},
    {"type": "shell", "environment": CONTAINER},
]


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://docs.example", "https://docs.example/"),
        ("https://docs.example/", "https://docs.example/"),
        ("http://docs.example:8000/mcp", "http://docs.example:8000/<redacted>"),
        ("http://[::1]:80?x", "http://[::1]:80/<redacted>"),
    ],
)
async def test_server_is_echoed_without_secrets(store: Store, url: str, expected: str) -> None:
    sent = remote(server_url=url, allowed_tools=["a"], require_approval="never", headers={"a": "b"}, authorization="t")
    (tool,) = (await normalize(store, input="Hi", tools=[sent])).facts.response.tools
    assert tool == mcp(server_url=expected, allowed_tools=["a"], require_approval="never")


@pytest.mark.parametrize("tool", [remote() | fields for fields in SECRET_FIELDS], ids=str)
async def test_secrets_are_not_shown(store: Store, tool: Json, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        body: Json = {"input": [USER], "tools": [tool], "tool_choice": allowed_tools(tool)}
        resolved = await normalize(store, **body, hosted=ALL_HOSTED)
        request = read_request(json.dumps(body).encode())
    assert CANARY not in msgspec.json.encode(resolved.facts.response).decode()
    assert CANARY not in caplog.text
    if "server_url" not in tool or CANARY not in tool["server_url"]:
        assert CANARY not in repr(request)
        assert CANARY not in repr(resolved)
        assert CANARY not in msgspec.json.encode(resolved, enc_hook=unwritten).decode()


@pytest.mark.parametrize("tool", SANDBOX_TOOLS, ids=str)
async def test_secrets_of_sandboxes_are_refused(store: Store, tool: Json) -> None:
    """A sandbox has no network to use them in."""
    for policy in ("allowlist", "disabled"):
        sent: Json = json.loads(json.dumps(tool).replace("allowlist", policy))
        with pytest.raises(InvalidRequest) as caught:
            await normalize(store, input=[additional_tools(sent), USER], hosted=ALL_HOSTED)
        assert "network_policy" in (caught.value.param or "")
        assert CANARY not in caught.value.message


@pytest.mark.parametrize("blank", [0, 10**5], ids=["at once", "in pieces"])
@pytest.mark.parametrize(
    "tool",
    [
        remote(headers={"X-Key": f"{CANARY}\r\n"}),
        remote(headers={"X-Key": [CANARY]}),
        remote(headers=CANARY),
        remote(authorization=f"{CANARY} é"),
        remote(authorization={"token": CANARY}),
        remote(authorization=CANARY, headers={"authorization": CANARY}),
        remote(headers={"X-Key": CANARY}, server_url="http://"),
        remote(headers={"X-Key": CANARY}, allowed_tools=5),
        remote(server_url=f"http://u:{CANARY}@docs.example"),
        remote(server_url=f"gopher://docs.example?{CANARY}"),
        mcp("nobody", authorization=CANARY),
        additional_tools(remote(headers={"X-Key": CANARY})),
    ],
    ids=str,
)
async def test_secrets_are_in_no_error(store: Store, tool: Json, blank: int) -> None:
    sent: Json = {"input": [tool]} if tool["type"] == "additional_tools" else {"input": "Hi", "tools": [tool]}
    with pytest.raises(InvalidRequest) as caught:
        await normalize(store, **sent, instructions=" " * blank)
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert caught.value.param


def test_any_label_is_accepted_in_added_items() -> None:
    """It is checked when a response uses the conversation."""
    builder = ToolsetBuilder()
    home = McpToolParam(type="mcp", server_label="home")
    builder.add_items([home], AdditionalTools("at_1", "developer", ()), "items[0]")
    assert list(builder.servers) == ["home"]
