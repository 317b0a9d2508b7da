"""A server process whose log tells what holds its event loop, in computing time: other processes change it little."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import uvloop

from penstock.api.runs.watchdog import find_line
from tests.bench.fuzz import passing
from tests.support.server_process import ServerProcess, scripted, serving_process

logger = logging.getLogger(__name__)

TOLD_SECONDS = 0.002
"""Seconds of computing from which on a hold is told; none shall take ten times as long."""

LOOK_SECONDS = 0.001
"""Seconds between two looks at what the loop's thread has computed, and at its place."""

SETTLING_SECONDS = 0.2
"""Seconds after an answer in which what it leaves is freed."""

PASSING = ("--with", f"{passing.__file__}:install")
"""The options of a server with stages of its operator."""

_LINE = re.compile(r"The loop was held for (?P<seconds>[\d.]+) s at (?P<place>.*)$", re.MULTILINE)


class Hold(NamedTuple):
    """The longest time for which the event loop was held, and where."""

    seconds: float = 0.0
    place: str = "nowhere"

    def __str__(self) -> str:
        return f"held for {self.seconds * 1000:.0f} ms at {self.place}"


def holds_since(server: ServerProcess, read: int) -> Hold:
    """Return the longest hold that the log tells after its first characters."""
    found = _LINE.finditer(server.log.read_text(errors="replace")[read:])
    return max((Hold(float(line["seconds"]), line["place"]) for line in found), default=Hold())


@asynccontextmanager
async def noting_hold(server: ServerProcess, note: Callable[[Hold], None]) -> AsyncGenerator[None, None]:
    """Note the longest hold of the block."""
    read = len(server.log.read_text(errors="replace"))
    yield
    await asyncio.sleep(SETTLING_SECONDS)
    note(holds_since(server, read))


@asynccontextmanager
async def measured_process(folder: Path, script: str, *options: str) -> AsyncGenerator[ServerProcess, None]:
    """Run a server whose log tells what holds its event loop."""
    known = (script, "--no-sandbox", "--keep-alive", "2", "--log-level", "INFO")
    async with serving_process(_serve_measured, known, str(folder / f"{script}.sqlite3"), folder, *options) as server:
        yield server


def _serve_measured(*arguments: str) -> None:
    """Serve as `serve_script` does, and log how long the event loop is held, in computing time."""

    async def serving() -> None:
        looks = _Looks()
        threading.Thread(target=looks.look, args=(threading.get_ident(),), daemon=True).start()
        measuring = asyncio.create_task(looks.measure())
        try:
            await scripted(*arguments)
        finally:
            measuring.cancel()

    uvloop.run(serving())


class _Looks:
    """Looks at the loop's thread, from a thread beside it, for the place of a hold."""

    def __init__(self) -> None:
        self._places = Counter[str]()

    def look(self, thread: int) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            frames, frame = [], sys._current_frames().get(thread)
            while frame:
                frames.append(frame)
                frame = frame.f_back
            self._places[str(find_line(frames, {}).line)] += 1

    async def measure(self) -> None:
        while True:
            before, self._places = time.thread_time(), Counter()
            await asyncio.sleep(LOOK_SECONDS)
            if (held := time.thread_time() - before - LOOK_SECONDS) > TOLD_SECONDS:
                places = ", ".join(place for place, _ in self._places.most_common(2))
                logger.warning("The loop was held for %.3f s at %s", held, places or "an unseen place")
