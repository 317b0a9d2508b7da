"""`/health`, `/ready`, `/load`, `/version`, and the answers of a server that is still loading its model."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api.cli.serve import serve
from penstock.api.dialects.named import spoken_by_route
from penstock.api.http.connections import bind, listen
from penstock.api.http.starting import answering
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.pipeline.distribution import own_version
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.support.api_clients import wait_until
from tests.support.processes import free_port
from tests.support.server import DIALECTS, ENDLESS, ScriptedServer, running_server, script


async def test_server_that_takes_responses_is_ready(served: ScriptedServer) -> None:
    assert await served.get("/ready") == (200, {"status": "ready", "reasons": []})


@pytest.mark.parametrize(
    ("state", "reason"),
    [("dead", "The engine has died."), ("stopping", "The server is stopping."), ("degraded", "The store cannot")],
)
async def test_server_that_takes_none_says_why(
    served: ScriptedServer, state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    match state:
        case "dead":
            served.engine.is_alive = False
        case "stopping":
            served.scheduler.in_flight.stopping = True
        case _:
            monkeypatch.setattr(type(served.store), "is_degraded", True)
    status, answer = await served.get("/ready")
    assert (status, answer["status"]) == (503, "not ready")
    assert [each[: len(reason)] for each in answer["reasons"]] == [reason]
    assert (await served.get("/health"))[0] == (503 if state == "dead" else 200)
    for method in ("GET", "POST"):
        async with served.client.request(method, f"{served.url}/ping") as ping:
            assert (ping.status, await ping.json()) == await served.get("/health")


async def test_version_is_that_of_the_package(served: ScriptedServer) -> None:
    assert await served.get("/version") == (200, {"version": own_version()})


async def test_load_is_the_number_of_running_responses(served: ScriptedServer) -> None:
    served.engine.script = script(ENDLESS, endless=True, latency=0.001)
    assert await served.get("/load") == (200, {"server_load": 0})
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi", "stream": True}) as answer:
        await answer.content.readline()
        assert await served.get("/load") == (200, {"server_load": 1})
    await wait_until(lambda: not len(served.scheduler.runs))
    assert await served.get("/load") == (200, {"server_load": 0})


class Eager(ScriptedEngine):
    """An engine of one's own that takes prompts although it says that it is dead."""

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        says, self.is_alive = self.is_alive, True
        try:
            async with super().open(prompt) as frames:
                yield frames
        finally:
            self.is_alive = says


@pytest.mark.parametrize("body", [{}, {"stream": True}, {"background": True}, {"store": False}], ids=str)
async def test_engine_that_says_it_is_dead_gets_no_request(tmp_path: Path, body: dict[str, Any]) -> None:
    engine = Eager(script("<|channel|>final<|message|>Hi.<|return|>"))
    async with running_server(engine, tmp_path) as served:
        assert (await served.post({"input": "Hi"}))[0] == 200
        engine.is_alive = False
        status, answer = await served.post({"input": "Hi", **body})
    assert (status, answer["error"]["message"]) == (503, "The engine has died.")
    assert len(engine.prompts) == 1


@asynccontextmanager
async def loading() -> AsyncGenerator[str, None]:
    """A server that is still loading, at the URL that is yielded."""
    with bind("127.0.0.1", 0) as bound:
        listen(bound)
        with answering(bound, "loading tiny", spoken_by_route(DIALECTS)):
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"


async def refusal_of(method: str, url: str, **options: Any) -> tuple[int, Any, str]:
    async with aiohttp.ClientSession() as client, client.request(method, url, **options) as answer:
        return answer.status, await answer.json(), answer.headers["Retry-After"]


async def test_server_that_loads_says_for_how_long() -> None:
    async with loading() as url:
        status, answer, _ = await refusal_of("GET", f"{url}/ready")
        assert (status, answer["status"]) == (503, "not ready")
        assert answer["reasons"][0].startswith("it has been loading tiny for ")
        for path in ("/health", "/ping"):
            assert (await refusal_of("GET", url + path))[:2] == (503, {"status": "starting"})


async def test_server_that_loads_asks_clients_to_come_back() -> None:
    async with loading() as url:
        for method in ("POST", "GET", "PUT", "PATCH", "DELETE", "OPTIONS"):
            options = {"json": {"input": "Hi" * 10_000}} if method == "POST" else {}
            status, answer, retry = await refusal_of(method, f"{url}/v1/responses", **options)
            assert (status, answer["error"]["code"], retry) == (503, "server_starting", "5")
        async with aiohttp.ClientSession() as client, client.head(f"{url}/health") as answer:
            assert (answer.status, await answer.read()) == (503, b"")


async def test_refusal_of_a_server_that_loads_is_that_of_the_dialect() -> None:
    async with loading() as url:
        for path in ("/v1/messages", "/v1/messages/count_tokens?beta=true"):
            status, answer, retry = await refusal_of("POST", url + path, json={})
            assert (status, answer["type"], answer["error"]["type"], retry) == (503, "error", "api_error", "5")
            assert answer["error"]["message"].startswith("The server is starting: it has been loading tiny for ")
        assert (await refusal_of("POST", f"{url}/v1/chat/completions", json={}))[1].keys() == {"error"}


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\n\n", b"GET /" + b"x" * 70_000])
async def test_broken_connection_does_not_stop_the_answers(sent: bytes) -> None:
    async with loading() as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(sent)
        assert (await refusal_of("GET", f"{url}/health"))[0] == 503


async def test_address_is_answered_at_every_moment_of_the_start(tmp_path: Path) -> None:
    may_start, seen = asyncio.Event(), list[tuple[int, str]]()

    @asynccontextmanager
    async def start(_: Settings) -> AsyncGenerator[RunningEngine, None]:
        await may_start.wait()
        yield RunningEngine(ScriptedEngine(script()), harmony_stages(load_encoding()))

    port = free_port()
    settings = Settings(port=port, store=str(tmp_path / "store.sqlite3"), sandbox=False, drain_timeout="0s")  # type: ignore[arg-type]
    serving = asyncio.create_task(serve(settings, start))
    async with aiohttp.ClientSession() as client:
        while not seen or seen[-1][0] != 200:
            try:
                async with client.get(f"http://127.0.0.1:{port}/ready") as answer:
                    seen.append((answer.status, json.loads(await answer.text())["status"]))
            except aiohttp.ClientConnectorError:
                assert not seen  # once it has answered, it always does
            if len(seen) == 3:
                may_start.set()
            await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.wait({serving})
    assert seen[0] == (503, "not ready")
    assert seen[-1] == (200, "ready")
