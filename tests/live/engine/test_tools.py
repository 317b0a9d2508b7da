from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from penstock.api.http.auth import Keys
from penstock.api.settings import Settings
from penstock.api.start.assembly import toolbox
from penstock.pipeline.frames import GenerationStarted, TokenChunk
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.items import Message, OutputText
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.tap import Tap
from penstock.services.engines.vllm import VllmEngine
from penstock.services.runs.run import RunRegistry
from penstock.services.store.store import Store
from penstock.services.tools import Toolbox
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, load_encoding
from penstock.stages.responses import harmony_stages, responses_pipeline
from tests.support.engine_requests import ON_SHARED_ENGINE, answer
from tests.support.event_streams import final, run_request
from tests.support.mcp_servers import HttpServers, http_servers, stdio_config
from tests.support.sandboxes import available
from tests.support.stores import open_store
from tests.support.tool_servers import web_server

pytestmark = ON_SHARED_ENGINE

Json = dict[str, Any]

PYTHON: Json = {"type": "code_interpreter", "container": {"type": "auto"}}
SHELL: Json = {"type": "shell", "environment": {"type": "container_auto"}}
CALCULATOR: Json = {"type": "mcp", "server_label": "calculator", "require_approval": "never"}
ASK_NAME: Json = {"type": "function", "name": "ask_name", "parameters": {"type": "object"}}
HOST = "localhost"
"""The host name of the site; the model reads it, with the port, in its search results.

The model's next step is certain with this name and any port, and less certain with an address."""
PAGE = "<title>vLLM</title><p>A library for inference and serving."


@pytest.fixture(scope="module")
def servers() -> Iterator[HttpServers]:
    with http_servers() as running:
        yield running


async def site(request: web.Request) -> web.Response:
    """Answer as a search engine, and as the only page that it finds."""
    if request.path == "/search":
        return web.json_response({"results": [{"url": f"http://{request.host}/vllm", "title": "vLLM"}]})
    return web.Response(text=PAGE, content_type="text/html")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tools(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[Toolbox, None]:
    """The tools that ``penstock serve`` would run for the model with these settings."""
    await available("python")
    config = tmp_path_factory.mktemp("mcp") / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"calculator": stdio_config("good")}}))
    async with web_server(site) as url:
        search = f"searxng={url.replace('127.0.0.1', HOST)}"
        chosen = {"mcp_config": config, "web_search": search, "allow_address": ["127.0.0.1"]}
        tools = await toolbox(Settings.model_validate({"engine_arguments": []} | chosen), Keys())
        assert {"python", "browser"} <= tools.namespaces
        yield tools
        await tools.close()


@dataclass
class Turns:
    engine: VllmEngine
    encoding: HarmonyEncoding
    tools: Toolbox
    store: Store
    prompts: Tap = field(default_factory=Tap)
    generated: Tap = field(default_factory=Tap)

    async def events(self, question: Any, tools: list[Json], **body: Any) -> list[Any]:
        live = RunRegistry(self.store)
        whole = responses_pipeline(harmony_stages(self.encoding), self.engine, live, self.tools)
        whole = whole.insert_after("render", "prompts", self.prompts).insert_after(
            "generate", "generated", self.generated
        )
        defaults = {"input": question, "tools": tools, "temperature": 0, "max_output_tokens": 400}
        return await run_request(whole, defaults | body)

    async def response(self, question: Any, tools: list[Json], **body: Any) -> Response:
        return final(await self.events(question, tools, **body))

    def seen(self) -> list[tuple[int, ...]]:
        """The tokens that the engine had read and written at the end of each turn."""
        written: list[list[int]] = []
        for frame in self.generated.frames:
            if isinstance(frame, GenerationStarted):
                written.append([])
            if isinstance(frame, TokenChunk):
                written[-1] += frame.token_ids
        return [(*prompt.token_ids, *tokens) for prompt, tokens in zip(self.prompts.frames, written, strict=True)]


@pytest_asyncio.fixture(loop_scope="session")
async def turns(engine: VllmEngine, tools: Toolbox, tmp_path: Path) -> AsyncGenerator[Turns, None]:
    async with open_store(str(tmp_path / "responses.sqlite3")) as store:
        yield Turns(engine, load_encoding(), tools, store)


def items(response: Response) -> list[Json]:
    output: list[Json] = msgspec.json.decode(msgspec.json.encode(response.output))
    return [item for item in output if item["type"] not in ("reasoning", "message")]


def kinds(response: Response) -> list[str]:
    return [item["type"] for item in items(response)]


def names(events: list[ResponseEvent]) -> list[str]:
    return [str(event.__struct_config__.tag).removeprefix("response.") for event in events]


