"""The answers of a server whose model is being loaded.

Loading blocks the event loop for minutes, so a thread answers: that the server lives, what it waits for and for how
long, and when a client may come back.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import msgspec
from multidict import CIMultiDict

from penstock.api.http.bodies import Health, Problem, Ready
from penstock.api.http.conventions import OPENAI, RequestError, SpokenByRoute

RETRY_AFTER = "5"
"""Seconds after which a client may try again."""

SECONDS = 5.0
"""Seconds for which a connection may be silent."""


class _Server(ThreadingHTTPServer):
    """A server on a socket that listens already."""

    daemon_threads = True

    def __init__(self, listening: socket.socket, answer: Callable[[str, Message], tuple[int, object]]) -> None:
        super().__init__(("", 0), partial(_Handler, answer), bind_and_activate=False)
        self.socket.close()
        self.socket = listening.dup()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Drop a connection that broke off."""


class _Handler(BaseHTTPRequestHandler):
    timeout = SECONDS

    def __init__(self, answer: Callable[[str, Message], tuple[int, object]], *arguments: Any) -> None:
        self._answer = answer
        super().__init__(*arguments)

    def do_GET(self) -> None:
        """Answer a request; its body is not read."""
        status, content = self._answer(self.path, self.headers)
        body = msgspec.json.encode(content)
        self.send_response(status)
        for name, value in (("Content-Type", "application/json"), ("Retry-After", RETRY_AFTER)):
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_GET  # noqa: N815 - as above

    def log_message(self, format: str, *_: object) -> None:  # noqa: A002 - the name of the base class
        """Log nothing: probes come every few seconds."""


def _answer_to(reason: str, began: float, by_route: SpokenByRoute, path: str, headers: Message) -> tuple[int, object]:
    """Return the status and the body of an answer."""
    step = f"it has been {reason} for {time.monotonic() - began:.0f} s"
    match path.partition("?")[0]:
        case "/health" | "/ping":
            return 503, Health("starting")
        case "/ready":
            return 503, Ready("not ready", (step,))
        case place:
            spoken = by_route.without_route(place, CIMultiDict(headers.items()))
            problem = Problem(f"The server is starting: {step}.", "server_error", None, "server_starting")
            return (spoken.conventions if spoken else OPENAI).error(RequestError(503, problem))


@contextmanager
def answering(listening: socket.socket, reason: str, by_route: SpokenByRoute) -> Iterator[None]:
    """Answer every request on a listening socket with status 503 and a reason, for the length of a block.

    The answers are errors of the dialects that are spoken on the routes.
    """
    server = _Server(listening, partial(_answer_to, reason, time.monotonic(), by_route))
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="starting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
