"""Tools of the operator's own: the server runs their calls, and clients ask for them as for an MCP server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai.types.responses import Response
from pydantic_settings import CliApp

from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.settings import Settings
from penstock.api.start.assembly import keys_of, toolbox
from penstock.api.start.parts import preloaded
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.plugins import WrongPlugin
from penstock.pipeline.protocol.events import DONE, to_sse
from penstock.pipeline.protocol.items import ListedTool
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.tools import ToolAccess, Toolbox, ToolResult
from penstock.stages.converse.tool_loop import Limits
from penstock.testing import replayed
from tests.support import tool_servers
from tests.support.api_clients import ApiClient, wait_until
from tests.support.chat_families import load_model
from tests.support.server import only_recording, recording_server, running_server
from tests.support.tool_servers import answer_markup, call_markup, mcp_tool, respond, tool_server

LEFT = ListedTool(
    "left", {"type": "object", "properties": {"of": {"type": "string"}}, "required": ["of"]}, "Count the pieces."
)
ASKED = call_markup("store.left", {"of": "lamp"})
TWELVE = ToolResult("12")
NUMBER: Any = 12
ALICE, BOB = "sk-alice-0123456789", "sk-bob-0123456789ab"


class Store:
    """A host, which keeps the sessions that it gave."""

    functions = (LEFT, ListedTool("wait", {"type": "object"}))

    def __init__(self, result: Any = TWELVE) -> None:
        self.result = result
        self.sessions: list[StoreSession] = []
        self.is_closed = False

    def session(self, request: Any) -> StoreSession:
        self.sessions.append(StoreSession(self, request.facts.origin.owner))
        return self.sessions[-1]

    async def close(self) -> None:
        self.is_closed = True


class StoreSession:
    def __init__(self, host: Store, owner: str) -> None:
        self.host = host
        self.owner = owner
        self.calls: list[tuple[str, str]] = []
        self.ended: list[str] = []

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        self.calls.append((name, text))
        try:
            if name == "wait":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        if isinstance(self.host.result, Exception):
            raise self.host.result
        result: ToolResult = self.host.result
        return result

    async def close(self) -> None:
        self.ended.append("closed")


def own(host: Store, **more: Any) -> Toolbox:
    return Toolbox(own={"store": host}, **more)


TOOL = mcp_tool("store")


async def test_call_runs_in_every_mode(tmp_path: Path) -> None:
    host = Store()
    async with tool_server(tmp_path, [ASKED, answer_markup()], toolbox=own(host)) as served:
        for mode, store in tool_servers.STORED_MODES:
            received = await respond(served, mode, {"tools": [TOOL], "store": store})
            assert received.types == ["mcp_list_tools", "mcp_call", "message"]
            listed, called, _ = received.output
            assert [tool["name"] for tool in listed["tools"]] == ["left", "wait"]
            assert (called["output"], called["error"], called["status"]) == ("12", None, "completed")
            Response.model_validate(received.response, strict=True)
            if received.events:
                assert received.ladder(1)[-2:] == ["mcp_call.completed", "output_item.done"]
        prompts = tool_servers.prompts_read(served)
    assert "// Count the pieces.\ntype left = " in prompts[0]
    assert "<|start|>store.left to=assistant<|channel|>commentary<|message|>12<|end|>" in prompts[1]
    assert {tuple(session.calls) for session in host.sessions} == {(("left", '{"of": "lamp"}'),)}
    assert {tuple(session.ended) for session in host.sessions} == {("closed",)}
    assert host.is_closed


async def test_model_with_a_chat_template_calls_it_too(tmp_path: Path) -> None:
    model = load_model()
    called = '<think>\n\n</think>\n\n<tool_call>\n{"name": "store__left", "arguments": {"of": "lamp"}}\n</tool_call>'
    engine = ScriptedEngine()
    engine.turns = [
        Script((*model.vocabulary.encode(text), model.vocabulary.marks["<|im_end|>"]))
        for text in (called, "<think>\n\n</think>\n\nTwelve.")
    ]
    async with running_server(engine, tmp_path, model=model, toolbox=own(host := Store())) as served:
        _, response = await served.post({"input": "Hi", "tools": [TOOL]})
    assert [item["type"] for item in response["output"]] == ["mcp_list_tools", "mcp_call", "message"]
    assert host.sessions[0].calls == [("left", '{"of": "lamp"}')]
    assert "Count the pieces." in model.vocabulary.decode(engine.prompts[0].token_ids)
    assert "12" in model.vocabulary.decode(engine.prompts[1].token_ids)


async def test_recorded_call_is_replayed_without_the_host(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    tool_servers.play_turns(engine, ASKED, answer_markup())
    async with recording_server(engine, tmp_path / "recorded", toolbox=own(host := Store())) as served:
        raw = await served.stream({"input": "Hi", "tools": [TOOL]})
    events = await replayed(only_recording(tmp_path / "recorded"))
    assert b"".join(map(to_sse, events)) + DONE == raw
    assert len(host.sessions) == 1


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "mcp", "server_label": "store"},
        {"type": "mcp", "server_label": "store", "name": "left"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp", "server_label": "store"}]},
    ],
    ids=str,
)
async def test_choice_holds_for_its_functions(tmp_path: Path, choice: Any) -> None:
    async with tool_server(tmp_path, [ASKED, answer_markup()], toolbox=own(Store())) as served:
        received = await respond(served, "whole", {"tools": [TOOL], "tool_choice": choice})
        status, refused = await served.post(
            {"input": "Hi", "tools": [TOOL], "tool_choice": {"type": "mcp", "server_label": "shop"}}
        )
    assert received.types == ["mcp_list_tools", "mcp_call", "message"]
    assert (status, refused["error"]["param"]) == (400, "tool_choice")


async def test_call_waits_for_the_approval_that_is_asked_for(tmp_path: Path) -> None:
    asking = {"type": "mcp", "server_label": "store"}
    async with tool_server(tmp_path, [ASKED, answer_markup()], toolbox=own(host := Store())) as served:
        _, asked = await served.post({"input": "Hi", "tools": [asking]})
        assert [item["type"] for item in asked["output"]] == ["mcp_list_tools", "mcp_approval_request"]
        approval = {
            "type": "mcp_approval_response",
            "approve": True,
            "approval_request_id": asked["output"][1]["id"],
        }
        tool_servers.play_turns(served.engine, answer_markup())
        _, done = await served.post({"input": [approval], "previous_response_id": asked["id"], "tools": [asking]})
    assert [item["type"] for item in done["output"]] == ["mcp_call", "message"]
    assert len(host.sessions) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"headers": {"X-User": "1"}}, "tools[0].headers"),
        ({"authorization": "secret-token"}, "tools[0].authorization"),
        ({"server_label": "shop"}, "tools[0].server_label"),
    ],
)
async def test_what_it_cannot_obey_is_refused(tmp_path: Path, fields: Any, param: str) -> None:
    async with tool_server(tmp_path, toolbox=own(Store())) as served:
        status, refused = await served.post({"input": "Hi", "tools": [TOOL | fields]})
    assert (status, refused["error"]["param"]) == (400, param)
    assert "secret-token" not in json.dumps(refused)


async def test_server_of_the_client_may_have_the_same_label(tmp_path: Path) -> None:
    tool = mcp_tool("store", "http://127.0.0.1:9/mcp", headers={"X-User": "1"})
    async with tool_server(tmp_path, toolbox=own(host := Store())) as served:
        received = await respond(served, "whole", {"tools": [tool]})
    assert received.output[0]["error"]
    assert host.sessions == []


async def test_allowed_functions_alone_are_offered(tmp_path: Path) -> None:
    async with tool_server(tmp_path, [ASKED, answer_markup()], toolbox=own(host := Store())) as served:
        received = await respond(served, "whole", {"tools": [TOOL | {"allowed_tools": ["wait"]}]})
        assert "Count the pieces" not in tool_servers.prompts_read(served)[0]
    assert "mcp_call" not in received.types
    assert host.sessions == []


async def test_keys_decide_who_may_use_it(tmp_path: Path) -> None:
    keys = Keys(given=[f"{ALICE} tools=web_search", f"{BOB} tools=store"], own_tools=["store"])
    tools = own(host := Store(), access=ToolAccess(frozenset({"store"}), keys.tools))
    async with tool_server(tmp_path, [ASKED, answer_markup()], toolbox=tools, keys=keys) as served:
        answers = {}
        for key in (ALICE, BOB):
            async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {key}"}) as client:
                answers[key] = await ApiClient(served.url, client).post({"input": "Hi", "tools": [TOOL]})
    assert answers[ALICE][0] == 400
    assert answers[ALICE][1]["error"]["param"] == "tools[0].server_label"
    assert answers[BOB][0] == 200
    assert [session.owner for session in host.sessions] == [keys.owner(f"Bearer {BOB}")]


@pytest.mark.parametrize("mode", tool_servers.MODES)
@pytest.mark.parametrize(
    "result",
    [ToolResult(error="No such article."), KeyError("lamp"), "12", ToolResult(NUMBER)],
    ids=repr,
)
async def test_failure_is_an_item_and_the_response_goes_on(tmp_path: Path, mode: str, result: Any) -> None:
    async with tool_server(tmp_path, [ASKED, answer_markup()], toolbox=own(Store(result))) as served:
        received = await respond(served, mode, {"tools": [TOOL]})
    assert received.types == ["mcp_list_tools", "mcp_call", "message"]
    message = "No such article." if isinstance(result, ToolResult) and result.error else "Internal error."
    assert message in json.dumps(received.output[1]["error"])
    assert "lamp'" not in json.dumps(received.response)


async def test_time_of_a_call_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.stages.converse.sessions.GRACE_SECONDS", 0.05)
    turns = [call_markup("store.wait", {}), answer_markup()]
    async with tool_server(tmp_path, turns, toolbox=own(host := Store()), limits=Limits(call_seconds=0.05)) as served:
        received = await respond(served, "whole", {"tools": [TOOL]})
    assert received.output[1]["status"] == "failed"
    assert host.sessions[0].ended == ["cancelled", "closed"]


async def test_cancelling_the_response_cancels_the_call(tmp_path: Path) -> None:
    async with tool_server(tmp_path, [call_markup("store.wait", {})], toolbox=own(host := Store())) as served:
        _, begun = await served.post({"input": "Hi", "tools": [TOOL], "background": True})
        await wait_until(lambda: bool(host.sessions and host.sessions[0].calls))
        await served.cancel(begun["id"])
        assert (await served.wait_for_end(begun["id"]))["status"] == "cancelled"
        await wait_until(lambda: host.sessions[0].ended == ["cancelled", "closed"])


async def test_number_of_calls_is_limited(tmp_path: Path) -> None:
    turns = [tool_servers.join_calls(ASKED, ASKED), answer_markup()]
    async with tool_server(tmp_path, turns, toolbox=own(host := Store())) as served:
        received = await respond(served, "whole", {"tools": [TOOL], "max_tool_calls": 1})
    assert [item["output"] for item in received.output[1:3]] == ["12", None]
    assert sum(len(session.calls) for session in host.sessions) == 1


# The door

OWN = """
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.protocol.events import DONE, to_sse
from penstock.pipeline.protocol.items import ListedTool
from penstock.services.tools import ToolResult

