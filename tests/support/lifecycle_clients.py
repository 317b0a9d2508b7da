"""A client of each kind: it asks for a response, and remembers all that it sees of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from tests.support.response_lives import ended
from tests.support.server import Asked


@dataclass(frozen=True)
class Mode:
    """A way to ask for a response."""

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
    """Asks a server for one response, in a conversation of its own, and waits for the end in its own way.

    ``answer`` is the last whole response that it was told, and ``seen`` what it got of a stream, behind the event
    ``after``; ``was_told`` is set once it has had all that there is.
    """

    server: Asked
    mode: Mode
    conversation: str = ""
    after: int = -1
    answer: dict[str, Any] = field(default_factory=dict)
    seen: bytes = b""
    was_told: bool = False

    @property
    def response_id(self) -> str:
        """The id that it was told."""
        told = self.answer or json.loads(frames(self.seen)[0].partition(b"data: ")[2])["response"]
        return str(told["id"])

    async def ask(self, **wanted: Any) -> None:
        """Ask for a response and stay to its end, or to that of the connection."""
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
        self.was_told = True

    async def follow(self, response_id: str) -> None:
        """Read the stream of a response that somebody has asked for, to its end or to that of the connection."""
        query = "?stream=true" + (f"&starting_after={self.after}" if self.after >= 0 else "")
        try:
            async with self.server.client.get(f"{self.server.url}/v1/responses/{response_id}{query}") as answer:
                assert answer.status == 200
                await self._read(answer)
        except aiohttp.ClientError:
            return
        self.was_told = True

    async def _read(self, answer: aiohttp.ClientResponse) -> None:
        async for piece in answer.content.iter_any():
            self.seen += piece

    async def _take(self, answer: aiohttp.ClientResponse) -> None:
        self.answer = await answer.json()
        if self.mode.background:
            assert (self.answer["status"], self.answer["output"]) == ("queued", [])
            self.answer = await ended(self.server, self.answer["id"])


def frames(stream: bytes) -> list[bytes]:
    """The whole events of a stream, or of as much of it as has come."""
    return [frame + b"\n\n" for frame in stream.split(b"\n\n")[:-1] if frame.startswith(b"event: ")]
