"""Admission: requests and background runs are counted, so that a stopping server can refuse new ones and wait.

It limits neither their rate nor their number.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from penstock.pipeline.errors import ServerStopping


@dataclass
class Admission:
    """A gate that counts the requests and background runs at work; each passes it for the length of a block."""

    stopping: bool = False
    """True if new requests are turned away."""
    running: int = 0

    def __enter__(self) -> None:
        """Let a request in; raise `ServerStopping` if the server is stopping."""
        if self.stopping:
            raise ServerStopping
        self.running += 1

    def __exit__(self, *_: object) -> None:
        """Count the request out."""
        self.running -= 1

    async def finish(self, seconds: float) -> None:
        """Turn new requests away, and wait up to ``seconds`` for the running ones to end."""
        self.stopping = True
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
