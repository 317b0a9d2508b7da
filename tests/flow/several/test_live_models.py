"""The models of a server as its operator sees them on the live page."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from penstock.extensions.workbench.live.memory import memory_of
from penstock.pipeline.urls import host_of
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import ApiClient, Json, sse_frames
from tests.support.fake_vllm import FakeVllm, engine_over
from tests.support.live_server import KEY, bearer, live_server
from tests.support.processes import PATIENCE
from tests.support.scripted_model import MODEL
from tests.support.server import script
from tests.support.several import SeveralServer, says, several_models

PASSED = "/v1/embeddings"


async def seen(server: ApiClient) -> dict[str, Json]:
    """Return what the route tells of each model."""
    async with server.client.get(f"{server.url}/live/models", headers=bearer()) as answer:
        assert answer.status == 200, await answer.text()
        told = await answer.json()
    assert told["since"] <= told["now"]
    assert all(each["changed_at"] is None or each["changed_at"] <= told["now"] for each in told["data"])
    return {each["name"]: each for each in told["data"]}


async def seen_when(server: ApiClient, condition: Callable[[dict[str, Json]], bool]) -> dict[str, Json]:
    """Return what the route tells as soon as a condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition(models := await seen(server)):
            await asyncio.sleep(0.01)
    return models


async def passed(server: ApiClient, model: str) -> tuple[int, str]:
    """Ask a model whose answers are passed on."""
    async with server.client.post(server.url + PASSED, json={"input": "Hi", "model": model}) as answer:
        return answer.status, await answer.text()


def has(model: Json, **expected: Any) -> bool:
    return {name: model[name] for name in expected} == expected


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[SeveralServer, None]:
    engines = {"big": says("I am big.", "org/big", "sql"), "small": says("I am small.")}
    tables: dict[str, Json] = {
        "big": {"names": ["claude-*", "sql"]},
        "vectors": {"kind": "embed", "command": MODEL, "names": ["embedder"]},
        "broken": {"kind": "embed", "command": f"{MODEL} --exit-at-start 3"},
        "ranks": {"kind": "rerank", "engine": ["http://gpu1:8000", "http://gpu2:8000/v1"]},
    }
    async with several_models(tmp_path, engines, tables, operator_key=SecretStr(KEY)) as served:
        yield served


async def test_all_models_are_seen_in_the_order_of_the_settings(served: SeveralServer) -> None:
    models = await seen(served)
    assert list(models) == ["big", "small", "vectors", "broken", "ranks"]
    assert has(models["big"], names=["claude-*", "sql"], kind="generate", is_read=True, state="stopped", servers=[])
    assert has(models["vectors"], names=["embedder"], kind="embed", is_read=False, is_child=True, pid=None)
    servers = [{"address": host, "is_up": None} for host in ("gpu1:8000", "gpu2:8000")]
    assert has(models["ranks"], kind="rerank", state="ready", changed_at=None, servers=servers, is_child=False)


async def test_model_is_seen_at_work(served: SeveralServer) -> None:
    """Tokens count while the response runs, once, and for the own name of the model."""
    before = (await seen(served))["big"]
    engine = served.engines["big"]
    engine.hold(3)
    async with served.open_stream({"model": "sql"}) as stream:
        written = before["tokens_written"]
        during = (await seen_when(served, lambda models: models["big"]["tokens_written"] > written))["big"]
        assert has(during, state="ready", running=1, waiting=0, reason="")
        assert during["tokens_read"] - before["tokens_read"] == len(engine.prompts[0].token_ids)
        engine.say_all()
        ended = sse_frames(await stream.rest())[-1]
    usage = json.loads(ended.partition(b"data: ")[2])["response"]["usage"]
    after = await seen(served)
    told = [after["big"][kind] - before[kind] for kind in ("tokens_read", "tokens_cached", "tokens_written")]
    assert told == [
        usage["input_tokens"],
        usage["input_tokens_details"]["cached_tokens"],
        usage["output_tokens"],
    ]
    assert has(after["big"], running=0)
    assert has(after["small"], state="stopped")


