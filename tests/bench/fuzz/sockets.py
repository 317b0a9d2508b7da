"""Attack the WebSockets of a server process, beside an ordinary client that must go on; count what holds its loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import WSCloseCode

from tests.bench.fuzz.fire import HANGS, Outcome, complaints
from tests.bench.fuzz.measured import noting_hold
from tests.support.server_process import ServerProcess
from tests.support.socket_client import connected
from tests.support.socket_frames import (
    CLOSE,
    COMPRESSED,
    CONTINUATION,
    NO_MASK,
    PING,
    PONG,
    deflated,
    frame_of,
    read_frame,
    upgraded,
)

MEGABYTES = 2**20

ANSWER = re.compile(rb'"type":"(response\.(completed|incomplete|failed|steer\.failed)|error)"')
"""The end of a response, or an error: a response that is steered may end as incomplete."""

ANSWERED, BROKEN_OFF = "answered", "broken off"
"""The ends of attacks besides the code with which the server closes the connection."""

Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[str]]


def create(**fields: object) -> bytes:
    return json.dumps({"type": "response.create", "store": False, **fields}).encode()


def sending(*frames: bytes, answers: bool = True) -> Attack:
    """Send frames, and read until the end; the client ``answers`` pings."""

    async def attack(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        with suppress(ConnectionError):
            for frame in frames:
                writer.write(frame)
                await writer.drain()
        return await read_to_end(reader, writer if answers else None)

    return attack


async def steer_much(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Steer a response with 25 megabytes, in one text and in many messages."""
    writer.write(frame_of(create(input="Count.")))
    _, created = await read_frame(reader)
    steer = {"type": "response.steer", "previous_response_id": json.loads(created)["response"]["id"]}
    texts = ("x" * (25 * MEGABYTES), [{"role": "user", "content": "x"}] * 200_000)
    return await sending(*(frame_of(json.dumps({**steer, "input": given}).encode()) for given in texts))(reader, writer)


async def read_nothing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
    """Ask for more than the connection holds, and read none of it until the server has closed it."""
    transport: Any = writer.transport
    transport.pause_reading()
    asked = frame_of(create(input="Count.", instructions="x" * 100_000, max_output_tokens=16))
    while True:  # until writing raises ConnectionError
        writer.write(asked)
        await writer.drain()
        await asyncio.sleep(0.02)


async def read_to_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter | None) -> str:
    """Read until the connection is closed, or a request is answered; pings are answered over ``writer``."""
    while True:
        opcode, payload = await read_frame(reader)
        if opcode == PING and writer:
            writer.write(frame_of(payload, PONG))
        if opcode == CLOSE:
            return str(int.from_bytes(payload[:2], "big") or WSCloseCode.OK.value)
        if ANSWER.search(payload):
            return ANSWERED


PROTOCOL, POLICY = str(WSCloseCode.PROTOCOL_ERROR.value), str(WSCloseCode.POLICY_VIOLATION.value)
SHORT = frame_of(create(input="Hi"))

ATTACKS: Mapping[str, tuple[Attack, str]] = {
    "a bomb": (sending(frame_of(deflated(b" " * 31 * MEGABYTES), reserved=COMPRESSED)), PROTOCOL),
    "a broken deflate stream": (sending(frame_of(b"\xff" * 20, reserved=COMPRESSED)), PROTOCOL),
    "an unmasked request": (sending(frame_of(create(input="Hi"), mask=NO_MASK)), PROTOCOL),
    "text that is not UTF-8": (sending(frame_of(b'{"\xff')), str(WSCloseCode.INVALID_TEXT.value)),
    "a flood of pings": (sending(frame_of(b"", PING) * 100_000, SHORT), ANSWERED),
    "a flood of fragments": (
        sending(frame_of(b"{", fin=False), frame_of(b" ", CONTINUATION, fin=False) * 100_000, frame_of(b"", CLOSE)),
        str(WSCloseCode.OK.value),
    ),
    "a message without end": (sending(frame_of(b" " * 20 * MEGABYTES, fin=False), answers=False), POLICY),
    "a text of 25 MB": (sending(frame_of(create(input="x" * (25 * MEGABYTES)))), ANSWERED),
    "a text of 25 MB of escapes": (sending(frame_of(create(input="\n" * (12 * MEGABYTES)))), ANSWERED),
    "a type of 900,000 lists": (sending(frame_of(json.dumps({"type": [[]] * 900_000}).encode())), ANSWERED),
    "ten million values": (sending(frame_of(create(input=[0] * 10_000_000))), ANSWERED),
    "200,000 messages": (sending(frame_of(create(input=[{"role": "user", "content": "Hi"}] * 200_000))), ANSWERED),
    "steering with 25 MB": (steer_much, ANSWERED),
    "a client that reads nothing": (read_nothing, BROKEN_OFF),
    "a silent client": (sending(answers=False), POLICY),
}
"""Attacks by name, each with the end that its connection must have."""


async def attack_sockets(server: ServerProcess, rounds: int = 1) -> dict[str, Outcome]:
    """Play each attack beside a client that asks again and again; return the ends of connections and the holds."""
    ordinary, is_over = Outcome(), asyncio.Event()
    asking = asyncio.create_task(_ask(server, ordinary, is_over))
    found = dict[str, Outcome]()
    for name, (attack, wanted) in ATTACKS.items():
        found[name] = outcome = Outcome()
        for _ in range(rounds):
            async with noting_hold(server, outcome.note):
                end = await _play(server, attack)
            outcome.statuses[end] += 1
            if end != wanted:
                outcome.fault(f"the connection ended with {end}, not {wanted}", name)
    is_over.set()
    await asking
    return {**found, "the ordinary client": ordinary, "after the attacks": Outcome(faults=complaints(server))}


async def _play(server: ServerProcess, attack: Attack) -> str:
    """Play an attack on a connection of its own; return how this ended."""
    reader, writer = await upgraded(server.url, Extensions="permessage-deflate; client_max_window_bits")
    try:
        async with asyncio.timeout(HANGS):
            return await attack(reader, writer)
    except (ConnectionError, asyncio.IncompleteReadError):
        return BROKEN_OFF
    except TimeoutError:
        return "a hang"
    finally:
        writer.close()


async def _ask(server: ServerProcess, outcome: Outcome, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        async with connected(server) as client:
            response = await client.create(input="Hi")
        outcome.statuses[response.status] += 1
        if response.status != "completed":
            outcome.fault(f"a response was {response.status}", response.id)
