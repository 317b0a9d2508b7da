"""A client of the WebSocket transport, which checks every stream that it reads."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from penstock.pipeline.protocol.events import ResponseEvent, TerminalEvent
from penstock.pipeline.protocol.response import Response
from tests.support.api_clients import PATIENCE
from tests.support.event_streams import checked, event_of_json, final

Lane = str | None

IMPATIENT = aiohttp.ClientWSTimeout(ws_close=0.1)  # pyright: ignore[reportCallIssue]  # a class of attrs
"""For a client that leaves a server which reads nothing more, and so does not answer the frame that closes."""


@dataclass
class SocketClient:
    """One connection.  Frames of other lanes than the one that is read are kept until their turn."""

    socket: aiohttp.ClientWebSocketResponse
    _kept: defaultdict[Lane, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))

    async def send(self, *, lane: Lane = None, **fields: Any) -> None:
        named = {} if lane is None else {"stream_id": lane}
        await self.socket.send_str(json.dumps({"type": "response.create", **named, **fields}))

    async def frame(self, lane: Lane = None) -> dict[str, Any]:
        """Return the next frame of a lane, without the name of the lane."""
        while not self._kept[lane]:
            frame: dict[str, Any] = await self.socket.receive_json(timeout=PATIENCE)
            self._kept[frame.pop("stream_id", None)].append(frame)
        return self._kept[lane].pop(0)

    async def stream(self, lane: Lane = None) -> list[ResponseEvent]:
        """Return the events of the next response of a lane, checked."""
        events: list[ResponseEvent] = []
        while not events or not isinstance(events[-1], TerminalEvent):
            events.append(event_of_json(await self.frame(lane)))
        return checked(events)

    async def error(self, lane: Lane = None) -> dict[str, Any]:
        """Return the next frame of a lane, which must be an error."""
        frame = await self.frame(lane)
        assert frame.pop("type") == "error"
        assert frame["error"].keys() == {"type", "code", "message", "param"}
        return frame

    async def create(self, *, lane: Lane = None, **fields: Any) -> Response:
        """Create a response, and return it as it ends."""
        await self.send(lane=lane, **fields)
        return final(await self.stream(lane))


@asynccontextmanager
async def connected(server: Any, base: str = "/v1", **options: Any) -> AsyncGenerator[SocketClient, None]:
    """Connect to a server for the length of the block."""
    async with server.client.ws_connect(f"{server.url}{base}/responses", max_msg_size=0, **options) as socket:
        yield SocketClient(socket)
