"""A whole request whose engine answers at once, with one token: its cost, and the time to its first text.

CPU time covers everything the server does for the request, from the connection to the end of the stream.  The time to
the first text is measured by the client; the minimum of a round counts, because a busy machine only adds to it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.bench.core import recorded_text
from tests.bench.loopback import ANSWERING, NAME, Server
from tests.bench.readers import MARK
from tests.bench.wire import RESPONSES, posted

SHORT, LONG = 500, 70_000

Body = Callable[[], Mapping[str, Any]]


def timed_answer(port: int, body: Mapping[str, Any], path: str = RESPONSES) -> tuple[float, bytes]:
    """Send a request; return the seconds to the first text, and the whole answer."""
    data = json.dumps({"model": NAME, "stream": True, **body}).encode()
    answer, first = b"", 0.0
    with socket.create_connection(("127.0.0.1", port), ANSWERING) as client:
        client.sendall(posted(data, "close", path))
        sent = time.perf_counter()
        while block := client.recv(2**20):
            answer += block
            if not first and MARK in answer:
                first = time.perf_counter() - sent
    if not first:
        raise RuntimeError(f"No text came: {answer[:500]!r}")
    return first, answer


def long_text() -> str:
    return some_text(LONG)


async def request_cost(server: Server, body: Body, requests: int, path: str) -> tuple[float, float]:
    """Return milliseconds of CPU per request, and the shortest time to the first text in milliseconds."""
    before = await server.used()
    felt = [(await asyncio.to_thread(timed_answer, server.port, body(), path))[0] for _ in range(requests)]
    return (await server.used() - before) / requests * 1e3, min(felt) * 1e3


def some_text(tokens: int) -> str:
    return load_encoding().decode(recorded_text().run(tokens))


def response_id(answer: bytes) -> str:
    event = answer.split(b"\r\n\r\n", 1)[1]
    return "resp_" + event.split(b'"id":"resp_', 1)[1].split(b'"', 1)[0].decode()
