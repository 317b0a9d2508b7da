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

from penstock.stages.services.engines.scripted import ScriptedEngine
from tests.support.event_streams import read_sse
from tests.support.server import WEATHER, ApiClient, ScriptedServer, Server

Json = dict[str, Any]

PATIENCE = 120.0
"""Seconds after which a wait has failed; a busy machine may stand still for a minute."""


def openai_client(url: str, key: str = "none", retries: int = 0) -> openai.AsyncOpenAI:
    """Make a client of the server at ``url``.  It loads no certificates: that takes longer than most tests."""
    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=retries, http_client=http)


async def start_background(served: ApiClient, body: dict[str, Any] | None = None) -> str:
    """Create a background response, check that it is queued, and return its id."""
    status, answer = await served.post({"input": "Hi", "background": True, **(body or {})})
    assert (status, answer["status"], answer["background"], answer["output"]) == (200, "queued", True, [])
    return str(answer["id"])


async def wait_for_end(served: ApiClient, response_id: str) -> dict[str, Any]:
    """Poll a response until it ends."""
    async with asyncio.timeout(PATIENCE):
        while True:
            answer = await get_response(served, response_id)
            if answer["status"] not in ("queued", "in_progress"):
                return answer
            await asyncio.sleep(0.01)


async def get_response(served: ApiClient, response_id: str) -> dict[str, Any]:
    status, answer = await served.get(f"/v1/responses/{response_id}")
    assert status == 200
    return dict(answer)


async def cancel_response(served: ApiClient, response_id: str) -> tuple[int, Any]:
    """Cancel a response; return the status and the JSON of the answer."""
    return await served.ask("POST", f"/v1/responses/{response_id}/cancel")


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.005)


async def wait_until_idle(served: ScriptedServer) -> None:
    """Wait until the engine runs nothing."""
    await wait_until(lambda: served.engine.running == 0)


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
        """Read the first event; return the id of its response."""
        first = (await self.upto(b"response.created")).partition(b"data: ")[2].partition(b"\n")[0]
        return str(json.loads(first)["response"]["id"])


@asynccontextmanager
async def open_stream(served: ApiClient, body: dict[str, Any] | None = None) -> AsyncGenerator[StreamReader, None]:
    """Create a response and open its stream; disconnect at the end of the block."""
    wanted = {"input": "Hi", "stream": True, **(body or {})}
    async with served.client.post(f"{served.url}/v1/responses", json=wanted) as answer:
        assert answer.status == 200
        yield StreamReader(answer)


async def stream_events(served: Server[ScriptedEngine], body: Json) -> list[Json]:
    """Create a response, check its stream, and return the JSON of each event."""
    stream = await served.stream(body)
    read_sse(stream)
    frames = stream.decode().removesuffix("data: [DONE]\n\n").split("\n\n")
    return [json.loads(frame.partition("data: ")[2]) for frame in frames if frame]


def done_items(events: list[Json]) -> list[Json]:
    return [event["item"] for event in events if event["type"] == "response.output_item.done"]


CONVERSATIONS = "/v1/conversations"
USER_MESSAGE = {"role": "user", "content": "Hi"}

CONVERSATION_ITEMS: list[Json] = [
    USER_MESSAGE,
    {"role": "assistant", "id": "msg_mine", "phase": "commentary", "content": [{"type": "refusal", "refusal": "No."}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "rain"},
    {"type": "custom_tool_call", "call_id": "d", "name": "say", "input": "x"},
    {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "x"}]},
    {"type": "additional_tools", "role": "developer", "tools": [WEATHER]},
]
"""One item of each kind that a conversation takes."""


async def create_conversation(served: ScriptedServer, *items: Json) -> str:
    """Create a conversation; return its path."""
    status, conversation = await served.post({"items": items}, CONVERSATIONS)
    assert status == 200
    return f"{CONVERSATIONS}/{conversation['id']}"


def conversation_id(path: str) -> str:
    return path.rpartition("/")[2]


async def conversation_items(served: ScriptedServer, path: str) -> list[Json]:
    status, page = await served.get(f"{path}/items?order=asc&limit=100")
    assert (status, page["has_more"]) == (200, False)
    data: list[Json] = page["data"]
    return data


@dataclass(frozen=True)
class Mode:
    """A mode of a request: background or not, streamed or not."""

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
            self.answer = await wait_for_end(self.server, self.answer["id"])


def sse_frames(stream: bytes) -> list[bytes]:
    return [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-1] if frame.startswith(b"event: ")]
