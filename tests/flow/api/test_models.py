from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest

from penstock.extensions.tools.browser.search_engines import search_backend
from penstock.extensions.tools.browser.session import BrowserHost
from penstock.pipeline.core import Pipeline, Stage
from penstock.pipeline.frames import ResolvedRequest
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.tools import ToolAccess, Toolbox
from tests.support.server import HELLO, WEATHER, ScriptedServer, running_server, script

NAMES = ("tiny", "folder/tiny-lora")


@pytest.fixture
def models() -> tuple[str, ...]:
    return NAMES


async def test_every_name_is_a_model(served: ScriptedServer) -> None:
    status, models = await served.get("/v1/models")
    assert (status, models["object"]) == (200, "list")
    assert tuple(model["id"] for model in models["data"]) == NAMES
    for model in models["data"]:
        assert model["max_model_len"] == served.engine.context_length
        assert await served.get(f"/v1/models/{model['id']}") == (200, model)
        assert await served.get(f"/v1/models/{model['id'].replace('/', '%2F')}") == (200, model)
        assert (await served.post({"input": "Hi", "model": model["id"]}))[1]["model"] == model["id"]


@dataclass
class Rooted(ScriptedEngine):
    root: str = "org/tiny"


@pytest.mark.parametrize(("engine", "root"), [(ScriptedEngine(), None), (Rooted(), "org/tiny")])
async def test_benchmarks_find_the_tokenizer_by_the_root(
    tmp_path: Path, engine: ScriptedEngine, root: str | None
) -> None:
    async with running_server(engine, tmp_path) as served:
        [model] = (await served.get("/v1/models"))[1]["data"]
    assert model["root"] == root


async def test_model_says_what_it_reads_and_which_tools_run(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(), tmp_path) as bare:
        [model] = (await bare.get("/v1/models"))[1]["data"]
    assert (model["input_modalities"], model["tools"]) == (["text"], [])
    browser = BrowserHost(search_backend("searxng", "http://127.0.0.1:9"))
    toolbox = Toolbox({"browser": browser, "python": browser}, access=ToolAccess(frozenset({"browser"})))
    async with running_server(ScriptedEngine(), tmp_path, toolbox=toolbox) as served:
        [model] = (await served.get("/v1/models"))[1]["data"]
    assert model["tools"] == ["web_search"]  # that which the client may use
    await toolbox.close()


async def test_model_that_sees_says_so(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(), tmp_path, sees_images=True) as served:
        [model] = (await served.get("/v1/models"))[1]["data"]
    assert model["input_modalities"] == ["text", "image"]


async def test_model_of_a_server_whose_normalize_is_wrapped_says_the_same(tmp_path: Path) -> None:
    def wrapped(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        normalize: Stage[CreateResponse, ResolvedRequest] = pipeline.stage("normalize")

        async def wrap(source: AsyncIterator[CreateResponse]) -> AsyncGenerator[ResolvedRequest, None]:
            async with aclosing(normalize(source)) as resolved:
                async for request in resolved:
                    yield request

        return pipeline.replace("normalize", wrap)

    async with running_server(ScriptedEngine(script(HELLO)), tmp_path, edit=wrapped, sees_images=True) as served:
        [model] = (await served.get("/v1/models"))[1]["data"]
        status, _ = await served.post({"input": "Hi"})
    assert (status, model["input_modalities"]) == (200, ["text", "image"])


async def test_unknown_model_is_not_found(served: ScriptedServer) -> None:
    status, error = await served.get("/v1/models/gpt-9")
    assert (status, error["error"]["param"], error["error"]["code"]) == (404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("lifecycle", "listed"),
    [(["active"], NAMES), (["deprecated", "active"], NAMES), (["deprecated", "retired"], ())],
)
async def test_client_of_anthropic_lists_models_by_their_stage(
    served: ScriptedServer, lifecycle: list[Literal["active", "deprecated", "retired"]], listed: tuple[str, ...]
) -> None:
    async with anthropic.AsyncAnthropic(base_url=served.url, api_key="none") as claude:
        page = await claude.models.list(lifecycle=lifecycle)
    assert tuple(model.id for model in page.data) == listed
    assert {model.lifecycle for model in page.data} <= {"active"}


@pytest.mark.parametrize("path", ["/v1/models/gpt-9", "/v1/models?after_id=gpt-9", "/v1/models?limit=x", "/v1/model"])
async def test_client_of_anthropic_reads_errors_of_anthropic(served: ScriptedServer, path: str) -> None:
    async with served.client.get(served.url + path, headers={"anthropic-version": "2023-06-01"}) as answer:
        body = await answer.json()
    assert (body["type"], body["request_id"]) == ("error", answer.headers["request-id"])
    assert body["error"]["type"] in ("not_found_error", "invalid_request_error")


BODIES: list[dict[str, Any]] = [
    {"input": "Hi"},
    {"input": "Hi", "instructions": "Be brief.", "tools": [WEATHER], "reasoning": {"effort": "high"}},
    {"input": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]},
]


@pytest.mark.parametrize("body", BODIES)
async def test_counted_tokens_equal_usage(served: ScriptedServer, body: dict[str, Any]) -> None:
    status, counted = await served.post(body, "/v1/responses/input_tokens")
    assert served.engine.prompts == []
    _, answer = await served.post(body)
    expected = answer["usage"]["input_tokens"]
    assert (status, counted) == (200, {"object": "response.input_tokens", "input_tokens": expected})


async def test_count_includes_the_history(served: ScriptedServer) -> None:
    _, first = await served.post({"input": "Hi"})
    body = {"input": "And?", "previous_response_id": first["id"]}
    _, counted = await served.post(body, "/v1/responses/input_tokens")
    _, second = await served.post(body)
    assert counted["input_tokens"] == second["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_uncountable_request_is_refused(served: ScriptedServer) -> None:
    for body in ({"input": 7}, {}, {"input": "Hi", "model": "gpt-9"}, b"{"):
        assert await served.post(body, "/v1/responses/input_tokens") == await served.post(body)


async def test_openai_python_counts_tokens(sdk: openai.AsyncOpenAI) -> None:
    counted = await sdk.responses.input_tokens.count(model="tiny", input="Hi")
    assert (counted.object, counted.input_tokens > 10) == ("response.input_tokens", True)
