"""A chain of tool turns, as an agent makes them: each sends the output of the call that the turn before has made.

    python -m tests.bench.chain PORT WAY TURNS

It prints the seconds of each turn, from the first byte of the request to the last of the answer, as JSON.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from tests.bench.wire import COMPLETED, END, connected, framed, posted, unframed, upgraded
from tests.support.paths import ROOT

SOCKET, STORED, RESENT = "socket", "stored", "resent"
"""Over a socket with ``store: false``; by ``previous_response_id``; by all items, with ``store: false``."""

RULES = (ROOT / "docs/FRAMES.md").read_text()[:20_000]
RESULT = "drwxr-xr-x 2 user user 4096 Nov 23 07:00 src\n" * 20

TOOLS = [
    {
        "type": "function",
        "name": name,
        "description": f"Runs {name} with an argument. " * 10,
        "parameters": {"type": "object", "properties": {"argument": {"type": "string"}}, "required": ["argument"]},
        "strict": False,
    }
    for name in ("exec_command", "write_stdin", "view_image", "update_plan", "apply_patch", "spawn_agent", "wait_agent")
]
"""As many tools as Codex sends."""

Answer = tuple[float, dict[str, Any]]
"""The seconds of a turn, and its response."""


class HttpClient:
    """One connection that is kept alive."""

    def __init__(self, port: int) -> None:
        self._client = connected(port)

    def answer(self, body: dict[str, Any]) -> Answer:
        request, answer = posted(json.dumps(body).encode(), "keep-alive"), bytearray()
        sent = time.perf_counter()
        self._client.sendall(request)
        while not answer.endswith(b"\r\n" + END):  # an `X-Request-Id` may end with 0
            answer += _block(self._client)
        seconds = time.perf_counter() - sent
        return seconds, _response(bytes(answer[max(0, answer.rfind(b"{" + COMPLETED)) :]))


class SocketClient:
    """One connection that is a WebSocket."""

    def __init__(self, port: int) -> None:
        self._client = upgraded(port)

    def answer(self, body: dict[str, Any]) -> Answer:
        request, unread, event = framed(json.dumps({"type": "response.create", **body}).encode()), b"", b""
        sent = time.perf_counter()
        self._client.sendall(request)
        while not event.startswith((b"{" + COMPLETED, b'{"type":"error"', b'{"type":"response.failed"')):
            while (found := unframed(unread)) is None:
                unread += _block(self._client)
            event, unread = found
        return time.perf_counter() - sent, _response(event)


def chain(port: int, way: str, turns: int) -> list[float]:
    """Return the seconds of each turn but the first, which continues nothing."""
    client = SocketClient(port) if way == SOCKET else HttpClient(port)
    answer: Callable[[dict[str, Any]], Answer] = client.answer
    body: dict[str, Any] = {"stream": True, "store": way == STORED, "tools": TOOLS}
    new: list[Any] = [{"role": "developer", "content": RULES}, {"role": "user", "content": "What is in this folder?"}]
    before: list[Any] = []
    times = []
    for _ in range(1 + turns):
        seconds, response = answer({**body, "input": [*before, *new]})
        times.append(seconds)
        if way == RESENT:
            before += [*new, *response["output"]]
        else:
            body["previous_response_id"] = response["id"]
        call_id = response["output"][-1]["call_id"]
        new = [{"type": "function_call_output", "call_id": call_id, "output": RESULT}]
    return times[1:]


def _block(client: socket.socket) -> bytes:
    if not (block := client.recv(2**20)):
        raise SystemExit("The connection was closed")
    return block


def _response(event: bytes) -> dict[str, Any]:
    """Return the response of a final event, which something may follow."""
    decoded, _ = json.JSONDecoder().raw_decode(event.decode())
    if decoded.get("type") != "response.completed":
        raise SystemExit(f"A turn did not complete: {event[:500]!r}")
    response: dict[str, Any] = decoded["response"]
    return response


if __name__ == "__main__":
    sys.stdout.write(json.dumps(chain(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))
