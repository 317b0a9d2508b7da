"""Work on the event loop that lets other tasks run."""

from __future__ import annotations

import asyncio
from time import perf_counter

HELD_SECONDS = 0.002
"""Seconds of work after which a task yields to the loop, once its current piece is finished."""


class YieldPoint:
    """A yield point for one task, which lets the event loop run after every `HELD_SECONDS` seconds of work."""

    def __init__(self) -> None:
        self._rest_at = perf_counter() + HELD_SECONDS

    async def __call__(self) -> None:
        """Yield to the event loop, if it is time."""
        if perf_counter() >= self._rest_at:
            await asyncio.sleep(0)
            self._rest_at = perf_counter() + HELD_SECONDS
