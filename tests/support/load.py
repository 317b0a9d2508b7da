"""A load of users, whose answers repeat all that they have said, on servers that are stopped, killed and replaced."""

from __future__ import annotations

import asyncio
import re
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path

import aiohttp
import msgspec

from penstock.pipeline.protocol.events import TERMINAL_TYPES
from tests.support.api_clients import CONVERSATIONS, PATIENCE, Json, sse_frames, wait_until
from tests.support.event_streams import read_sse
from tests.support.releases import Program, running_release
from tests.support.server_process import ServerProcess
from tests.support.stores import database_at

USERS = 5
TURNS = 3
"""Turns of each conversation; each may be at another server, of another release."""

FOLLOWED = 12
"""Events after which a reader goes to the next server."""

MEMORIES = ("previous", "conversation", "carried")
"""Who remembers a conversation: the last response, a conversation object, or the client."""

MODES = ("sync", "stream", "socket", "background", "follow")

NOT_YET = ("conversation_locked", "previous_response_unfinished")
"""Refusals of a request that may succeed a moment later: 0.1.0 may call a response ended before its end is stored."""


def text_of(response: Json) -> str:
    text: str = response["output"][-1]["content"][0]["text"]
    return text


def frame_json(frame: bytes) -> Json:
    value: Json = msgspec.json.decode(frame.partition(b"data: ")[2])
    return value


@dataclass
class Fleet:
    """The servers of a store, and a balancer in front of them, which sends a refused request to the next server."""

    store: str
    folder: Path
    client: aiohttp.ClientSession
    servers: list[ServerProcess] = field(default_factory=list)
    logs: set[Path] = field(default_factory=set)
    refusals: list[object] = field(default_factory=list)
    """Errors of servers, and of connections; their requests were sent again."""
    _turns: Iterator[int] = field(default_factory=count)
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    async def add(self, program: Program, *options: str) -> ServerProcess:
        running = running_release(program, self.store, self.folder, *(options or ("--max-background", "2")))
        server = await self._stack.enter_async_context(running)
        self.servers.append(server)
        self.logs.add(server.log)
        return server

    async def restart(self, server: ServerProcess, program: Program) -> None:
        """Stop a server, then start one of another release at its address."""
        assert await server.kill(signal.SIGTERM) == 0
        server.program = program
        await server.start()

    async def replace(self, server: ServerProcess, program: Program) -> ServerProcess:
        """Start a server of another release, then stop this one."""
        fresh = await self.add(program)
        assert await server.kill(signal.SIGTERM) == 0
        self.servers.remove(server)
        return fresh

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Json | None = None) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Send a request to the servers in turn until one accepts it."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    answer = await self.client.request(method, self._next().url + path, json=body)
                    if answer.status == 200:
                        break
                    error = (await answer.json())["error"]
                    assert answer.status == 503 or error["code"] in NOT_YET, error
                    if error["code"] not in NOT_YET:
                        self.refusals.append(error)
                except aiohttp.ClientConnectionError as failure:
                    self.refusals.append(failure)
                await asyncio.sleep(0.01)
        async with answer:
            yield answer

    async def json(self, method: str, path: str, body: Json | None = None) -> Json:
        async with self.request(method, path, body) as answer:
            value: Json = await answer.json()
            return value

    @asynccontextmanager
    async def socket(self, body: Json) -> AsyncGenerator[tuple[aiohttp.ClientWebSocketResponse, Json]]:
        """Send a request over a socket to the servers in turn; yield the socket and the first event of the response."""
        async with asyncio.timeout(PATIENCE):
            while True:
                try:
                    socket = await self.client.ws_connect(f"{self._next().url}/v1/responses")
                    await socket.send_json({"type": "response.create", **body})
                    message = await socket.receive()
                    if message.type is aiohttp.WSMsgType.TEXT and '"status":503' not in message.data:
                        break
                    self.refusals.append(message)
                    await socket.close()
                except (aiohttp.ClientConnectionError, aiohttp.WSServerHandshakeError) as failure:
                    self.refusals.append(failure)
                await asyncio.sleep(0.01)
        async with socket:
            yield socket, message.json()

    async def close(self) -> None:
        await self._stack.aclose()

    def _next(self) -> ServerProcess:
        return self.servers[next(self._turns) % len(self.servers)]


