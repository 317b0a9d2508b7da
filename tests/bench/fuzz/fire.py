"""Fire hostile requests at a server process, and many streams at once; return what it did wrong."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
from yarl import URL

from tests.bench.fuzz.hostile import HostileRequest, RawConnection
from tests.bench.fuzz.measured import Hold
from tests.support.api_clients import JSON, ApiClient
from tests.support.server_process import ServerProcess

HANGS = 300.0
"""Seconds after which a request or a connection counts as hanging; a busy machine may stand still for a minute."""

QUIET = 1.0
"""Seconds for which a client reads answers before it stops writing."""

ENDS = re.compile(rb"^event: response\.(completed|failed|incomplete)$", re.MULTILINE)
STATUS = re.compile(rb"^HTTP/[01]\.\d (\d{3})", re.MULTILINE)

Shot = TypeVar("Shot")


@dataclass
class Outcome:
    """The number of answers by status, a line for each fault, and the longest hold of the event loop, if measured."""

    statuses: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    hold: Hold | None = None

    def note(self, hold: Hold) -> None:
        """Keep the shortest of the longest holds of all rounds."""
        self.hold = min(self.hold or hold, hold)

    def fault(self, problem: str, shot: object) -> None:
        self.faults.append(f"{problem}: {str(shot)[:2000]}")


async def fire(
    shots: Iterable[Shot], shoot: Callable[[Shot, Outcome], Awaitable[None]], at_a_time: int = 24
) -> Outcome:
    """Fire all shots, ``at_a_time`` at once."""
    outcome, waiting = Outcome(), iter(shots)

    async def work() -> None:
        for shot in waiting:
            try:
                async with asyncio.timeout(HANGS):
                    await shoot(shot, outcome)
            except TimeoutError:
                outcome.fault(f"no end after {HANGS:g} seconds", shot)

    async with asyncio.TaskGroup() as workers:
        for _ in range(at_a_time):
            workers.create_task(work())
    return outcome


async def fire_bodies(server: ApiClient, requests: Iterable[HostileRequest]) -> Outcome:
    """Send requests; each answer is an error in OpenAI's form, an object, or a stream with one end."""

    async def shoot(request: HostileRequest, outcome: Outcome) -> None:
        url, headers = URL(server.url + request.path, encoded=True), {**JSON, **dict(request.headers)}
        try:
            async with server.client.post(url, data=request.body, headers=headers) as answer:
                body = await answer.read()
        except aiohttp.ClientError as error:
            outcome.fault(f"no answer, but {error!r}", request)
            return
        outcome.statuses[str(answer.status)] += 1
        if answer.content_type == "text/event-stream":
            if len(ENDS.findall(body)) != 1 or not body.endswith(b"data: [DONE]\n\n"):
                outcome.fault("a stream without one end", request)
        elif answer.status >= 500 or (answer.status >= 400) != ("error" in json.loads(body) and is_error(body)):
            outcome.fault(f"{answer.status}, {body[:300]!r}", request)

    return await fire(requests, shoot)


def is_error(body: bytes) -> bool:
    answer = json.loads(body)
    error, is_anthropic = answer["error"], answer.get("type") == "error"
    fields = {"message", "type"} if is_anthropic else {"message", "type", "param", "code"}
    return isinstance(error, dict) and error.keys() - {"details"} == fields


async def fire_connections(server: ApiClient, connections: Iterable[RawConnection]) -> Outcome:
    """Open connections; each gets nothing but answers of HTTP, none a server error, and ends with its client."""
    host, port = server.url.removeprefix("http://").split(":")

    async def shoot(shot: RawConnection, outcome: Outcome) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = b""
        try:
            writer.write(shot.sent)
            if shot.end == "reset":
                await asyncio.sleep(0.01)
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            elif shot.end == "half-close":
                with suppress(TimeoutError):
                    async with asyncio.timeout(QUIET):
                        while piece := await reader.read(2**16):
                            answer += piece
                writer.write_eof()
                answer += await reader.read()
        except ConnectionError:
            pass  # the server may close a broken connection at any time
        finally:
            writer.close()
        found = [int(status) for status in STATUS.findall(answer)]
        outcome.statuses.update(map(str, found) if found else ["no answer"])
        if any(status >= 500 for status in found) or (answer and not STATUS.match(answer)):
            outcome.fault(f"{answer[:300]!r}", shot)

    return await fire(connections, shoot, at_a_time=100)


async def open_streams(
    server: ApiClient, count: int, once_open: Awaitable[object] | None = None, **fields: object
) -> Outcome:
    """Hold ``count`` streams open at once, half of them in the background; each has exactly one terminal event."""
    begun = 0
    all_begun = asyncio.Event()

    async def shoot(number: int, outcome: Outcome) -> None:
        nonlocal begun
        body = {"input": f"Count. {number}", "stream": True, "background": number % 2 == 1, **fields}
        read = b""
        try:
            async with server.client.post(f"{server.url}/v1/responses", json=body) as answer:
                while b"event: response.in_progress" not in read and not answer.content.at_eof():
                    read += await answer.content.readuntil(b"\n\n")
                begun += 1
                if begun == count:
                    all_begun.set()
                read += await answer.content.read()
        except aiohttp.ClientError as error:
            outcome.fault(f"broken off by {error!r}", number)
        ends = [end.decode() for end in ENDS.findall(read)]
        outcome.statuses.update(ends or ["no end"])
        if len(ends) != 1 or not read.endswith(b"data: [DONE]\n\n"):
            outcome.fault(f"{len(ends)} terminal events, {read[-200:]!r}", number)

    firing = asyncio.create_task(fire(range(count), shoot, at_a_time=count))
    if once_open:
        await asyncio.wait((firing, asyncio.create_task(all_begun.wait())), return_when=asyncio.FIRST_COMPLETED)
        await once_open
    return await firing


def complaints(server: ServerProcess) -> list[str]:
    """Lines of the log that a request of a client must never cause."""
    log = server.log.read_text(errors="replace")
    return [line for line in log.splitlines() if "Traceback" in line or " ERROR " in line]
