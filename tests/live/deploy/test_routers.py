"""vLLM's router between a server and two engines: sessions, bodies, streams and closed connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import repeat
from pathlib import Path

import pytest

from penstock.services.engines.affinity import SESSION_HEADER
from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import wait_until
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.routers import running_router
from tests.support.server import HELLO, Server, completed_response, running_server

CONVERSATIONS, TURNS = 40, 2  # so many that both engines get some, wherever their ids are hashed to
POLICIES = ("sticky_least_loaded", "consistent_hash")

encode = load_encoding().encode_markup


@asynccontextmanager
async def served_through(folder: Path, policy: str, *engines: FakeVllm) -> AsyncGenerator[Server[VllmHttpEngine], None]:
    """Serve engines behind the router for the length of a block."""
    async with (
        running_fakes(*engines),
        running_router([engine.url for engine in engines], policy, folder / "router.log") as url,
    ):
        engine = await start_vllm_http([url])
        try:
            async with running_server(engine, folder) as server:
                yield server
        finally:
            await engine.close()


def sessions(engine: FakeVllm) -> list[str]:
    """The sessions of an engine's prompts."""
    return [
        next(value for name, value in headers.items() if name.lower() == SESSION_HEADER.lower())
        for headers in engine.headers
    ]


@pytest.mark.parametrize("policy", POLICIES)
async def test_turns_of_a_conversation_go_to_one_engine(tmp_path: Path, policy: str) -> None:
    engines = [FakeVllm(encode(HELLO)) for _ in range(2)]
    async with served_through(tmp_path, policy, *engines) as server:
        last = [await completed_response(server, input=f"Story {number}") for number in range(CONVERSATIONS)]
        for _ in range(1, TURNS):
            last = [await completed_response(server, input="Go on.", previous_response_id=each["id"]) for each in last]
    one, other = map(sessions, engines)
    assert one
    assert other
    assert not {*one} & {*other}
    assert sorted((one + other).count(session) for session in {*one, *other}) == [TURNS] * CONVERSATIONS


async def test_body_arrives_as_it_was_sent(tmp_path: Path) -> None:
    body = {"input": "Hi", "model": "nonsense", "cache_salt": "pepper", "seed": 5, "temperature": 0.25, "priority": 3}
    behind, direct = FakeVllm(encode(HELLO)), FakeVllm(encode(HELLO))
    async with served_through(tmp_path, POLICIES[0], behind) as server:
        await completed_response(server, **body)
    async with running_fakes(direct):
        engine = await start_vllm_http([direct.url])
        try:
            async with running_server(engine, tmp_path / "direct") as server:
                await completed_response(server, **body)
        finally:
            await engine.close()
    (sent,), (received,) = direct.prompts, behind.prompts
    assert {**received, "request_id": None} == {**sent, "request_id": None}


async def test_cancelled_response_closes_the_connection_to_its_engine(tmp_path: Path) -> None:
    engine = FakeVllm(tokens=[*encode("<|channel|>final<|message|>"), *repeat(1, 10_000)], latency=0.01)
    async with served_through(tmp_path, POLICIES[0], engine) as server, server.open_stream({}) as stream:
        response_id = await stream.response_id()
        await stream.upto(b"output_text.delta")
        assert (await server.cancel(response_id))[0] == 200
        await stream.rest()
        await wait_until(lambda: not engine.running)
        assert engine.aborted == 1
