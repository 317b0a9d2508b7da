"""A clock of the event loop that a test moves, and a count of work that does not depend on the machine."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

TURNS = 20
"""Turns of the event loop before, and again after, a move of the clock."""


class Clock:
    """The time of one event loop, which stands still until the test moves it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.now = loop.time()
        loop.time = self  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now

    async def move(self, seconds: float) -> None:
        """Let time pass; the loop takes `TURNS` turns before and after."""
        await self.turn()
        self.now += seconds
        await self.turn()

    async def turn(self) -> None:
        """Let the loop take `TURNS` turns without moving the clock."""
        for _ in range(TURNS):
            await asyncio.sleep(0)


@pytest.fixture
async def clock() -> Clock:
    return Clock(asyncio.get_running_loop())


def count_instructions(run: Callable[[], object]) -> int:
    """Count the bytecode instructions that ``run`` takes, in the threads it starts too; a call into C counts as one."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    previous = sys.gettrace(), threading.gettrace()
    sys.settrace(trace)
    threading.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(previous[0])
        threading.settrace(previous[1])
    return count
