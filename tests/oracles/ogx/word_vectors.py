"""A server of embeddings whose numbers are counts of words, so that texts with the same words are near."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

MODEL = "words"
DIMENSION = 256


def vector(text: str) -> list[float]:
    """Return the number of words in each of `DIMENSION` groups; no text is the null vector."""
    numbers = [0.01] * DIMENSION
    for word in re.findall(r"\w+", text.lower()):
        numbers[crc32(word.encode()) % DIMENSION] += 1
    return numbers


class Handler(BaseHTTPRequestHandler):
    """The two routes that penstock uses."""

    def do_GET(self) -> None:
        self._answer({"object": "list", "data": [{"id": MODEL}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = [
            {"index": at, "object": "embedding", "embedding": vector(text)} for at, text in enumerate(body["input"])
        ]
        self._answer({"object": "list", "data": data, "model": MODEL, "usage": {"prompt_tokens": 0, "total_tokens": 0}})

    def log_request(self, code: int | str = "", size: int | str = "") -> None:
        pass

    def _answer(self, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def running_embeddings() -> Iterator[str]:
    """Serve embeddings for the length of the block; yield the URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
