"""Limits at the edges: OpenAI's status, code and headers, over HTTP and over WebSockets."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.limits.allowance import Allowance, OwnAllowances
from penstock.api.limits.table import KeyLimits
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import JSON, PATIENCE, openai_client, wait_until
from tests.support.openapi import Description
from tests.support.server import ENDLESS, PacedServer, ScriptedServer, running_server, script
from tests.support.socket_client import connected
from tests.support.wrong_bytes import RawRequest, answer_to

RATE = ("limit-requests", "remaining-requests", "reset-requests")


def limit(served: PacedServer, **limits: Any) -> None:
    served.scheduler.admission.tables = {"default": KeyLimits(**limits)}


async def refused(served: PacedServer) -> tuple[dict[str, Any], dict[str, str]]:
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi"}) as answer:
        assert answer.status == 429
        return (await answer.json())["error"], dict(answer.headers)


async def test_answers_have_the_headers_of_openai(served: PacedServer) -> None:
    now = time.monotonic()
    served.scheduler.admission.clock = lambda: now
    served.scheduler.admission.allowances = OwnAllowances(lambda: now)
    limit(served, requests_per_minute=10, tokens_per_minute=1000)
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi"}) as answer:
        headers = answer.headers
        total = (await answer.json())["usage"]["total_tokens"]
    assert [headers[f"x-ratelimit-{name}"] for name in RATE[:2]] == ["10", "9"]
    assert 0 < float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 6
    assert headers["x-ratelimit-limit-tokens"] == "1000"
    assert int(headers["x-ratelimit-remaining-tokens"]) == pytest.approx(1000 - total, abs=1)
    limit(served)
    async with served.client.post(f"{served.url}/v1/responses", json={"input": "Hi"}) as answer:
        assert not [name for name in answer.headers if name.lower().startswith("x-ratelimit")]


@asynccontextmanager
async def counting(where: Path | str) -> AsyncGenerator[tuple[ScriptedServer, Allowance], None]:
    """A server at which requests are limited, and the allowance, which refills no more."""
    stopped = time.monotonic()
    admission = Admission(None, OwnAllowances(lambda: stopped), clock=lambda: stopped)
    admission.tables = {"default": KeyLimits(requests_per_minute=1_000)}
    async with running_server(ScriptedEngine(script()), where, admission=admission) as served:
        (allowance,) = admission._allowances("", admission.of(""))
        yield served, allowance


async def described(served: ScriptedServer) -> list[tuple[str, str, bool]]:
    """Method and path of all operations, and True for those that read a body."""
    _, document = await served.get("/openapi.json")
    return [
        (method, re.sub(r"{\w+}", "x", path), "requestBody" in operation)
        for method, path, operation in Description(document).operations
    ]


BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "an empty object": (b"{}", {}),
    "a wrong parameter": (b'{"input": 5, "items": 5, "metadata": 5}', {}),
    "no JSON": (b"{", {}),
    "no text": (b"\xff", {}),
    "nothing": (b"", {}),
    "a body that is too long": (b" " * 100_001, {}),
    "a compressed body": (b"{}", {"Content-Encoding": "gzip"}),
}


async def test_every_request_with_a_body_counts_once_whatever_becomes_of_it(tmp_path: Path) -> None:
    async with counting(tmp_path) as (served, allowance):
        for method, path, reads_body in await described(served):
            for name, (body, headers) in BODIES.items():
                before = allowance.remaining
                url = f"{served.url}{path}"
                async with served.client.request(method, url, data=body, headers={**JSON, **headers}) as answer:
                    assert answer.status != 429
                assert before - allowance.remaining == reads_body, (method, path, name)


async def test_request_beyond_the_limit_is_refused_before_its_body_has_arrived(tmp_path: Path) -> None:
    async with counting(tmp_path) as (served, allowance):
        allowance.spend(allowance.remaining)
        for method, path, reads_body in await described(served):
            headers = ((b"Content-Type", b"application/json"), *((b"Content-Length", b"90000"),) * reads_body)
            async with asyncio.timeout(PATIENCE):
                status, _ = await answer_to(served.url, RawRequest(method.encode(), path.encode(), headers))
            assert (status == 429) == reads_body, (method, path)


ENDS = ("error", "response.completed", "response.steer.failed")
"""The last events of answers."""


@pytest.mark.parametrize(
    ("sent", "count"),
    [
        ('{"type": "response.create", "input": "Hi"}', 1),
        ('{"type": "response.create", "input": 5}', 1),
        ('{"type": "response.steer", "previous_response_id": "resp_0", "input": "Hi"}', 1),
        ('{"type": "response.steer"}', 1),
        ('{"type": "no_such"}', 1),
        ("{", 1),
        (b"{}", 1),
        ('{"type": "response.processed"}', 0),
    ],
)
async def test_every_event_over_a_websocket_but_a_confirmation_counts_once(
    tmp_path: Path, sent: str | bytes, count: int
) -> None:
    async with counting(tmp_path) as (served, allowance), connected(served) as client:
        before = allowance.remaining
        await (client.socket.send_str(sent) if isinstance(sent, str) else client.socket.send_bytes(sent))
        while count and (await client.frame())["type"] not in ENDS:
            pass
        await client.socket.send_str('{"type": "response.processed", "stream_id": "?"}')
        assert (await client.error())["error"]["code"] == "invalid_stream_id"
        assert before - allowance.remaining == count
        allowance.spend(allowance.remaining)
        await (client.socket.send_str(sent) if isinstance(sent, str) else client.socket.send_bytes(sent))
        if count:
            assert (await client.error())["status"] == 429
        await client.socket.send_str('{"type": "response.processed", "stream_id": "?"}')
        assert (await client.error())["error"]["code"] == "invalid_stream_id"


async def test_input_that_steers_counts_once_with_the_response_that_it_begins(tmp_path: Path) -> None:
    async with counting(tmp_path) as (served, allowance), connected(served) as client:
        served.engine.script = script(ENDLESS, endless=True, latency=0.01)
        await client.send(input="Hi")
        first = await client.frame()
        before = allowance.remaining
        served.engine.script = script()
        event = {"type": "response.steer", "previous_response_id": first["response"]["id"], "input": "Stop."}
        await client.socket.send_str(json.dumps(event))
        while (await client.frame())["type"] != "response.completed":
            pass
        assert (len(served.engine.prompts), before - allowance.remaining) == (2, 1)


async def test_requests_beyond_the_limit_are_refused(served: PacedServer) -> None:
    limit(served, requests_per_minute=1)
    assert (await served.post({"input": "Hi"}))[0] == 200
    error, headers = await refused(served)
    assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
    assert error["message"].startswith("Rate limit reached for this API key on requests per minute: limit 1. ")
    assert 0 < int(headers["Retry-After"]) <= 60
    assert headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_beyond_the_limit_are_refused(served: PacedServer) -> None:
    limit(served, tokens_per_minute=1)
    assert (await served.post({"input": "Hi"}))[0] == 200
    error, headers = await refused(served)
    assert (error["type"], error["code"]) == ("tokens", "rate_limit_exceeded")
    assert int(headers["Retry-After"]) > 60


async def test_responses_at_once_beyond_the_limit_are_refused(served: PacedServer) -> None:
    limit(served, responses=1)
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with served.open_stream() as stream:
        await stream.response_id()
        error, headers = await refused(served)
        assert error["message"] == "Rate limit reached for this API key: 1 responses at once. Try again later."
        assert headers["Retry-After"] == "1"
    await wait_until(lambda: served.scheduler.in_flight.count == 0)
    served.engine.script = script()
    assert (await served.post({"input": "Hi"}))[0] == 200


async def test_response_that_is_refused_leaves_its_conversation_unlocked(served: PacedServer) -> None:
    limit(served, responses=1)
    path = await served.create_conversation()
    conversation = path.rpartition("/")[2]
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    async with served.open_stream() as stream:
        await stream.response_id()
        assert (await served.post({"input": "Hi", "conversation": conversation}))[0] == 429
    await wait_until(lambda: served.scheduler.in_flight.count == 0)
    served.engine.script = script()
    assert (await served.post({"input": "Hi", "conversation": conversation}))[0] == 200


async def test_background_places_are_limited_until_a_response_ends(served: PacedServer) -> None:
    limit(served, background=2)
    served.engine.script = script(ENDLESS, endless=True, latency=0.01)
    first, second = await served.start_background(), await served.start_background()
    status, answer = await served.post({"input": "Hi", "background": True})
    assert (status, answer["error"]["code"]) == (429, "rate_limit_exceeded")
    for response_id in (first, second):
        await served.cancel(response_id)
    await wait_until(lambda: len(served.scheduler.runs) == 0)
    served.engine.script = script()
    await served.wait_for_end(await served.start_background())


async def test_key_that_stores_too_much_may_only_read_and_delete(served: PacedServer) -> None:
    path = await served.create_conversation()
    limit(served, stored_bytes=1)
    status, answer = await served.post({"input": "Hi"})
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (429, *["insufficient_quota"] * 2)
    assert answer["error"]["message"].startswith("This API key has stored ")
    async with served.client.post(f"{served.url}/v1/conversations", json={}) as made:
        assert made.status == 429
    async with served.client.post(f"{served.url}{path}/items", json={"items": []}) as added:
        assert added.status == 429
    assert (await served.post({"input": "Hi", "store": False}))[0] == 200
    async with served.client.delete(f"{served.url}{path}") as deleted:
        assert deleted.status == 200
    served.scheduler.admission._stored.clear()  # instead of a second, after which it is read again
    assert (await served.post({"input": "Hi"}))[0] == 200


async def test_error_over_a_websocket_has_the_headers(served: PacedServer) -> None:
    limit(served, requests_per_minute=1)
    async with connected(served) as client:
        await client.send(input="Hi")
        await client.stream()
        await client.send(input="Hi")
        frame = await client.frame()
    assert (frame["type"], frame["status"], frame["error"]["code"]) == ("error", 429, "rate_limit_exceeded")
    assert 0 < int(frame["headers"]["retry-after"]) <= 60
    assert frame["headers"]["x-ratelimit-limit-requests"] == "1"


async def test_sdk_waits_as_long_as_the_refusal_says(served: PacedServer) -> None:
    limit(served, requests_per_minute=60)
    served.scheduler.admission._known.clear()
    async with openai_client(served.url, retries=2) as sdk:
        for _ in range(62):
            response = await sdk.responses.create(model="tiny", input="Hi")
            assert response.status == "completed"
    limit(served, requests_per_minute=1)
    served.scheduler.admission.allowances = OwnAllowances()
    async with openai_client(served.url) as impatient:
        await impatient.responses.create(model="tiny", input="Hi")
        with pytest.raises(openai.RateLimitError):
            await impatient.responses.create(model="tiny", input="Hi")


async def test_key_names_its_limits(tmp_path: Path) -> None:
    file, limits = tmp_path / "keys", tmp_path / "limits.toml"
    file.write_text("a-key-of-gold-clients limits=gold\nanother-key-of-clients\n")
    limits.write_text("[default]\nrequests_per_minute = 1\n[gold]\nrequests_per_minute = 3\n")
    keys = Keys(file)
    admission = Admission(limits, OwnAllowances(lambda: 0.0), name_of=keys.limits, clock=lambda: 0.0)
    engine = ScriptedEngine(script())
    async with running_server(engine, tmp_path, keys=keys, admission=admission) as served:

        async def answered(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            count = 0
            for _ in range(5):
                async with served.client.post(
                    f"{served.url}/v1/responses", json={"input": "Hi"}, headers=headers
                ) as answer:
                    count += answer.status == 200
            return count

        assert await answered("a-key-of-gold-clients") == 3
        assert await answered("another-key-of-clients") == 1


async def test_server_without_limits_counts_nothing(served: ScriptedServer) -> None:
    await served.post({"input": "Hi"})
    assert not served.scheduler.admission._known
