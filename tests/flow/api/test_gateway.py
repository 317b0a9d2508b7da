"""A gateway of llm-d between a server and its engines: it chooses an engine by the token ids of the prompt."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import repeat
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import JSON, Json, StreamReader, wait_until
from tests.support.fake_vllm import FakeVllm, running_fakes
from tests.support.server import HELLO, Server, completed_response, running_server
from tests.support.tool_servers import web_server

BLOCK = 16
"""Tokens of a block, whose hash stands for it and for all before it in a prefix cache."""

TICK = 0.01
"""Seconds between two tokens of a response without an end."""

encode = load_encoding().encode_markup


@dataclass
class Gateway:
    """A stand-in for llm-d's gateway: Envoy, with an endpoint picker that has its default parsers.

    A request without a body goes to any engine.  Of the others, it takes prompts of token ids, and prompts of
    ``/v1/completions``.  Like the endpoint picker, it refuses paths that no parser claims, among them ``/tokenize``.
    A prompt goes to the engine that has read more than half of its blocks under its salt.  Pieces of the answer are
    forwarded as they come, and a client that closes its connection closes the one to the engine.
    """

    engines: Sequence[FakeVllm]
    prompts: list[Json] = field(default_factory=list)
    """The bodies of all streams, as they were received."""
    chosen: list[int] = field(default_factory=list)
    """The number of the engine of each stream."""
    refused: list[str] = field(default_factory=list)
    forwarding: int = 0
    """Connections that are open to engines."""
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        number, sent = 0, None
        if text:
            try:
                sent = self._parsed(request, text)
            except ValueError as error:
                self.refused.append(str(error))
                return web.Response(status=400, text=f"inference error: BadRequest - {error}")
            if sent.get("stream"):
                number = self._choose(sent)
                self.prompts.append(sent)
                self.chosen.append(number)
        self.forwarding += 1
        try:
            return await self._forward(request, self.engines[number].url, sent)
        finally:
            self.forwarding -= 1

    def _parsed(self, request: web.Request, text: str) -> Json:
        body: Json = json.loads(text)
        match request.path:
            case "/inference/v1/generate":
                ids = body.get("token_ids") or [-1]
                _require(all(isinstance(each, int) and 0 <= each < 2**32 for each in ids), "must have token_ids")
            case "/v1/completions":
                _require(body.get("prompt"), "must have a prompt")
            case path:
                _require(False, f"no parser matches {path}")
        _require(isinstance(body.get("model"), str), "model not found in request body")
        return body

    def _choose(self, body: Json) -> int:
        """Choose the engine that has read most of the prompt, or the one with the fewest prompts if none has."""
        ids, salt = body["token_ids"], body.get("cache_salt")
        blocks = [(salt, *ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)]
        known = [self._known[block] for block in blocks if block in self._known]
        fewest = min(range(len(self.engines)), key=self.chosen.count)
        number = known[-1] if 2 * len(known) > len(blocks) else fewest
        self._known |= dict.fromkeys(blocks[len(known) :], number)
        return number

    async def _forward(self, request: web.Request, url: str, body: Json | None) -> web.StreamResponse:
        data = None if body is None else json.dumps(body, sort_keys=True)
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, url + request.path, data=data, headers=JSON) as answer,
        ):
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]}
            )
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            return response


def _require(condition: object, words: str) -> None:
    if not condition:
        raise ValueError(words)


@asynccontextmanager
async def served_through(
    folder: Path, *engines: FakeVllm
) -> AsyncGenerator[tuple[Server[VllmHttpEngine], Gateway], None]:
    """Run a server whose only engine is a gateway in front of the engines."""
    gateway = Gateway(engines)
    async with running_fakes(*engines), web_server(gateway.handle) as url:
        engine = await start_vllm_http([url])
        try:
            async with running_server(engine, folder) as server:
                yield server, gateway
        finally:
            await engine.close()


async def test_gateway_gets_token_ids_a_model_and_a_salt_but_no_text(tmp_path: Path) -> None:
    async with served_through(tmp_path, FakeVllm(encode(HELLO))) as (server, gateway):
        body = {"instructions": "The word is sesame.", "input": "What is the word?", "cache_salt": "pepper"}
        answer = await completed_response(
            server, model="nonsense", temperature=0.25, max_output_tokens=77, seed=5, **body
        )
        assert answer["output"][-1]["content"][0]["text"] == "Hello!"
    (prompt,) = gateway.prompts
    token_ids, sampling = prompt.pop("token_ids"), prompt["sampling_params"]
    assert "The word is sesame." in load_encoding().decode(token_ids)
    assert not [word for word in ("sesame", "word", "prompt", "messages") if word in json.dumps(prompt)]
    assert (prompt["model"], prompt["stream"], prompt["stream_options"]) == ("nonsense", True, {"include_usage": True})
    assert "pepper" in prompt["cache_salt"]
    assert (sampling["temperature"], sampling["max_tokens"], sampling["seed"]) == (0.25, 77, 5)


async def test_gateway_need_not_tokenize(tmp_path: Path) -> None:
    async with served_through(tmp_path, FakeVllm()) as (server, gateway):
        assert server.engine.speaks_harmony
    assert gateway.refused == ["no parser matches /tokenize"]


async def test_turn_goes_to_the_engine_that_has_read_the_turn_before(tmp_path: Path) -> None:
    """The prompt of a turn begins with the tokens of the turn before."""
    async with served_through(tmp_path, *(FakeVllm(encode(HELLO)) for _ in range(3))) as (server, gateway):
        firsts = [
            await completed_response(server, input=f"Story {number}: " + "Once upon a time. " * 40)
            for number in range(3)
        ]
        for first in reversed(firsts):
            await completed_response(server, input="Go on.", previous_response_id=first["id"])
    assert gateway.chosen == [0, 1, 2, 2, 1, 0]


@asynccontextmanager
async def generating(
    folder: Path, *, background: bool = False
) -> AsyncGenerator[tuple[Server[VllmHttpEngine], str, StreamReader], None]:
    """Open the stream of a response without an end; after the block, its generation must have been aborted.

    The engine gives a token at each tick.  A second has at most as many ticks, however busy the machine is.
    """
    fake = FakeVllm(tokens=[*encode("<|channel|>final<|message|>"), *repeat(1, 10_000)], latency=TICK)
    async with served_through(folder, fake) as (server, gateway):
        async with server.open_stream({"background": background}) as stream:
            response_id = await stream.response_id()
            await stream.upto(b"output_text.delta")
            assert (gateway.forwarding, fake.running) == (1, 1)
            before = fake.generated
            yield server, response_id, stream
        await wait_until(lambda: not gateway.forwarding and not fake.running)
        assert fake.aborted == 1
        assert fake.generated - before <= 1 / TICK
        assert (await server.wait_for_end(response_id))["status"] == "cancelled"


@pytest.mark.parametrize("background", [False, True])
async def test_cancelled_response_closes_its_connection_within_a_second(tmp_path: Path, *, background: bool) -> None:
    async with generating(tmp_path, background=background) as (server, response_id, stream):
        assert (await server.cancel(response_id))[0] == 200
        await stream.rest()


async def test_client_that_leaves_closes_the_connection_within_a_second(tmp_path: Path) -> None:
    async with generating(tmp_path) as (_, _, stream):
        stream.answer.close()
