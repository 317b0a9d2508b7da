"""Requests for embeddings go to another server, and its answers come back as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr, ValidationError

from penstock.api.cli.command_line import read_settings
from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.api.settings import Settings
from penstock.server import running
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import openai_client, wait_until
from tests.support.paths import HARMONY
from tests.support.server import ScriptedServer, running_server

PATHS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/rerank", "/score", "/v2/rerank")
KEY, OTHER_KEY = "a-key-of-a-client", "a-key-of-this-server"
EMBEDDED = {"object": "list", "model": "e", "data": [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]}


@dataclass
class Embedding:
    """A server that embeds, the requests that it got, and its next answer."""

    url: str = ""
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answer: Any = None
    waiting: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.path_qs, headers, await request.read()))
        if self.answer == "never":
            self.waiting += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.waiting -= 1
        if self.answer == "half":
            half = web.StreamResponse(headers={"Content-Length": "100"})
            await half.prepare(request)
            await half.write(b"half")
            assert request.transport
            request.transport.close()
            return half
        answer: Any = self.answer or web.json_response(EMBEDDED)
        assert isinstance(answer, web.Response)
        return answer


@asynccontextmanager
async def embedding(where: Path, **options: Any) -> AsyncGenerator[tuple[ScriptedServer, Embedding], None]:
    """A server, and the one that embeds for it."""
    other, app = Embedding(), web.Application()
    app.router.add_route("*", "/{path:.*}", other.handle)
    async with TestServer(app, handler_cancellation=True) as server:
        other.url = str(server.make_url("")).rstrip("/")
        settings = read_settings([f"--embeddings={other.url}"])
        settings.embeddings_key = SecretStr(options.pop("key", "")) or None
        async with running_server(
            ScriptedEngine(), where, resources=("passing",), settings=settings, **options
        ) as served:
            yield served, other


async def test_openai_python_gets_embeddings(tmp_path: Path) -> None:
    async with embedding(tmp_path) as (served, other), openai_client(served.url) as client:
        answer = await client.embeddings.create(model="e", input="Hi", encoding_format="float")
        assert answer.data[0].embedding == [0.5, 1.0]
        other.answer = web.json_response({"error": {"message": "No.", "param": "input"}}, status=400)
        with pytest.raises(openai.BadRequestError, match=r"No\."):
            await client.embeddings.create(model="e", input="")


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["", OTHER_KEY])
async def test_request_is_passed_on_without_the_key_of_its_client(tmp_path: Path, path: str, key: str) -> None:
    async with embedding(tmp_path, key=key, keys=Keys(given=[KEY])) as (served, other):
        headers = {
            "Authorization": f"Bearer {KEY}",
            "X-Request-Id": "a-1",
            "Cookie": "a=b",
            "Content-Type": "application/json; charset=utf-8",
        }
        async with served.client.post(f"{served.url}{path}?q=1", data=b'{"a": 1 }', headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, EMBEDDED)
            assert answer.headers["X-Request-Id"] == "a-1"
        [(got_path, got, body)] = other.seen
        assert (got_path, body) == (path, b'{"a": 1 }')
        assert (got["x-request-id"], got["content-type"]) == ("a-1", "application/json; charset=utf-8")
        assert got.get("authorization") == (f"Bearer {key}" if key else None)
        assert "cookie" not in got
        assert (await served.post({"input": "Hi"}, path))[0] == 401


async def test_status_and_content_type_come_back(tmp_path: Path) -> None:
    async with embedding(tmp_path) as (served, other):
        other.answer = web.Response(
            body=b"\x00\x01",
            status=429,
            content_type="application/x-floats",
            headers={"Retry-After": "7", "X-Own": "1"},
        )
        async with served.client.post(served.url + PATHS[0], json={}) as answer:
            assert (answer.status, await answer.read()) == (429, b"\x00\x01")
            assert answer.headers["Content-Type"] == "application/x-floats"
            assert (answer.headers["Retry-After"], "X-Own" in answer.headers) == ("7", False)


async def test_client_that_leaves_ends_the_request(tmp_path: Path) -> None:
    async with embedding(tmp_path) as (served, other):
        other.answer = "never"
        asking = asyncio.create_task(served.post({"input": "Hi"}, PATHS[0]))
        await wait_until(lambda: other.waiting == 1)
        asking.cancel()
        await wait_until(lambda: other.waiting == 0)


async def test_broken_answer_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    async with embedding(tmp_path) as (served, other):
        other.answer = "half"
        with pytest.raises(aiohttp.ClientPayloadError):
            async with served.client.post(served.url + PATHS[0], json={}) as answer:
                await answer.read()


async def test_redirect_is_not_followed(tmp_path: Path) -> None:
    async with embedding(tmp_path) as (served, other):
        other.answer = web.Response(status=307, headers={"Location": "http://192.0.2.1/"})
        assert (await served.post({"input": "Hi"}, PATHS[0]))[0] == 502


async def test_server_that_cannot_be_reached_is_a_bad_gateway(tmp_path: Path) -> None:
    settings = read_settings(["--embeddings=http://127.0.0.1:9"])
    async with running_server(ScriptedEngine(), tmp_path, resources=("passing",), settings=settings) as served:
        status, answer = await served.post({"input": "Hi"}, PATHS[0])
    assert (status, answer["error"]["type"]) == (502, "server_error")


async def test_limits_of_requests_hold(tmp_path: Path) -> None:
    admission = Admission()
    admission.tables = {"default": KeyLimits(requests_per_minute=1)}
    async with embedding(tmp_path, admission=admission) as (served, other):
        assert [(await served.post({"input": "Hi"}, PATHS[0]))[0] for _ in range(2)] == [200, 429]
        assert len(other.seen) == 1


@pytest.mark.parametrize("path", PATHS)
async def test_without_such_a_server_the_option_is_named(served: ScriptedServer, path: str) -> None:
    status, answer = await served.post({"input": "Hi"}, path)
    assert (status, answer["error"]["code"]) == (404, "unknown_url")
    assert "--embeddings" in answer["error"]["message"]


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
async def test_the_setting_takes_the_url_with_and_without_its_version(tmp_path: Path, end: str) -> None:
    given = {"engine": [f"replay:{HARMONY}"], "store": str(tmp_path / "store.sqlite3"), "sandbox": False}
    settings = Settings.model_validate(
        {**given, "embeddings": f"http://embedder:8001{end}", "embeddings_key": "a-key-of-the-embedder"}
    )
    async with running(settings) as started:
        assert {route.path for route in started.api.resources} >= {*PATHS}
        assert settings.embeddings == "http://embedder:8001"


@pytest.mark.parametrize("url", ["embedder:8001", "ftp://embedder", "http://", "http://a b"])
def test_the_setting_needs_a_url(url: str) -> None:
    with pytest.raises(ValidationError, match="http://"):
        Settings.model_validate({"embeddings": url})
