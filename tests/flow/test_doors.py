"""Every door through which the answer of another program comes in, and answers that no program should send.

A door reads a bounded part of an answer, and ends with a result or an error of its own, never with a bug.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from yarl import URL

from penstock.api import peers
from penstock.api.peers import PeerLost, Peers, SseRelay
from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.reader import Reader
from penstock.extensions.tools.browser.search_engines import ENGINES, search_backend
from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.pipeline.errors import StageError
from penstock.pipeline.protocol.tools import McpServer
from penstock.services.engines.http_generation import HttpGeneration
from penstock.services.engines.replicas import Replica, Replicas, UnusableServer
from penstock.services.engines.vllm_http import start_vllm_http
from penstock.services.store.stored import Server
from penstock.services.tools import ServerUnavailable
from penstock.services.web.image_cache import ImageCache
from penstock.stages.models.images import NoImage
from tests.support.fake_vllm import prompt_for_fakes
from tests.support.mcp_servers import LOCAL, PATIENT
from tests.support.tool_servers import web_server

MOST_READ = 100 * 2**20
"""Bytes that no door reads of an answer without end, what the connection holds included."""

HANGS = 300

JSON, PAGE, STREAM = "application/json", "text/html", "text/event-stream"


@dataclass
class Answer:
    """What a program answers to each request: ``body``, and then ``repeated`` without end, if that is not empty."""

    body: bytes
    repeated: bytes = b""
    status: int = 200
    kind: str = JSON
    encoding: str = "identity"
    is_cut: bool = False
    sent: int = field(default=0, compare=False)

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": self.kind, "Content-Encoding": self.encoding, "Location": "/"}
        if self.is_cut:
            headers["Content-Length"] = str(len(self.body) + 1)
        answer = web.StreamResponse(status=self.status, headers=headers)
        await answer.prepare(request)
        with suppress(ConnectionError):
            await answer.write(self.body)
            while self.repeated and self.sent < 2 * MOST_READ:
                await answer.write(self.repeated)
                self.sent += len(self.repeated)
        if self.is_cut and request.transport:
            request.transport.abort()
        return answer


# Doors


async def search(url: str) -> None:
    for kind in ENGINES:
        backend = search_backend(kind, url, "key")
        try:
            with suppress(CallFailed):
                await backend.search("Paris", 5)
        finally:
            await backend.close()


async def open_page(url: str) -> None:
    reader = Reader(LOCAL)
    try:
        with suppress(CallFailed):
            await reader.page(url)
    finally:
        await reader.close()


async def fetch_image(url: str) -> None:
    with suppress(NoImage):
        await ImageCache(LOCAL).resolve(f"{url}/image.png")


async def start_engine(url: str) -> None:
    with suppress(UnusableServer):
        await (await start_vllm_http([url], wait=0)).close()


async def generate(url: str) -> None:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        generation = HttpGeneration(Replicas((Replica(url, session, is_healthy=True),)), prompt_for_fakes(), 0.0)
        try:
            with suppress(StageError):
                await generation.begin()
                async for _ in generation.frames():
                    pass
        finally:
            generation.leave()


@asynccontextmanager
async def peer(url: str) -> AsyncGenerator[tuple[Peers, web.Request, Server], None]:
    """Yield what a request to another server needs."""
    app = web.Application()
    app.router.add_get("/openapi.json", generate, name="openapi")  # type: ignore[arg-type]
    path = URL("/v1/responses/resp_1")
    request = SimpleNamespace(app=app, rel_url=path, method="GET", headers={})
    asking = Peers(siblings=(url,))
    try:
        yield asking, cast("web.Request", request), Server("one", url, is_alive=True)
    finally:
        await asking.close(app)


async def forward(url: str) -> None:
    async with peer(url) as (asking, request, server):
        with suppress(PeerLost):
            await asking.forward(request, server)
        await asking.search(request, "resp_1")


async def relay(url: str) -> None:
    async with peer(url) as (asking, request, server):
        with suppress(PeerLost):
            async for _ in asking.frames(request, server, SseRelay()):
                pass


async def list_tools(url: str) -> None:
    for over in ("mcp", "sse"):
        servers = McpServers({}, LOCAL)
        try:
            with suppress(ServerUnavailable):
                await servers.tools(McpServer("x", f"{url}/{over}"), PATIENT if over == "mcp" else 1.0)
        finally:
            await servers.close()


DOORS: Mapping[str, Callable[[str], Awaitable[None]]] = {
    "search engines": search,
    "pages": open_page,
    "images": fetch_image,
    "the start of an engine": start_engine,
    "the tokens of an engine": generate,
    "an answer of another server": forward,
    "a stream of another server": relay,
    "tools of MCP servers": list_tools,
}

# Answers

NAMES = (
    *("data", "id", "root", "parent", "max_model_len", "choices", "token_ids", "finish_reason", "usage", "error"),
    *("message", "code", "logprobs", "top_logprobs", "token_logprobs", "content", "prompt_tokens", "param"),
    *("results", "web", "title", "url", "description", "summary", "text", "raw_content"),
    *("type", "sequence_number", "response", "jsonrpc", "result", "tools", "method", "params"),
)
TEXTS = st.sampled_from(["tiny", "http://a/", "token_id:x", "response.completed", "2.0", "\0", "\ud800", "", "x" * 300])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=6),
    max_leaves=20,
)
BODIES = VALUES.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=50)
FRAMED = st.sampled_from([b"%b", b"data: %b\n\n", b"event: x\ndata: %b\n\n", b"\ndata: data: [DONE]\n\n%b"])
STATUSES = st.sampled_from([200, 200, 200, 302, 400, 429, 500])
KINDS = st.sampled_from([JSON, PAGE, STREAM, "image/png", "text/html; charset=\xff"])

WRONG = st.builds(
    Answer,
    st.builds(lambda body, frame: frame % body, BODIES, FRAMED),
    status=STATUSES,
    kind=KINDS,
    encoding=st.sampled_from(["identity", "identity", "gzip", "x"]),
    is_cut=st.booleans(),
)

EXCESSIVE: Mapping[str, Answer] = {
    "deep": Answer(b"[" * 1_000_000),
    "deep in a field": Answer(b'{"x":' + b"[" * 1_000_000),
    "deep in an event": Answer(b'data: {"x":' + b"[" * 1_000_000 + b"\n\n", kind=STREAM),
    "three million objects": Answer(b"[" + b"{}," * 3_000_000 + b"{}]"),
    "three million results": Answer(b'{"results":[' + b"{}," * 3_000_000 + b'{}],"data":[]}'),
    "three million tokens": Answer(b'data: {"choices":[{"token_ids":[' + b"1," * 3_000_000 + b"1]}]}\n\n", kind=STREAM),
    "no UTF-8": Answer(
        b'data: {"choices":[{"finish_reason":"\xff"}],"type":"\xff","sequence_number":1}\n\n', kind=STREAM
    ),
    "a text without end": Answer(b'{"data":"', b"x" * 2**18),
    "a line without end": Answer(b"data: ", b"x" * 2**18, kind=STREAM),
    "a page without end": Answer(b"", b"<a href=x>x</a>" * 2**14, kind=PAGE),
    "a refusal without end": Answer(b'{"error":"', b"x" * 2**18, status=400),
    "an error without end": Answer(b'{"error":"', b"x" * 2**18, status=500),
    "links to long URLs": Answer(
        b"<base href='http://a/" + b"x" * 500_000 + b"/'>" + b"<a href=a>x</a>" * 50_000, kind=PAGE
    ),
    "50,000 links to long URLs": Answer(
        b"<base href='http://a/"
        + b"x" * 2_000
        + b"/'>"
        + b"".join(b"<a href=%d>x</a>" % each for each in range(50_000)),
        kind=PAGE,
    ),
}


@pytest.mark.parametrize("door", DOORS)
@given(answer=WRONG)
async def test_wrong_answer_is_an_error_of_the_door(door: str, answer: Answer) -> None:
    async with asyncio.timeout(HANGS), web_server(answer) as url:
        await DOORS[door](url)


@pytest.mark.long
@pytest.mark.parametrize("name", EXCESSIVE)
@pytest.mark.parametrize("door", DOORS)
async def test_excessive_answer_is_read_in_part(door: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LARGEST_RELAYED", 2**24)
    answer = EXCESSIVE[name]
    answer.sent = 0
    async with asyncio.timeout(HANGS), web_server(answer) as url:
        await DOORS[door](url)
        assert answer.sent < MOST_READ
