"""MCP servers that a request names."""

from __future__ import annotations

import json
import logging
import traceback
from typing import Any, TypeAlias

import msgspec
import pytest

from pipeline.errors import InvalidRequest
from pipeline.protocol.given_mcp import McpTool
from pipeline.protocol.reading import read_request
from pipeline.protocol.tools import ANY_NAME, McpServer, ToolFilter, ToolKey
from pipeline.secret import unwritten
from stages.normalize.tools import Offer
from stages.persist.store import Store
from tests.support.normalized_requests import ALL, USER, additional_tools, allowed_tools, answered, normalized
from tests.support.request_bodies import WEATHER

Json: TypeAlias = dict[str, Any]

URL = "https://docs.example/mcp"
LABELS = frozenset({"home", "drive"})


def mcp(label: str = "docs", **fields: Any) -> Json:
    return {"type": "mcp", "server_label": label, **fields}


def remote(label: str = "docs", **fields: Any) -> Json:
    return mcp(label, **{"server_url": URL} | fields)


async def server_of(store: Store, tool: Json) -> McpServer:
    (server,) = (await normalized(store, input="Hi", tools=[tool], labels=LABELS)).tools.servers
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
        (remote(require_approval="always"), McpServer("docs", URL)),
        (remote(require_approval="never"), McpServer("docs", URL, approves_rest=False)),
        (remote(require_approval={}), McpServer("docs", URL)),
        (
            remote(require_approval={"never": {"tool_names": ["a"]}}),
            McpServer("docs", URL, never=ToolFilter(("a",))),
        ),
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
async def test_a_server_is_read_as_it_is_meant(store: Store, tool: Json, server: McpServer) -> None:
    """What is said of a server reaches those that call it; calls need approval unless the request says otherwise.

    A rule that names nothing is none: it must not let everything through.
    """
    assert await server_of(store, tool) == server


@pytest.mark.parametrize(
    ("said", "headers"),
    [
        ({}, {}),
        ({"headers": {"X-Key": "a", "y": ""}}, {"X-Key": "a", "y": ""}),
        ({"authorization": "t"}, {"Authorization": "Bearer t"}),
        ({"authorization": "t", "headers": {"X-Key": "a"}}, {"X-Key": "a", "Authorization": "Bearer t"}),
        ({"headers": {"authorization": "Basic t"}}, {"authorization": "Basic t"}),
    ],
    ids=str,
)
async def test_headers_are_kept_for_the_server(store: Store, said: Json, headers: dict[str, str]) -> None:
    """Headers and the token go with every call, and with a frame only in this process."""
    assert (await server_of(store, remote(**said))).headers.reveal() == headers


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
async def test_a_server_that_cannot_be_told_from_another_is_refused(
    store: Store, tools: list[Json], param: str
) -> None:
    """A label that means nothing, or two things, is a 400 at its place."""
    with pytest.raises(InvalidRequest) as caught:
        await normalized(store, input="Hi", tools=tools, labels=LABELS)
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
async def test_a_server_may_be_chosen(store: Store, choice: Any, mode: str, keys: tuple[ToolKey, ...] | None) -> None:
    """A choice limits calls to a server or to one of its tools, though nobody knows yet what these are."""
    tools = [remote(allowed_tools=["a"]), mcp("home")]
    read = (await normalized(store, input="Hi", tools=tools, tool_choice=choice, labels=LABELS)).tools
    assert (read.choice, read.allowed) == (mode, keys)


@pytest.mark.parametrize("choice", [mcp("other"), mcp(name="b"), allowed_tools(mcp("other")), mcp("python")], ids=str)
async def test_a_server_that_is_not_there_cannot_be_chosen(store: Store, choice: Json) -> None:
    """Nor a tool that the request itself keeps from the model."""
    with pytest.raises(InvalidRequest) as caught:
        await normalized(store, input="Hi", tools=[remote(allowed_tools=["a"])], tool_choice=choice, hosted=ALL)
    assert caught.value.param == "tool_choice"


# Servers within the conversation


async def test_a_conversation_may_bring_servers_of_the_operator(store: Store) -> None:
    """Whoever continues has them too, as the request itself says it; one that is gone is passed over."""
    brought = additional_tools(mcp("home", require_approval="never"), mcp("drive"))
    await answered(store, "1", input=[brought, USER], labels=LABELS)
    again = await normalized(store, "2", previous_response_id="resp_1", input="Go on", labels=LABELS)
    assert again.tools.servers == (McpServer("home", approves_rest=False), McpServer("drive"))
    own = [remote("home")]
    said = await normalized(store, "3", previous_response_id="resp_1", input="Go on", tools=own)
    assert said.tools.servers == (McpServer("home", URL),)