class store:
    functions = [ListedTool("left", {"type": "object"})]

    def __init__(self, settings): self.settings = settings
    def session(self, request): return self
    async def run(self, name, text, seconds): return ToolResult("12")
    async def close(self): pass

async def shop(settings): return store(settings)
def needs(): return store(None)
def fails(settings): return 1 / 0
async def fails_later(settings): return 1 / 0
def nothing(settings): return None
def closed(settings): raise CannotStart("the shop is closed")
async def closed_later(settings): raise CannotStart("the shop is closed")

class silent(store):
    functions = []

class wrong(store):
    functions = [ListedTool("how many", {"type": "object"})]

class twice(store):
    functions = [ListedTool("left", {"type": "object"}), ListedTool("left", {"type": "object"})]

class shapeless(store):
    functions = [ListedTool("left", {"type": "string"})]
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "mcp.json").write_text('{"mcpServers": {"store": {"command": "true"}}}')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def chosen(*options: str) -> Settings:
    return CliApp.run(Settings, cli_args=["--no-sandbox", *options])


async def test_function_of_the_operator_opens_it(here: Path) -> None:
    settings = chosen("--tool", "own.py:store", "--tool", "own.py:shop", "--allow-address", "10.0.0.0/8")
    preloaded(settings)
    tools = await toolbox(settings, keys_of(settings, Admission()))
    assert tools.labels == tools.own.keys() == {"store", "shop"}
    assert tools.access.of("any") is None
    await tools.close()


