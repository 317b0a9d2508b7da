"""Who is let in: requests for responses, until the server stops."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from penstock.pipeline.errors import ServerStopping


@dataclass
class Admission:
    """The requests for responses that are being answered: each is let in for the length of a block."""

    stopping: bool = False
    """Whether new requests are turned away."""
    running: int = 0

    def __enter__(self) -> None:
        """Let one in; raises `ServerStopping`."""
        if self.stopping:
            raise ServerStopping
        self.running += 1

    def __exit__(self, *_: object) -> None:
        """Let it go."""
        self.running -= 1

    async def finish(self, seconds: float) -> None:
        """Turn new requests away, and wait for those that run, for at most so many ``seconds``."""
        self.stopping = True
        deadline = time.monotonic() + seconds
        while self.running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