async def test_process_of_a_model_is_seen_with_its_memory(served: SeveralServer) -> None:
    status, _ = await passed(served, "embedder")
    assert status == 200
    model = (await seen(served))["vectors"]
    assert has(model, state="ready", running=0, waiting=0, tokens_written=0)
    assert model["memory_bytes"] > 2**20
    assert memory_of(model["pid"])
    assert [server["address"].startswith("127.0.0.1:") for server in model["servers"]] == [True]


async def test_model_that_cannot_start_is_seen_with_its_reason(served: SeveralServer) -> None:
    status, answer = await passed(served, "broken")
    assert status == 503
    model = (await seen(served))["broken"]
    assert has(model, state="failed", pid=None, memory_bytes=None)
    assert "ended with status 3" in model["reason"]
    assert model["reason"] in answer


async def test_engine_that_dies_is_seen(served: SeveralServer) -> None:
    await served.says("small")
    served.engines["small"].is_alive = False
    assert has((await seen(served))["small"], state="failed", reason="none of its engines answers")
    _, listed = await served.get("/v1/models")
    assert {each["id"]: each["state"] for each in listed["data"]}["small"] == "failed"


async def test_requests_that_wait_are_seen(tmp_path: Path) -> None:
    """One waits until its model is up, and one for a place in the engine."""
    engines = {"small": says("I am small.")}
    tables: dict[str, Json] = {
        "small": {"engine_places": 1},
        "slow": {"kind": "embed", "command": f"{MODEL} --waits-for {tmp_path / 'go'}"},
    }
    async with several_models(tmp_path, engines, tables, operator_key=SecretStr(KEY)) as served:
        engines["small"].hold(1)
        async with served.open_stream({"model": "small"}), served.open_stream({"model": "small"}):
            asking = asyncio.create_task(passed(served, "slow"))
            await seen_when(served, lambda models: all(models[name]["waiting"] == 1 for name in ("slow", "small")))
            told = await seen_when(served, lambda models: models["slow"]["state"] == "starting")
            assert has(told["slow"], waiting=1, running=0)
            (tmp_path / "go").touch()
            status, _ = await asking
            assert status == 200
            assert has((await seen(served))["slow"], waiting=0)
            engines["small"].say_all()


async def test_only_model_is_seen(tmp_path: Path) -> None:
    engine = ScriptedEngine(script())
    async with live_server(engine, tmp_path, aliases={"gpt-*": "tiny"}) as server:
        (before,) = (await seen(server)).values()
        assert has(before, name="tiny", names=["gpt-*"], state="ready", servers=[], is_child=False, memory_bytes=None)
        async with server.client.post(
            f"{server.url}/live/watch", json={"input": "Hi", "model": "gpt-5"}, headers=bearer()
        ) as answer:
            await answer.read()
        engine.is_alive = False
        (after,) = (await seen(server)).values()
    assert after["tokens_written"] - before["tokens_written"] == len(engine.script.token_ids)
    assert has(after, state="failed", reason="none of its engines answers")


async def test_servers_of_a_model_are_seen_up_and_down(tmp_path: Path) -> None:
    """The addresses of one model, and of one of several once it is open."""
    up, down = FakeVllm(), FakeVllm()
    expected = [{"address": host_of(each.url), "is_up": each is up} for each in (up, down)]
    table: Json = {"engine": [up.url, down.url]}
    async with engine_over(up, down) as engine, live_server(engine, tmp_path) as server:
        down.is_well = False
        await seen_when(server, lambda models: [each["servers"] for each in models.values()] == [expected])
        async with several_models(tmp_path, {}, {"far": table}, operator_key=SecretStr(KEY)) as served:
            assert [each["is_up"] for each in (await seen(served))["far"]["servers"]] == [None, None]
            await served.post({"input": "Hi", "model": "far"})
            await seen_when(served, lambda models: has(models["far"], servers=expected, state="ready"))


def test_memory_of_a_process_is_that_of_all_that_it_has_started() -> None:
    holds = "import sys; held = bytearray(2**26); print(flush=True); sys.stdin.read()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {holds!r}])"
    with subprocess.Popen([sys.executable, "-c", starts], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        memory = memory_of(process.pid)
        process.communicate()
    assert memory
    assert memory > 2**26
    assert memory_of(process.pid) is None
