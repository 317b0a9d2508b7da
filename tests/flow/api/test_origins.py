"""Requests of foreign web pages, and compressed bodies."""

from __future__ import annotations

import gzip
import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from penstock.api.http.auth import Keys
from penstock.api.http.origins import Origins
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import JSON
from tests.support.server import ScriptedServer, running_server, script

PATH = "/v1/responses"
BODY = json.dumps({"input": "Hi"}).encode()
PAGE = "https://page.example"
KEY = "a-key-of-sixteen-or-more"


@pytest.fixture
async def allowing(tmp_path: Path) -> AsyncGenerator[ScriptedServer, None]:
    """A server without keys that is called ``gpubox``, and allows the pages of one origin."""
    origins = Origins(["gpubox"], [PAGE])
    async with running_server(ScriptedEngine(script()), tmp_path, origins=origins) as server:
        yield server


async def post(server: ScriptedServer, headers: dict[str, str], body: bytes = BODY) -> tuple[int, str | None]:
    """Status and error code of a request with these headers."""
    async with server.client.post(server.url + PATH, data=body, headers={**JSON, **headers}) as answer:
        error = (await answer.json()).get("error")
        return answer.status, error and error["code"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "LOCALHOST.:80", "[::1]:8000", "192.168.1.5", "gpubox"])
async def test_own_names_and_addresses_are_accepted(allowing: ScriptedServer, host: str) -> None:
    assert await post(allowing, {"Host": host}) == (200, None)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:8000", "localhost.evil.example", "[::1", ""])
async def test_name_that_a_foreign_zone_may_hold_is_refused(allowing: ScriptedServer, host: str) -> None:
    assert await post(allowing, {"Host": host}) == (403, "host_not_allowed")


async def test_health_needs_no_name(allowing: ScriptedServer) -> None:
    async with allowing.client.get(f"{allowing.url}/health", headers={"Host": "pod.cluster.local"}) as answer:
        assert answer.status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Origin": "http://localhost:3000"},
        {"Origin": "https://page.example.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
    ],
)
async def test_foreign_page_is_refused(allowing: ScriptedServer, headers: dict[str, str]) -> None:
    assert await post(allowing, headers) == (403, "origin_not_allowed")
    assert not allowing.engine.prompts


async def test_own_page_is_accepted(allowing: ScriptedServer) -> None:
    headers = {"Origin": allowing.url, "Sec-Fetch-Site": "same-origin"}
    assert await post(allowing, headers) == (200, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
async def test_body_that_needs_no_preflight_is_refused(allowing: ScriptedServer, kind: str) -> None:
    assert await post(allowing, {"Content-Type": kind}) == (415, "unsupported_media_type")


async def test_body_to_an_unknown_url_gets_the_sentence_about_the_api(allowing: ScriptedServer) -> None:
    async with allowing.client.post(f"{allowing.url}/v1/elsewhere", data="{}") as answer:
        error = (await answer.json())["error"]
    assert (answer.status, error["code"]) == (404, "unknown_url")
    assert "GET /openapi.json" in error["message"]


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "application/vnd.api+json"])
async def test_kinds_of_json_are_accepted(allowing: ScriptedServer, kind: str) -> None:
    assert await post(allowing, {"Content-Type": kind}) == (200, None)


async def test_preflight_of_an_allowed_origin_names_what_it_may_send(allowing: ScriptedServer) -> None:
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
        "Access-Control-Request-Private-Network": "true",
    }
    async with allowing.client.options(allowing.url + PATH, headers=headers) as answer:
        assert answer.status == 204
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert answer.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert answer.headers["Access-Control-Allow-Private-Network"] == "true"


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_to_an_allowed_origin_can_be_read(allowing: ScriptedServer, stream: bool) -> None:
    body = json.dumps({"input": "Hi", "stream": stream}).encode()
    headers = {**JSON, "Origin": PAGE}
    async with allowing.client.post(allowing.url + PATH, data=body, headers=headers) as answer:
        assert answer.status == 200
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE
        assert answer.headers["Vary"] == "Origin"


async def test_errors_to_an_allowed_origin_can_be_read(allowing: ScriptedServer) -> None:
    async with allowing.client.get(f"{allowing.url}/v1/responses/none", headers={"Origin": PAGE}) as answer:
        assert answer.status == 404
        assert answer.headers["Access-Control-Allow-Origin"] == PAGE


async def test_preflight_of_a_foreign_origin_is_refused(allowing: ScriptedServer) -> None:
    async with allowing.client.options(allowing.url + PATH, headers={"Origin": "https://evil.example"}) as answer:
        assert answer.status == 403
        assert "Access-Control-Allow-Origin" not in answer.headers


async def test_server_with_keys_is_protected_by_them_alone(tmp_path: Path) -> None:
    """A page cannot send a key that it does not have, and many programs with a key send an origin of their own."""
    headers = {"Host": "api.example", "Origin": "app://desktop", "Content-Type": "text/plain"}
    engine, keys, origins = ScriptedEngine(script()), Keys(given=[KEY]), Origins(keyed=True)
    async with running_server(engine, tmp_path, keys=keys, origins=origins) as server:
        assert await post(server, headers) == (401, "invalid_api_key")
        assert await post(server, {**headers, "Authorization": f"Bearer {KEY}"}) == (200, None)


@pytest.mark.parametrize("encoding_name", ["gzip", "deflate", "br", "zstd", "GZIP", "identity, gzip"])
async def test_compressed_body_is_refused_and_not_inflated(allowing: ScriptedServer, encoding_name: str) -> None:
    """Inflating three gigabytes of blanks would stop the event loop for seconds."""
    headers = {**JSON, "Content-Encoding": encoding_name}
    body = gzip.compress(b" " * 10_000_000)
    async with allowing.client.post(allowing.url + PATH, data=body, headers=headers) as answer:
        error = (await answer.json())["error"]
        assert (answer.status, error["code"]) == (415, "unsupported_media_type")
        assert "Content-Encoding" in error["message"]