@dataclass
class Load:
    """Users who talk to a fleet; each answer recites all messages of its conversation, at whichever server."""

    fleet: Fleet
    done: Counter[str] = field(default_factory=Counter)
    """Answers by memory, and by mode."""
    texts: dict[str, str] = field(default_factory=dict)
    """The text of each stored response."""
    streams: dict[str, list[bytes]] = field(default_factory=dict)
    cancelled: dict[str, str] = field(default_factory=dict)
    """The status of each response that was cancelled; it may have been completed before."""
    is_over: bool = False

    async def user(self, number: int) -> None:
        modes = cycle(MODES[number % len(MODES) :] + MODES[: number % len(MODES)])
        for talk, memory in zip(count(), cycle(MEMORIES), strict=False):
            conversation = (await self.fleet.json("POST", CONVERSATIONS, {}))["id"] if memory == "conversation" else ""
            previous, carried, expected = None, [], ""
            for turn in range(TURNS):
                if self.is_over:
                    return
                mode = next(modes)
                if memory == "carried" and mode in ("background", "follow"):
                    mode = "stream"  # only a stored response can run in the background
                message = f"User {number}, talk {talk}, turn {turn}: " + "and so on, " * 4
                expected += message
                body: Json = {"input": message}
                if memory == "previous":
                    body["previous_response_id"] = previous
                elif memory == "conversation":
                    body["conversation"] = conversation
                else:
                    carried.append({"role": "user", "content": message})
                    body = {"input": carried, "store": False, "include": ["reasoning.encrypted_content"]}
                response = await getattr(self, mode)(body)
                assert (response["status"], text_of(response)) == ("completed", expected), response
                previous, carried = response["id"], [*carried, *response["output"]]
                if response["store"]:
                    self.texts[previous] = expected
                self.done.update((memory, mode))
            if previous in self.texts:
                await self.cancel()

    async def sync(self, body: Json) -> Json:
        return await self.fleet.json("POST", "/v1/responses", body)

    async def stream(self, body: Json) -> Json:
        async with self.fleet.request("POST", "/v1/responses", {**body, "stream": True}) as answer:
            seen = await answer.read()
        read_sse(seen)
        *_, last = frames = sse_frames(seen)
        response: Json = frame_json(last)["response"]
        if response["store"]:
            self.streams[response["id"]] = frames
        return response

    async def socket(self, body: Json) -> Json:
        async with self.fleet.socket(body) as (socket, first):
            event = first
            while event["type"] not in TERMINAL_TYPES:
                event = await socket.receive_json()
        response: Json = event["response"]
        return response

    async def background(self, body: Json) -> Json:
        """Poll a response at all servers."""
        response = await self.fleet.json("POST", "/v1/responses", {**body, "background": True})
        while response["status"] in ("queued", "in_progress"):
            await asyncio.sleep(0.02)
            response = await self.fleet.json("GET", f"/v1/responses/{response['id']}")
        return response

    async def follow(self, body: Json) -> Json:
        """Read some events of a background response, then go on at the next server."""
        async with self.fleet.request("POST", "/v1/responses", {**body, "background": True, "stream": True}) as answer:
            frames = await self._some_of(answer, FOLLOWED)
        response_id = frame_json(frames[0])["response"]["id"]
        while (event := frame_json(frames[-1]))["type"] not in TERMINAL_TYPES:
            query = f"stream=true&starting_after={event['sequence_number']}"
            async with self.fleet.request("GET", f"/v1/responses/{response_id}?{query}") as answer:
                frames += await self._some_of(answer, FOLLOWED)
        self.streams[response_id] = frames
        response: Json = event["response"]
        return response

    async def _some_of(self, answer: aiohttp.ClientResponse, number: int) -> list[bytes]:
        """Return the first whole events of a stream that may break off."""
        seen = b""
        with suppress(aiohttp.ClientError):
            async for piece in answer.content.iter_any():
                seen += piece
                if len(sse_frames(seen)) >= number:
                    break
        return sse_frames(seen)

    async def cancel(self) -> None:
        """Start a response and cancel it, perhaps at another server."""
        body = {"input": "and so on, " * 200, "background": True}
        response = await self.fleet.json("POST", "/v1/responses", body)
        response = await self.fleet.json("POST", f"/v1/responses/{response['id']}/cancel")
        assert response["status"] in ("cancelled", "completed")
        self.cancelled[response["id"]] = response["status"]

    async def more(self) -> None:
        """Wait until there was an answer of each kind again."""
        before = self.done.copy()
        await wait_until(lambda: all(self.done[kind] > before[kind] for kind in (*MEMORIES, *MODES)))


_OF_TURNS = re.compile(rb',"[a-z_]+_per_turn":\[[^]]*\]')


def without_turns(shown: bytes) -> bytes:
    """Leave out the numbers of turns in the usage: the last release adds them to each response that it shows."""
    return _OF_TURNS.sub(b"", shown)


async def check(load: Load, store_at: str) -> None:
    """Check that each server has all responses as the users got them, byte for byte but for the numbers of turns."""
    for server in load.fleet.servers:
        for response_id, text in load.texts.items():
            response = await server.get_response(response_id)
            assert (response["status"], text_of(response)) == ("completed", text)
        for response_id, frames in load.streams.items():
            replayed = sse_frames(await server.replay(response_id))
            assert [*map(without_turns, replayed)] == [*map(without_turns, frames)]
        for response_id, status in load.cancelled.items():
            assert (await server.get_response(response_id))["status"] == status
    database = database_at(store_at)
    await database.open()
    rows = await database.read("select id, status from responses")
    await database.close()
    assert {row[0]: row[1] for row in rows} == dict.fromkeys(load.texts, "completed") | load.cancelled
    for log in load.fleet.logs:
        assert not [line for line in log.read_text().splitlines() if "Traceback" in line or " ERROR " in line]
