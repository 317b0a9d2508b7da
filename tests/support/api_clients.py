"""Clients of the HTTP API: background responses, streams, conversations, and a client for each mode."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai

from tests.support.event_streams import read_sse

Json = dict[str, Any]

JSON = {"Content-Type": "application/json"}
REQUEST_TIMEOUT = aiohttp.ClientTimeout(300)
"""Seconds after which a request has failed."""

PATIENCE = 300.0
"""Seconds after which a wait has failed; a busy machine may stand still for a minute."""


def openai_client(url: str, key: str = "none", retries: int = 0) -> openai.AsyncOpenAI:
    """Make a client of the server at ``url``.  It loads no certificates: that takes longer than most tests."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, http_client=http)


async def wait_until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


@dataclass
class ApiClient:
    """A client of the server at ``url``."""

    url: str
    client: aiohttp.ClientSession

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and JSON of one request; a body of bytes is sent unchanged."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        async with self.client.request(
            method, self.url + path, data=data, headers=JSON, timeout=REQUEST_TIMEOUT
        ) as answer:
            assert answer.content_type == "application/json"
            return answer.status, await answer.json()

    async def post(self, body: Any, path: str = "/v1/responses") -> tuple[int, Any]:
        return await self.ask("POST", path, body)

    async def get(self, path: str) -> tuple[int, Any]:
        return await self.ask("GET", path)

    async def delete(self, path: str) -> tuple[int, Any]:
        return await self.ask("DELETE", path)

    async def stream(self, body: dict[str, Any], path: str = "/v1/responses") -> bytes:
        return await self._sse("POST", path, json={**body, "stream": True})

    async def again(self, path: str) -> bytes:
        return await self._sse("GET", path)

    async def _sse(self, method: str, path: str, **options: Any) -> bytes:
        async with self.client.request(method, self.url + path, timeout=REQUEST_TIMEOUT, **options) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert answer.headers["Cache-Control"] == "no-cache"
            assert answer.headers["X-Accel-Buffering"] == "no"
            return await answer.read()

    async def start_background(self, body: dict[str, Any] | None = None) -> str:
        """Create a background response, check that it is queued, and return its id."""
        status, answer = await self.post({"input": "Hi", "background": True, **(body or {})})
        assert (status, answer["status"], answer["background"], answer["output"]) == (200, "queued", True, [])
        return str(answer["id"])

    async def wait_for_end(self, response_id: str) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE):
            while True:
                answer = await self.get_response(response_id)
                if answer["status"] not in ("queued", "in_progress"):
                    return answer
                await asyncio.sleep(0.01)

    async def get_response(self, response_id: str) -> dict[str, Any]:
        status, answer = await self.get(f"/v1/responses/{response_id}")
        assert status == 200
        return dict(answer)

    async def replay(self, response_id: str, query: str = "") -> bytes:
        return await self.again(f"/v1/responses/{response_id}?stream=true{query}")

    async def cancel(self, response_id: str) -> tuple[int, Any]:
        """Cancel a response; return the status and the JSON of the answer."""
        return await self.ask("POST", f"/v1/responses/{response_id}/cancel")

    @asynccontextmanager
    async def open_stream(self, body: dict[str, Any] | None = None) -> AsyncGenerator[StreamReader, None]:
        """Create a response and open its stream; disconnect at the end of the block."""
        wanted = {"input": "Hi", "stream": True, **(body or {})}
        async with self.client.post(f"{self.url}/v1/responses", json=wanted) as answer:
            assert answer.status == 200
            yield StreamReader(answer)

    async def stream_events(self, body: Json) -> list[Json]:
        """Create a response, check its stream, and return the JSON of each event."""
        stream = await self.stream(body)
        read_sse(stream)
        frames = stream.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
        return [json.loads(frame.partition("data: ")[2]) for frame in frames if frame]

    async def create_conversation(self, *items: Json) -> str:
        status, conversation = await self.post({"items": items}, CONVERSATIONS)
        assert status == 200
        return f"{CONVERSATIONS}/{conversation['id']}"

    async def conversation_items(self, path: str) -> list[Json]:
        status, page = await self.get(f"{path}/items?order=asc&limit=100")
        assert (status, page["has_more"]) == (200, False)
        data: list[Json] = page["data"]
        return data