async def test_python_keeps_its_state_and_the_engine_its_cache(turns: Turns) -> None:
    events = await turns.events(
        "Set x to 20 in Python, then double it.",
        [PYTHON],
        instructions="word " * 300,
        include=["code_interpreter_call.outputs"],
    )
    response = final(events)
    first, second = items(response)
    assert (first["code"], first["status"], first["outputs"]) == ("x = 20", "completed", None)
    assert (second["code"], second["outputs"]) == ("print(x * 2)", [{"type": "logs", "logs": "40\n"}])
    assert answer(response) == "Twice 20 is 40."
    ladder = [name for name in names(events) if "code_interpreter_call." in name]
    assert ladder == [f"code_interpreter_call.{step}" for step in ("in_progress", "interpreting", "completed")] * 2
    prompts, seen = [prompt.token_ids for prompt in turns.prompts.frames], turns.seen()
    assert len(prompts) == 3
    for earlier, prompt in zip(seen, prompts[1:], strict=False):
        assert prompt[: len(earlier)] == earlier
    assert response.usage is not None
    assert response.usage.input_tokens == sum(map(len, prompts))
    assert response.usage.output_tokens == sum(map(len, seen)) - response.usage.input_tokens
    block = turns.engine.llm.vllm_config.cache_config.block_size
    cached = sum(len(prompt) // block * block for prompt in prompts[:-1])
    assert response.usage.input_tokens_details.cached_tokens >= cached > 0


async def test_mcp_server_of_the_request_is_called(turns: Turns, servers: HttpServers) -> None:
    docs = {"type": "mcp", "server_label": "docs", "server_url": servers.url("browser"), "require_approval": "never"}
    response = await turns.response("Ask the docs server about penstock.", [docs])
    listing, call = items(response)
    assert [tool["name"] for tool in listing["tools"]] == ["search", "open", "find"]
    assert (call["server_label"], call["name"], call["arguments"]) == ("docs", "search", '{"query":"penstock"}')
    assert (call["status"], call["output"]) == ("completed", "[0] 10 results for penstock")
    assert "[0] 10 results for penstock" in turns.encoding.decode(turns.prompts.frames[1].token_ids)
    assert answer(response) == "The docs say what a penstock is."
    assert turns.prompts.frames[1].token_ids[: len(turns.seen()[0])] == turns.seen()[0]


async def test_configured_mcp_server_needs_approval(turns: Turns) -> None:
    tools = [CALCULATOR | {"require_approval": "always"}]
    first = await turns.response("Add 2 and 3 with the calculator server.", tools)
    assert kinds(first) == ["mcp_list_tools", "mcp_approval_request"]
    request = items(first)[-1]
    assert (request["name"], request["arguments"]) == ("add", '{"a":2,"b":3}')
    approval = {"type": "mcp_approval_response", "approval_request_id": request["id"], "approve": True}
    second = await turns.response([approval], tools, previous_response_id=first.id)
    [call] = items(second)
    assert (call["approval_request_id"], call["output"], call["status"]) == (request["id"], "5", "completed")
    assert answer(second) == "2 plus 3 is 5."


async def test_read_pages_are_cited(turns: Turns) -> None:
    search, included = {"type": "web_search"}, ["web_search_call.action.sources"]
    response = await turns.response("Search the web for vLLM.", [search], include=included)
    searched, read = items(response)
    url = read["action"]["url"]
    assert (searched["action"]["query"], read["action"]["type"]) == ("vLLM", "open_page")
    assert searched["action"]["sources"] == [{"type": "url", "url": url}]
    message = response.output[-1]
    assert isinstance(message, Message)
    [part] = message.content
    assert isinstance(part, OutputText)
    [cited] = part.annotations
    assert (cited["type"], cited["url"], cited["title"]) == ("url_citation", url, "vLLM")
    assert url in part.text[cited["start_index"] : cited["end_index"]]
    assert part.text.startswith("vLLM is a library for LLM inference and serving. ([localhost")


async def test_shell_output_is_read_by_the_model(turns: Turns) -> None:
    await available("container")
    response = await turns.response("Make a note in the container.", [SHELL])
    call, output = items(response)
    assert call["action"]["commands"] == ["echo note > note.txt && cat note.txt"]
    [wrote] = output["output"]
    assert (wrote["stdout"], wrote["outcome"]) == ("note\n", {"type": "exit", "exit_code": 0})
    assert "<|message|>note<|end|>" in turns.encoding.decode(turns.prompts.frames[1].token_ids)
    assert answer(response) == "I made a note in the container."


async def test_mixed_turn_waits_for_the_client(turns: Turns) -> None:
    called = await turns.response("Compute 6 times 7, and ask me for my name.", [PYTHON, ASK_NAME])
    assert (called.status, kinds(called)) == ("completed", ["code_interpreter_call", "function_call"])
    output = {"type": "function_call_output", "call_id": items(called)[-1]["call_id"], "output": "Ada"}
    second = await turns.response([output], [PYTHON, ASK_NAME], previous_response_id=called.id)
    assert answer(second) == "6 times 7 is 42, and now I know your name."
    read = turns.encoding.decode(turns.prompts.frames[1].token_ids)
    assert read.index("<|start|>python to=assistant") < read.index("<|start|>functions.ask_name to=assistant")
    assert "42\n" in read


@pytest.mark.defect("V8")
async def test_undeclared_tool_is_answered_once(turns: Turns) -> None:
    response = await turns.response("Any news today?", [PYTHON])
    assert (response.status, kinds(response)) == ("completed", [])
    assert "there is no tool 'browser.search'" in turns.encoding.decode(turns.prompts.frames[1].token_ids)
    assert answer(response) == "I cannot search, so I do not know the news."
