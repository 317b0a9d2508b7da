"""A clock of the event loop that a test moves, and a count of work that does not depend on the machine."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeAlias

import pytest

TraceFunction: TypeAlias = Callable[[FrameType, str, Any], Any]

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
    _start_to(trace)
    threading.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(previous[0])
        threading.settrace(previous[1])
    return count


def _start_to(trace: TraceFunction) -> None:
    """Trace this thread.  Python 3.12 only reports instructions if a frame wants them when the trace starts."""
    frame = inspect.currentframe()
    assert frame
    frame.f_trace_opcodes = True
    sys.settrace(trace)


@dataclass
class Turns:
    """The bytecode instructions of one turn of the event loop after another; a call into C counts as one.

    Work in other threads does not count.
    """

    longest: int = 0
    _count: int = 0

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "call" and frame.f_code.co_qualname == "BaseEventLoop._run_once":
            self._count = 0
        self._count += event == "opcode"
        self.longest = max(self.longest, self._count)
        return self.trace


@contextmanager
def counting_turns() -> Iterator[Turns]:
    """Count the instructions of each turn that the running event loop takes within the block."""
    turns, previous = Turns(), sys.gettrace()
    _start_to(turns.trace)
    try:
        yield turns
    finally:
        sys.settrace(previous)
