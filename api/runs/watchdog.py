"""The watchdog: names the code that holds the event loop, and the stages of an operator that give nothing.

While the loop is held, all responses stand still, and the code that holds it cannot report itself.  So a thread looks
at the stack of the loop's thread.  Times in which the process did not get a CPU are left out: they are not the fault of
the code that was to run.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

from penstock.pipeline.core import Pipeline
from penstock.pipeline.faults import code_of
from penstock.pipeline.guard import Guard, RunningStage, guard_in
from penstock.pipeline.logs import current_response

logger = logging.getLogger(__name__)

BEATS = 5
"""Beats of the event loop in the time for which code may hold it; a lower limit of `PERIOD` bounds their cost."""

PERIOD = 0.01
"""Fewest seconds between two beats."""

PATIENCE = 5.0
"""Seconds after which a hold that goes on is logged."""

QUIET = 60.0
"""Seconds between two lines about the same stage."""

SILENCE = 60.0
"""Seconds after which a stage that gives nothing is named."""


@contextmanager
def watching(pipeline: Pipeline[Any, Any], slow: float) -> Iterator[None]:
    """Watch the event loop and the operator's stages of a pipeline for the length of a block.

    The loop is not watched if ``slow``, the seconds for which code may hold it, is 0.
    """
    steps = list(pipeline.every_step())
    own = {code: step.name for step in steps if step.guard is None and (code := code_of(step.stage))}
    naming = asyncio.create_task(name_silent([step.guard for step in steps if step.guard]))
    try:
        with Watchdog(slow, own) if slow else nullcontext():
            yield
    finally:
        naming.cancel()


class Place(NamedTuple):
    """The code that held the loop: its stage, if there is one, and its line."""

    stage: str | None
    line: str

    @property
    def key(self) -> str:
        """The stage, or else the line: its holds are logged together."""
        return self.stage or self.line

    def __str__(self) -> str:
        return f"by the stage {self.stage!r}, at {self.line}" if self.stage else f"at {self.line}"


class Lateness:
    """The seconds of a hold that are ``excused``, as the thread of the loop could not run: from looks at its times.

    If this thread is late itself, it had no CPU, or not the interpreter.  If the other thread computed meanwhile, that
    one had both.
    """

    def __init__(self, period: float, now: float, used: tuple[float, float]) -> None:
        self.excused = 0.0
        self._period = period
        self._looked = now
        self._used = used

    def look(self, now: float, used: tuple[float, float]) -> None:
        """Take the time, and the seconds that the loop's thread has computed, and waited for a CPU; each period."""
        interval, computed, waited = now - self._looked, used[0] - self._used[0], used[1] - self._used[1]
        self.excused += min(interval, waited) if interval < 2 * self._period else max(0.0, interval - computed)
        self._looked, self._used = now, used