@pytest.mark.parametrize(
    ("options", "tools"),
    [
        (["--allow-tool", "shop", "--allow-tool", "shell"], frozenset({"shop", "container"})),
        (["--allow-tool", "none"], frozenset()),
    ],
)
async def test_operator_decides_which_of_them_clients_may_use(
    here: Path, options: list[str], tools: frozenset[str]
) -> None:
    settings = chosen("--tool", "own.py:store", "--tool", "own.py:shop", *options)
    opened = await toolbox(settings, keys_of(settings, Admission()))
    assert opened.access.of("any") == tools
    await opened.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["own.py"], "name its function, too: own.py:needs or own.py:fails or own.py:nothing"),
        (["own.py:absent"], "own.py has no function absent"),
        (["absent.py:store"], "there is no file absent.py"),
        (["absent"], "it is neither module:function nor an entry point of penstock.hosts"),
        (["own.py:needs"], "it takes one argument: the HostSettings"),
        (["own.py:fails"], "it raised ZeroDivisionError: division by zero"),
        (["own.py:fails_later"], "it raised ZeroDivisionError: division by zero"),
        (["own.py:nothing"], "the method session of NoneType is missing: write it as `def session"),
        (["own.py:silent"], "silent.functions is []: it must not be empty"),
        (["own.py:wrong"], "the function 'how many' needs a name of its own"),
        (["own.py:twice"], "the function 'left' needs a name of its own"),
        (["own.py:shapeless"], "the input_schema of the function 'left' is not that of an object"),
        (["own.py:store", "--mcp-config", "mcp.json"], "--mcp-config has a server store, too"),
    ],
)
async def test_wrong_host_is_explained(here: Path, options: list[str], problem: str) -> None:
    with pytest.raises(WrongPlugin) as wrong:
        await toolbox(chosen("--tool", *options), Keys())
    assert str(wrong.value).startswith("--tool ")
    assert problem in str(wrong.value)


@pytest.mark.parametrize("function", ["closed", "closed_later"])
async def test_host_that_cannot_start_says_so_itself(here: Path, function: str) -> None:
    with pytest.raises(CannotStart, match=r"^the shop is closed$"):
        await toolbox(chosen("--tool", f"own.py:{function}"), Keys())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--tool", "own.py:python"], "'python' is no name for a tool, or that of a built-in one"),
        (["--tool", "own.py:store", "--tool", "more.py:store"], "there are two tools named store"),
        (["--tool", "own.py:store", "--allow-tool", "stores"], "'stores' is not one of"),
    ],
)
def test_wrong_name_ends_the_start(here: Path, options: list[str], problem: str) -> None:
    with pytest.raises((SystemExit, ValueError), match=problem):
        chosen(*options)
