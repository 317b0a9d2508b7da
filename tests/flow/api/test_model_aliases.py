"""``--model-alias``: names that stand for a served model, in requests of every dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from pydantic_settings import CliApp

from penstock.api.settings import Settings
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import CannotStart
from penstock.pipeline.protocol.events import ResponseCreated
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import pipeline, running
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.messages import anthropic_client
from tests.support.paths import HARMONY
from tests.support.server import ScriptedServer, running_server, script
from tests.support.socket_client import connected

ALIASES = {"claude-haiku-*": "small", "claude-*": "big", "best": "big", "small": "big"}
SERVED = ("big", "small")
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 99},
}


@pytest.fixture
async def aliased(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(), models=SERVED), tmp_path, aliases=ALIASES) as served:
        yield served


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize(
    ("name", "model"), [("claude-haiku-4-5", "small"), ("claude-opus-5", "big"), ("best", "big"), ("small", "small")]
)
async def test_answer_has_the_name_of_the_request(aliased: ScriptedServer, route: str, name: str, model: str) -> None:
    """The engine gets its own name; a served name is no alias, and of several patterns the first counts."""
    body = BODIES[route] | {"model": name}
    status, answer = await aliased.post(body, route)
    assert (status, answer["model"]) == (200, name)
    async with aliased.client.post(aliased.url + route, json=body | {"stream": True}) as stream:
        assert f'"model":"{name}"' in await stream.text()
    assert [prompt.facts.model for prompt in aliased.engine.prompts] == [model, model]


@pytest.mark.parametrize("route", BODIES)
@pytest.mark.parametrize("name", ["claude", "Claude-opus", "bes", "best2", ""])
async def test_name_that_no_pattern_fits_is_unknown(aliased: ScriptedServer, route: str, name: str) -> None:
    status, answer = await aliased.post(BODIES[route] | {"model": name}, route)
    assert status == 404
    assert answer["error"]["message"].startswith(f"This server serves 'big', 'small', not {name!r}")
    assert not aliased.engine.prompts


@pytest.mark.parametrize("route", BODIES)
async def test_unknown_name_is_answered_with_the_nearest_one(aliased: ScriptedServer, route: str) -> None:
    _, answer = await aliased.post(BODIES[route] | {"model": "SMALL2"}, route)
    assert answer["error"]["message"].startswith(
        "This server serves 'big', 'small', not 'SMALL2' (did you mean small?)"
    )
    status, answer = await aliased.get("/v1/models/small2")
    assert (status, answer["error"]["message"]) == (
        404,
        "This server serves 'big', 'small', not 'small2' (did you mean small?).",
    )


async def test_stored_response_keeps_the_name(aliased: ScriptedServer) -> None:
    _, first = await aliased.post({"input": "Hi", "model": "claude-opus"})
    assert (await aliased.get(f"/v1/responses/{first['id']}"))[1]["model"] == "claude-opus"
    _, second = await aliased.post({"input": "And?", "previous_response_id": first["id"]})
    assert second["model"] == "big"


async def test_alias_of_one_name_is_listed_and_a_pattern_is_not(aliased: ScriptedServer) -> None:
    _, models = await aliased.get("/v1/models")
    assert [model["id"] for model in models["data"]] == ["big", "small", "best"]
    assert (models["first_id"], models["last_id"]) == ("big", "best")
    status, model = await aliased.get("/v1/models/claude-haiku-4-5")
    assert (status, model["id"], model["max_model_len"]) == (200, "claude-haiku-4-5", aliased.engine.context_length)
    assert (await aliased.get("/v1/models/gpt-9"))[0] == 404


@pytest.mark.parametrize(
    ("query", "names", "has_more"),
    [
        ("limit=2", ["big", "small"], True),
        ("limit=3", ["big", "small", "best"], False),
        ("limit=1&after_id=big", ["small"], True),
        ("after_id=small", ["best"], False),
        ("after_id=best", [], False),
        ("limit=1&before_id=best", ["small"], True),
        ("limit=2&before_id=best", ["big", "small"], False),
        ("after_id=big&before_id=best", ["small"], False),
    ],
)
async def test_list_has_pages(aliased: ScriptedServer, query: str, names: list[str], has_more: bool) -> None:
    status, page = await aliased.get(f"/v1/models?{query}")
    assert (status, [model["id"] for model in page["data"]], page["has_more"]) == (200, names, has_more)
    assert (page["first_id"], page["last_id"]) == ((names[0], names[-1]) if names else (None, None))


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=1001", "limit"), ("after_id=gpt", "after_id"), ("before_id=", "before_id")],
)
async def test_wrong_page_is_refused(aliased: ScriptedServer, query: str, param: str) -> None:
    status, answer = await aliased.get(f"/v1/models?{query}")
    assert (status, answer["error"]["param"]) == (400, param)


async def test_client_of_anthropic_reads_all_pages(aliased: ScriptedServer) -> None:
    async with anthropic_client(aliased.url) as client:
        assert [model.id async for model in client.models.list(limit=1)] == ["big", "small", "best"]


async def test_metrics_have_the_served_name(aliased: ScriptedServer) -> None:
    """An alias is a text of the client, of which there may be any number."""
    name = "claude-of-my-own"
    await aliased.post({"input": "Hi", "model": name})
    assert b"response.completed" in await aliased.stream({"input": "Hi", "model": name})
    await aliased.wait_for_end(await aliased.start_background({"input": "Hi", "model": name, "background": True}))
    async with connected(aliased) as socket:
        await socket.create(input="Hi", model=name)
    async with aliased.client.get(f"{aliased.url}/metrics") as metrics:
        text = await metrics.text()
    assert name not in text
    for mode in ("sync", "stream", "background", "websocket"):
        assert f'penstock_responses_total{{mode="{mode}",model="big",reason="",status="completed"}}' in text


def settings() -> Settings:
    return CliApp.run(Settings, cli_args=[])


def started(*aliases: str) -> Settings:
    values: dict[str, Any] = {"engine": [f"replay:{HARMONY / 'greeting'}"], "store": "none", "model_alias": aliases}
    return Settings(**values)


async def test_engine_over_http_gets_its_own_name(tmp_path: Path) -> None:
    vllm = FakeVllm()
    async with running_fakes(vllm):
        values: dict[str, Any] = {"engine": [vllm.url], "store": "none", "model_alias": ["claude-*=also-tiny"]}
        async with pipeline(Settings(**values)) as responses:
            request = CreateResponse.model_validate({"input": "Hi", "model": "claude-opus"})
            async with responses.open(source_of([request])) as events:
                answers = [event.response.model async for event in events if isinstance(event, ResponseCreated)]
    assert (answers, [prompt["model"] for prompt in vllm.prompts]) == (["claude-opus"], ["also-tiny"])


async def test_aliases_are_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text('model-alias = ["claude-*=NAME", "gpt-*=NAME"]\n')
    assert settings().aliases == {"claude-*": "NAME", "gpt-*": "NAME"}
    monkeypatch.setenv("PENSTOCK_MODEL_ALIAS", "a=openai/b,c=d=e")
    assert settings().aliases == {"a": "openai/b", "c": "d=e"}


@pytest.mark.parametrize("alias", ["claude-*", "claude-*=", "=tiny", "="])
def test_alias_without_pattern_or_model_is_refused(alias: str) -> None:
    with pytest.raises(ValidationError, match="is not a pattern and a model: write claude"):
        started(alias)


def test_pattern_of_two_models_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"gpt-\* stands for two models"):
        started("gpt-*=a", "gpt-*=b")


async def test_alias_of_a_model_that_is_not_served_ends_the_start() -> None:
    with pytest.raises(CannotStart, match=r"--model-alias claude-\*=nope: this server serves .*, not 'nope'"):
        async with running(started("claude-*=nope")):
            pass