class Reports:
    """The lines of the log: the first at once, and then one per `QUIET` seconds for each stage."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def ended(self, place: Place, seconds: float, now: float, *, is_known: bool) -> None:
        """Log a hold that has ended; always if it ``is_known`` from `goes_on`."""
        if not is_known and not self._is_due(place, now):
            self._unlogged[place.key] += 1
            return
        others = self._unlogged.pop(place.key, 0)
        more = f"; {others} more times since the line before" if others else ""
        logger.warning("The event loop was held for %.2f s %s%s", seconds, place, more)

    def goes_on(self, place: Place, seconds: float, now: float) -> bool:
        """Log a hold that has not ended; return False if no line was due."""
        is_due = self._is_due(place, now)
        if is_due:
            logger.warning("The event loop has been held for %.0f s, and still is, %s", seconds, place)
        return is_due

    def _is_due(self, place: Place, now: float) -> bool:
        if now - self._logged.get(place.key, -QUIET) < QUIET:
            return False
        self._logged[place.key] = now
        return True


class Watchdog:
    """Logs the code that holds the event loop for more than ``slow`` seconds, while it is entered.

    ``own`` has the names of the server's stages by their code; those of an operator have guards.
    """

    def __init__(self, slow: float, own: Mapping[CodeType, str], patience: float = PATIENCE) -> None:
        self._slow = slow
        self._own = own
        self._patience = patience
        self._period = max(slow / BEATS, PERIOD)
        self._beaten = 0.0
        self._late: deque[float] = deque()  # the seconds between two beats, if they are too many
        self._outside: Collection[FrameType] = ()  # the frames of the loop itself and of its callers
        self._timer: asyncio.Handle | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._loop, self._watched = asyncio.get_running_loop(), threading.current_thread()
        self._timer = self._loop.call_soon(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._thread.ident is not None:
            self._thread.join()
        self._outside = ()

    # On the loop

    def _begin(self) -> None:
        self._outside = frozenset(_outward(inspect.currentframe()))
        self._beaten = time.monotonic()
        self._beat()
        self._thread.start()

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten > self._slow:
            self._late.append(now - self._beaten)
        self._beaten = now
        self._timer = self._loop.call_later(self._period, self._beat)

    # In the thread

    def _watch(self) -> None:
        read, reports, places = thread_times(self._watched), Reports(), Counter[Place]()
        lateness, is_known = Lateness(self._period, time.monotonic(), read()), False
        while not self._stopped.wait(self._period):
            now, beaten = time.monotonic(), self._beaten
            lateness.look(now, read())
            is_held = now - beaten > 2 * self._period
            if is_held and (place := self._place()):
                places[place] += 1
            late = [self._late.popleft() for _ in range(len(self._late))]
            excused = lateness.excused + self._period / 2  # on average, a hold begins in the middle between two beats
            most = places.most_common(1)
            if is_held and not late:
                if most and now - beaten - excused > self._patience:
                    is_known |= reports.goes_on(most[0][0], now - beaten - excused, now)
                continue
            if most and (is_known or sum(late) - excused > self._slow):
                reports.ended(most[0][0], sum(late) - excused, now, is_known=is_known)
            lateness.excused, is_known = 0.0, False
            places.clear()

    def _place(self) -> Place | None:
        """Return the place at which the loop's thread is; None if it is in no callback."""
        frame = sys._current_frames().get(self._watched.ident or 0)  # noqa: SLF001 - documented, for debuggers
        return find_place([frame for frame in _outward(frame) if frame not in self._outside], self._own)


def find_place(frames: list[FrameType], own: Mapping[CodeType, str]) -> Place | None:
    """Return the innermost stage of a stack, the innermost frame first; or else the innermost line of penstock.

    A stage of an operator is read by its guard.  Outer stages only wait for the inner ones.
    """
    if not frames:
        return None
    for frame in frames:
        guard = guard_in(frame.f_back)
        if guard or frame.f_code in own:
            return Place(guard.name if guard else own[frame.f_code], _lines(frame, frames[0]))
    in_penstock = (frame for frame in frames if frame.f_globals.get("__name__", "").startswith("penstock."))
    return Place(None, _lines(next(in_penstock, frames[0]), frames[0]))


def _lines(frame: FrameType, innermost: FrameType) -> str:
    return _line(frame) if frame is innermost else f"{_line(frame)}, in {_line(innermost)}"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def thread_times(thread: threading.Thread) -> Callable[[], tuple[float, float]]:
    """Return a function that reads the seconds that a thread computed, and those that it waited for a CPU.

    The kernel may not count the latter.
    """
    clock = time.pthread_getcpuclockid(thread.ident or 0)
    counts = Path(f"/proc/self/task/{thread.native_id}/schedstat")

    def read() -> tuple[float, float]:
        waited = 0
        with suppress(OSError):
            waited = int(counts.read_bytes().split()[1])
        return time.clock_gettime(clock), waited / 1e9

    return read


async def name_silent(guards: Collection[Guard], silence: float = SILENCE) -> None:
    """Log each stage, once per response, that gives nothing for ``silence`` seconds though it could; until cancelled.

    A stage is not silent while it waits for its source, or while its reader does not ask for more.
    """
    loop = asyncio.get_running_loop()
    seen: dict[RunningStage, tuple[Any, float]] = {}  # the last frame of each, and the time since which it is the last
    while guards:
        await asyncio.sleep(silence / 6)
        now, earlier, seen = loop.time(), seen, {}
        for guard in guards:
            for stage in tuple(guard.running):
                if not stage.is_busy or stage.is_named:
                    continue
                frame, since = earlier.get(stage, (stage.last_frame, now))
                if frame is not stage.last_frame:
                    since = now
                seen[stage] = stage.last_frame, since
                if now - since >= silence:
                    stage.is_named = True
                    current_response.set(stage.response_id)
                    text = "The stage %r has given nothing for %.0f s, and does not wait for its source: it is at %s"
                    logger.info(text, guard.name, now - since, stage.place)
