"""Errors about one of many tools, files or choices: ``param`` says which of them, wherever the error is found."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

import pytest

from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.extensions.tools.sandbox.live_containers import OpenContainers
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.tools.sandbox.python import PythonHost
from penstock.extensions.tools.search.searcher import Searcher
from penstock.extensions.tools.search.session import FileSearchHost
from penstock.services.slots import Slots
from penstock.services.store.store import Store
from penstock.services.tools import Host, Toolbox
from tests.support.mcp_servers import LOCAL
from tests.support.server import ScriptedServer
from tests.support.stores import open_store
from tests.support.tool_servers import Json, in_container, tool_server
from tests.support.vector_stores import file_search, new_store, uploaded

ENDLESS: Json = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"], "additionalProperties": False}
GRAMMAR: Json = {"type": "grammar", "syntax": "lark", "definition": "start: ("}


def function(name: str, **fields: object) -> Json:
    return {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, **fields}


def namespace(*tools: Json) -> Json:
    return {"type": "namespace", "name": "inner", "description": "", "tools": list(tools)}


STRICT = function("bad", parameters=ENDLESS, strict=True)
CUSTOM: Json = {"type": "custom", "name": "bad", "format": GRAMMAR}

BAD_TOOLS: Mapping[str, tuple[Json, str]] = {
    "vector store": (file_search("vs_none"), "vector_store_ids[0]"),
    "filter": (file_search("vs_none", filters={"type": "eq", "key": 5, "value": 5}), "filters.key"),
    "container": (in_container("cntr_none")[0], "container"),
    "file": (
        {"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["file-none"]}},
        "container.file_ids[0]",
    ),
    "server": ({"type": "mcp", "server_label": "none"}, "server_label"),
    "missing tool": ({"type": "programmatic_tool_calling"}, "type"),
    "schema": (STRICT, "parameters"),
    "grammar": (CUSTOM, "format"),
    "inner schema": (namespace(function("good"), STRICT), "tools[1].parameters"),
    "inner grammar": (namespace(function("good"), CUSTOM), "tools[1].format"),
    "namesake": (function("f0"), "name"),
    "deferred": (function("late", defer_loading=True), "defer_loading"),
}


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store, None]:
    async with open_store(str(tmp_path / "store.sqlite3")) as store:
        yield store


@pytest.fixture
async def served(tmp_path: Path, store: Store, sandbox: Sandbox) -> AsyncGenerator[ScriptedServer, None]:
    containers = OpenContainers(Slots(8))
    containers.sandboxes["python"] = sandbox
    hosts: dict[str, Host] = {"file_search": FileSearchHost(Searcher(store)), "python": PythonHost(containers)}
    toolbox = Toolbox(hosts, McpServers({}, LOCAL), containers=containers)
    where = str(tmp_path / "store.sqlite3")
    async with tool_server(where, toolbox=toolbox, resources=("vector_stores", "containers")) as served:
        yield served


@pytest.mark.parametrize(("tool", "place"), BAD_TOOLS.values(), ids=BAD_TOOLS)
async def test_error_about_a_tool_says_which(served: ScriptedServer, tool: Json, place: str) -> None:
    for before in (1, 4):
        tools = [*(function(f"f{number}") for number in range(before)), tool, function("last")]
        status, answer = await served.post({"input": "Hi", "tools": tools})
        assert status in (400, 404), answer
        assert answer["error"]["param"] == f"tools[{before}].{place}"


async def test_second_of_many_vector_stores_is_named(served: ScriptedServer, store: Store) -> None:
    known = (await new_store(served))["id"]
    status, answer = await served.post({"input": "Hi", "tools": [file_search(known, "vs_none", known)]})
    assert (status, answer["error"]["param"]) == (404, "tools[0].vector_store_ids[1]")


async def test_tools_that_an_item_brings_are_named(served: ScriptedServer) -> None:
    brought = {"type": "additional_tools", "role": "developer", "tools": [function("f"), file_search("vs_none")]}
    message = {"role": "user", "content": "Hi"}
    status, answer = await served.post({"input": [message, brought, message]})
    assert (status, answer["error"]["param"]) == (404, "input[1].tools[1].vector_store_ids[0]")


async def test_choice_of_a_tool_that_is_not_there_is_named(served: ScriptedServer) -> None:
    tools = [{"type": "function", "name": name} for name in ("f", "f", "none")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    status, answer = await served.post({"input": "Hi", "tools": [function("f")], "tool_choice": choice})
    assert (status, answer["error"]["param"]) == (400, "tool_choice.tools[2]")


async def test_file_for_a_vector_store_is_named(served: ScriptedServer, store: Store) -> None:
    known, path = await uploaded(store, "a.txt", "a"), "/v1/vector_stores"
    status, answer = await served.post({"file_ids": [known, "file-none"]}, path)
    assert (status, answer["error"]["param"]) == (404, "file_ids[1]")
    batches = f"{path}/{(await new_store(served))['id']}/file_batches"
    status, answer = await served.post({"file_ids": [known, known, "file-none"]}, batches)
    assert (status, answer["error"]["param"]) == (404, "file_ids[2]")
    status, answer = await served.post({"files": [{"file_id": known}, {"file_id": "file-none"}]}, batches)
    assert (status, answer["error"]["param"]) == (404, "files[1].file_id")