async def test_a_namespace_of_the_request_outranks_an_inherited_server(store: Store) -> None:
    """What was taken once is never a reason to refuse who goes on from it."""
    await answered(store, "1", input=[additional_tools(mcp("home")), USER], labels=LABELS)
    own = {"type": "namespace", "name": "home", "tools": [WEATHER]}
    said = await normalized(store, "2", previous_response_id="resp_1", input="Go on", tools=[own], labels=LABELS)
    assert said.tools.servers == ()
    assert [tool.namespace for tool in said.tools.tools] == ["home"]


@pytest.mark.parametrize(
    ("fields", "key"),
    [({"server_url": URL}, "server_url"), ({"headers": {}}, "headers"), ({"authorization": "t"}, "authorization")],
    ids=str,
)
async def test_a_conversation_brings_no_server_of_the_clients(store: Store, fields: Json, key: str) -> None:
    """Items are stored, and the way to such a server, its secrets included, must not be."""
    with pytest.raises(InvalidRequest, match="belongs in tools") as caught:
        await normalized(store, input=[USER, additional_tools(WEATHER, mcp("home", **fields))], labels=LABELS)
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


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://docs.example", "https://docs.example/"),
        ("https://docs.example/", "https://docs.example/"),
        ("http://docs.example:8000/mcp", "http://docs.example:8000/<redacted>"),
        ("http://[::1]:80?x", "http://[::1]:80/<redacted>"),
    ],
)
async def test_a_server_is_echoed_by_its_host(store: Store, url: str, told: str) -> None:
    """The response repeats where a server is and how it may be used, and nothing that may be a secret."""
    said = remote(server_url=url, allowed_tools=["a"], require_approval="never", headers={"a": "b"}, authorization="t")
    (tool,) = (await normalized(store, input="Hi", tools=[said])).response.tools
    assert tool == mcp(server_url=told, allowed_tools=["a"], require_approval="never")


@pytest.mark.parametrize(
    "tool",
    [
        *[remote() | fields for fields in SECRET_FIELDS],
        {"type": "code_interpreter", "container": {**CONTAINER, "type": "auto"}},
        {"type": "shell", "environment": CONTAINER},
    ],
    ids=str,
)
async def test_no_secret_is_repeated(store: Store, tool: Json, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the response nor the log has it, and no picture of the request or of a frame; not even by a choice."""
    with caplog.at_level(logging.DEBUG):
        body: Json = {"input": [USER], "tools": [tool], "tool_choice": allowed_tools(tool)}
        conversation = await normalized(store, **body, hosted=ALL)
        request = await read_request(json.dumps(body).encode())
    assert CANARY not in msgspec.json.encode(conversation.response).decode()
    assert CANARY not in caplog.text
    if "server_url" not in tool or CANARY not in tool["server_url"]:
        assert CANARY not in repr(request)
        assert CANARY not in repr(conversation)
        assert CANARY not in msgspec.json.encode(conversation, enc_hook=unwritten).decode()


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "code_interpreter", "container": {**CONTAINER, "type": "auto"}},
        {"type": "shell", "environment": CONTAINER},
    ],
    ids=str,
)
async def test_no_secret_is_kept_in_an_item(store: Store, tool: Json) -> None:
    """What an item brings is stored without what its sandbox was to get over a network that it does not have."""
    conversation = await normalized(store, input=[additional_tools(tool), USER], hosted=ALL)
    assert CANARY not in repr(conversation.input)


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
async def test_no_secret_is_in_an_error(store: Store, tool: Json, blank: int) -> None:
    """A refusal says what is wrong without quoting it, and so does what a log would show of where it came from."""
    said: Json = {"input": [tool]} if tool["type"] == "additional_tools" else {"input": "Hi", "tools": [tool]}
    with pytest.raises(InvalidRequest) as caught:
        await normalized(store, **said, instructions=" " * blank)
    assert CANARY not in "".join(traceback.format_exception(caught.value))
    assert caught.value.param


def test_a_label_is_taken_where_nobody_knows_which_there_are() -> None:
    """Items that are added to a conversation wait for a response, and only then is it known who could be asked."""
    offer = Offer()
    offer.add_later(McpTool(type="mcp", server_label="home"), "items[0].tools[0]")
    assert list(offer.servers) == ["home"]
