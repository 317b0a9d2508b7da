"""What a server adds to the time of the first token: from a request to the first text of an answer that is ready."""

from __future__ import annotations

import json
import socket
import time
from functools import partial
from typing import Any

from stages.harmony import load_encoding
from tests.bench.core import recorded_text
from tests.bench.figures import Comparison, Figure
from tests.bench.loopback import Pair, Server
from tests.bench.server import NAME

FIRST = b"response.output_text.delta"
SHORT, LONG = 500, 70_000


def answered(port: int, **body: Any) -> tuple[float, bytes]:
    """Seconds to the first text, and the whole answer."""
    data = json.dumps({"model": NAME, "stream": True, **body}).encode()
    head = "POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    answer, first = b"", 0.0
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        sent = time.perf_counter()
        while block := client.recv(2**20):
            answer += block
            if not first and FIRST in answer:
                first = time.perf_counter() - sent
    if not first:
        raise RuntimeError(f"No text came: {answer[:500]!r}")
    return first, answer


def prompt(tokens: int) -> str:
    """A text of so many."""
    return load_encoding().decode(recorded_text().run(tokens))


def first_tokens(both: Pair, rounds: int) -> list[Comparison]:
    """Milliseconds for a short and a long prompt, and for a long one whose history ours has stored."""
    stored = _stored(both.ours)
    history: dict[str, Any] = {"previous_response_id": stored, "input": "Go on."}
    asked = {
        SHORT: ({"input": prompt(SHORT)},) * 2,
        LONG: ({"input": prompt(LONG)},) * 2,
        -LONG: (history, {"input": prompt(LONG)}),  # the peer keeps nothing: its clients send all of it again
    }
    found = []
    for tokens, bodies in asked.items():
        times = [
            [
                answered(server.port, **body)[0] * 1e3
                for server, body in zip((both.ours, both.peer), bodies, strict=True)
            ]
            for _ in range(1 + rounds)
        ]
        mine, other = map(tuple, zip(*times[1:], strict=True))
        load = {"prompt": abs(tokens), "known": float(tokens < 0)}
        found.append(Comparison(load, Figure(mine), Figure(other)))
    return found


def _stored(server: Server) -> str:
    ask = partial(answered, server.port, input=prompt(LONG))
    event = ask()[1].split(b"\r\n\r\n", 1)[1]
    return "resp_" + event.split(b'"id":"resp_', 1)[1].split(b'"', 1)[0].decode()