class StreamReader:
    def __init__(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = answer
        self.read = b""

    async def upto(self, part: bytes) -> bytes:
        """Read up to the end of the event that contains ``part``."""
        async with asyncio.timeout(PATIENCE):
            while part not in self.read:
                assert not self.answer.content.at_eof(), self.read
                self.read += await self.answer.content.readuntil(b"\n\n")
        return self.read

    async def rest(self) -> bytes:
        """Read to the end; return the whole body."""
        async with asyncio.timeout(PATIENCE):
            self.read += await self.answer.content.read()
        return self.read

    async def response_id(self) -> str:
        first = (await self.upto(b"response.created")).partition(b"data: ")[2].partition(b"\n")[0]
        return str(json.loads(first)["response"]["id"])


def done_items(events: list[Json]) -> list[Json]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


CONVERSATIONS = "/v1/conversations"
USER_MESSAGE = {"role": "user", "content": "Hi"}


def conversation_id(path: str) -> str:
    return path.rpartition("/")[2]


@dataclass(frozen=True)
class Mode:
    name: str
    background: bool = False
    stream: bool = False

    def __str__(self) -> str:
        return self.name


SYNC, STREAM, BACKGROUND, BACKGROUND_STREAM = MODES = (
    Mode("sync"),
    Mode("stream", stream=True),
    Mode("background", background=True),
    Mode("background+stream", background=True, stream=True),
)


@dataclass
class Client:
    """A client that creates one response in a new conversation, and keeps everything that it receives.

    ``answer`` is the last whole response that it received, and ``seen`` is the stream after the event ``after``.
    ``is_complete`` is True once it has received everything.
    """

    server: ApiClient
    mode: Mode
    conversation: str = ""
    after: int = -1
    answer: dict[str, Any] = field(default_factory=dict)
    seen: bytes = b""
    is_complete: bool = False

    @property
    def response_id(self) -> str:
        response = self.answer or json.loads(sse_frames(self.seen)[0].partition(b"data: ")[2])["response"]
        return str(response["id"])

    async def ask(self, **wanted: Any) -> None:
        """Create a response and read until the response or the connection ends."""
        _, conversation = await self.server.post({}, "/v1/conversations")
        self.conversation = conversation["id"]
        body = {"input": "Count.", "conversation": self.conversation, **wanted}
        body |= {"background": self.mode.background, "stream": self.mode.stream}
        try:
            async with self.server.client.post(f"{self.server.url}/v1/responses", json=body) as answer:
                assert answer.status == 200
                await (self._read(answer) if self.mode.stream else self._take(answer))
        except aiohttp.ClientError:
            return
        self.is_complete = True

    async def follow(self, response_id: str) -> None:
        """Read the stream of an existing response until the response or the connection ends."""
        query = "?stream=true" + (f"&starting_after={self.after}" if self.after >= 0 else "")
        try:
            async with self.server.client.get(f"{self.server.url}/v1/responses/{response_id}{query}") as answer:
                assert answer.status == 200
                await self._read(answer)
        except aiohttp.ClientError:
            return
        self.is_complete = True

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        async for piece in answer.content.iter_any():
            self.seen += piece

    async def _take(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = await answer.json()
        if self.mode.background:
            assert (self.answer["status"], self.answer["output"]) == ("queued", [])
            self.answer = await self.server.wait_for_end(self.answer["id"])


def sse_frames(stream: bytes) -> list[bytes]:
    return [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-1] if frame.startswith(b"event: ")]
