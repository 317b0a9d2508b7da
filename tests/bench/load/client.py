"""One stream of a Responses server, as its client sees it, at little cost for a token."""

from __future__ import annotations

import asyncio
import socket
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import msgspec

from tests.bench.load.plan import Plan
from tests.bench.load.talk import Item, Reading

SMALL = 4096
"""Bytes that the buffers of a slow reader hold, so that the server sees how slow it is."""

PERIOD = 0.1
"""Seconds between two reads of a slow reader."""

COMPLETED, INCOMPLETE, CANCELLED = "completed", "incomplete", "cancelled"
USUAL = (COMPLETED, INCOMPLETE, CANCELLED)
"""The outcomes that are no error."""


class _Event(msgspec.Struct):
    """The fields of an event that are read; a response only of the event that ends a stream."""

    type: str = ""
    response: msgspec.Raw = msgspec.Raw(b"{}")
    code: Any = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class Sample:
    """One request; all times are of `time.perf_counter`."""

    begun: float
    """The time at which it was due, which may be before it was sent."""
    is_slow: bool = False
    deltas: array[float] = field(default_factory=lambda: array("d"))
    """The times of its deltas."""
    ended: float = 0.0
    outcome: str = "broken off"
    """``completed``, ``incomplete``, ``cancelled``, or the error."""
    response: Item = field(default_factory=dict)
    """The response of its last event; empty if it has none."""

    def record(self, event: bytes, at: float) -> None:
        """Record an event that arrived at that time."""
        data = b"\n".join(line[5:] for line in event.split(b"\n") if line.startswith(b"data:")).strip()
        if data in (b"", b"[DONE]"):
            return
        read = _decode(data)
        if read.type.endswith(".delta"):
            self.deltas.append(at)
        elif read.type in ("response.completed", "response.incomplete"):
            self.response = msgspec.json.decode(read.response)
            self.outcome = INCOMPLETE if self.response.get("status") == INCOMPLETE else COMPLETED
        elif read.type in ("response.failed", "error") or read.error:
            error = read.error or msgspec.json.decode(read.response).get("error")
            self.outcome = f"{read.type or 'error'} {read.code or code(error)}"


def code(error: Any) -> str:
    """Return the code or type of an error object."""
    named = error if isinstance(error, dict) else {}
    return str(named.get("code") or named.get("type") or "without a code")


class Events:
    """Split a stream into its events, without their blank lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, block: bytes) -> list[bytes]:
        *events, self._rest = (self._rest + block).replace(b"\r\n", b"\n").split(b"\n\n")
        return events


async def read_slowly(content: aiohttp.StreamReader, bytes_per_second: int) -> AsyncGenerator[bytes, None]:
    while block := await content.read(max(1, round(bytes_per_second * PERIOD))):
        yield block
        await asyncio.sleep(PERIOD)


@dataclass(frozen=True)
class Client:
    plan: Plan
    model: str
    quick: aiohttp.ClientSession
    slow: aiohttp.ClientSession

    @classmethod
    @asynccontextmanager
    async def opened(cls, plan: Plan) -> AsyncGenerator[Self, None]:
        """Connect to the server of a plan, and close all connections at the end of the block."""
        headers = {"Content-Type": "application/json"}
        if plan.api_key:
            headers["Authorization"] = f"Bearer {plan.api_key.get_secret_value()}"
        timeout = aiohttp.ClientTimeout(total=None)  # its timer would run for each delta
        usual = aiohttp.TCPConnector(limit=0)
        small = aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_small)
        async with (
            aiohttp.ClientSession(connector=usual, headers=headers, timeout=timeout) as quick,
            aiohttp.ClientSession(connector=small, headers=headers, timeout=timeout, read_bufsize=SMALL) as slow,
        ):
            yield cls(plan, plan.model or await _first_model(quick, plan.api), quick, slow)

    async def stream(self, body: Item, reading: Reading, begun: float) -> Sample:
        """Send a request, and read its stream to the end or as far as ``reading`` says."""
        sample = Sample(begun, is_slow=reading.bytes_per_second is not None)
        session, data = self.slow if sample.is_slow else self.quick, msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(self.plan.timeout),
                session.post(f"{self.plan.api}/responses", data=data) as answer,
            ):
                if answer.status == 200:
                    await _read(answer, reading, sample)
                else:
                    sample.outcome = f"{answer.status} {await _refusal(answer)}"
        except TimeoutError:
            sample.outcome = "timeout"
        except msgspec.DecodeError:
            sample.outcome = "an event that is not one of the API"
        except (aiohttp.ClientError, ConnectionError) as error:
            sample.outcome = type(error).__name__
        sample.ended = time.perf_counter()
        return sample


async def _read(answer: aiohttp.ClientResponse, reading: Reading, sample: Sample) -> None:
    blocks: AsyncIterator[bytes] = answer.content.iter_any()
    if reading.bytes_per_second is not None:
        blocks = read_slowly(answer.content, reading.bytes_per_second)
    events = Events()
    async for block in blocks:
        at = time.perf_counter()
        for event in events.feed(block):
            sample.record(event, at)
        if reading.deltas is not None and len(sample.deltas) >= reading.deltas and not sample.response:
            sample.outcome = CANCELLED
            answer.close()
            return


async def _refusal(answer: aiohttp.ClientResponse) -> str:
    try:
        return code(msgspec.json.decode(await answer.read()).get("error"))
    except (msgspec.DecodeError, AttributeError):
        return answer.reason or ""


async def _first_model(session: aiohttp.ClientSession, api: str) -> str:
    try:
        async with session.get(f"{api}/models") as answer:
            found = msgspec.json.decode(await answer.read()) if answer.status == 200 else {"data": []}
    except aiohttp.ClientError as error:
        raise SystemExit(f"No server answers at {api}: {error}") from error
    if not found["data"]:
        raise SystemExit(f"{api}/models names no model (status {answer.status}): give one with --model")
    return str(found["data"][0]["id"])


def _small(address: Any) -> socket.socket:
    """Return a socket with a small buffer."""
    family, kind, protocol, _, _ = address
    client = socket.socket(family, kind, protocol)
    client.setblocking(False)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL)
    return client
