"""A session of Claude Code: what it sends, and the same session again on another server or with another model.

``tests/live/claude`` captures a session of 20 requests with calls of four tools, and keeps it in `CAPTURED`, as its
texts are Claude Code's own.  To play it again, begin without answers, and send each body to ``/v1/messages``:

    answers = []
    for _ in captured():
        answer = post(next_body(captured(), answers, model="tiny-gpt-oss"))
        answers.append(answer["content"])
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE

Json = dict[str, Any]

CAPTURED = ROOT / ".cache" / "claude" / "session.jsonl"
"""The bodies of one session, in the order of its requests."""


def captured() -> list[Json]:
    """Return the bodies of the session that the tests have captured."""
    if not CAPTURED.exists():
        raise FileNotFoundError(f"{CAPTURED}: make test-claude captures a session")
    return [json.loads(line) for line in CAPTURED.read_text().splitlines()]


def keep(bodies: Sequence[Json]) -> None:
    """Keep the bodies of a session for later."""
    CAPTURED.parent.mkdir(parents=True, exist_ok=True)
    CAPTURED.write_text("".join(f"{json.dumps(body)}\n" for body in bodies))


def next_body(bodies: Sequence[Json], answers: Sequence[Sequence[Json]], model: str | None = None) -> Json:
    """Return the body that follows the ``answers`` so far, the contents of messages, each to the body before it.

    The answers stand in place of those that Claude Code got, and its results have the ids of their calls.  The result
    of a call that an answer lacks is a text.
    """
    body = bodies[len(answers)]
    given = iter(answers)
    ids: dict[str, str] = {}
    messages: list[Json] = []
    for message in body["messages"]:
        if message["role"] == "assistant":
            answer = next(given)
            ids.update(zip(_calls(message["content"]), _calls(answer), strict=False))
            messages.append({"role": "assistant", "content": answer})
        elif isinstance(message["content"], list):
            messages.append(message | {"content": [_answering(block, ids) for block in message["content"]]})
        else:
            messages.append(message)
    return body | {"messages": messages} | ({"model": model} if model else {})


def _calls(content: Sequence[Json]) -> list[str]:
    return [block["id"] for block in content if block["type"] == "tool_use"]


def _answering(block: Json, ids: dict[str, str]) -> Json:
    if block["type"] != "tool_result":
        return block
    if block["tool_use_id"] in ids:
        return block | {"tool_use_id": ids[block["tool_use_id"]]}
    content = block["content"]
    text = content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
    return {"type": "text", "text": text or "(no output)"}


@contextmanager
def capturing(url: str) -> Iterator[tuple[str, list[Json]]]:
    """Pass requests on to the server at ``url``; yield the URL for clients, and the bodies of their messages so far."""
    bodies = list[Json]()

    class Passing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._pass_on(b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if urlsplit(self.path).path == "/v1/messages":
                bodies.append(json.loads(body))
            self._pass_on(body)

        def _pass_on(self, body: bytes) -> None:
            connection = HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "accept-encoding"}
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.end_headers()
            while part := answer.read1():
                self.wfile.write(part)
            connection.close()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            """Write nothing: the server has a log."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Passing) as proxy:
        thread = Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}", bodies
        finally:
            proxy.shutdown()
            thread.join()
