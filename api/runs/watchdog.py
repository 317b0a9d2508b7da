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
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple, Self

from penstock.pipeline.core import Pipeline
from penstock.pipeline.faults import code_of
from penstock.pipeline.logs import counted, current_response
from penstock.pipeline.stage_guard import RunningStage, StageGuard, guard_in

logger = logging.getLogger(__name__)

LOOKS = 3
"""Looks at the loop's thread in the time for which code may hold it."""

PERIOD = 0.01
"""Fewest seconds between two looks."""

PATIENCE = 5.0
"""Seconds after which a stall that goes on is logged."""

QUIET = 60.0
"""Seconds between two lines about the same stage."""

SILENCE = 60.0
"""Seconds after which a stage that gives nothing is named."""


@contextmanager
def watching(
    pipeline: Pipeline[Any, Any],
    slow: float,
    silence: float = SILENCE,
    level: int = logging.INFO,
    *,
    only_inserted: bool = False,
) -> Iterator[None]:
    """Watch the event loop and the operator's stages of a pipeline for the length of a block.

    The loop is not watched if ``slow``, the seconds for which code may hold it, is 0.  A stage that gives nothing for
    ``silence`` seconds is logged at ``level``.  With ``only_inserted``, no code but that of the operator's stages is
    named.
    """
    steps = list(pipeline.every_step())
    own = {code: step.name for step in steps if step.guard is None and (code := code_of(step.stage))}
    naming = asyncio.create_task(name_silent([step.guard for step in steps if step.guard], silence, level))
    try:
        with Watchdog(slow, None if only_inserted else own) if slow else nullcontext():
            yield
    finally:
        naming.cancel()


class CodeLine(NamedTuple):
    """The code that held the loop: the stage or the engine that it belongs to, if there is one, and its line."""

    culprit: str | None
    line: str

    @property
    def key(self) -> str:
        """The culprit, or else the line: its stalls are logged together."""
        return self.culprit or self.line

    def __str__(self) -> str:
        return f"by the {self.culprit.removesuffix(',')}, at {self.line}" if self.culprit else f"at {self.line}"


def preempted(interval: float, period: float, computed: float) -> float:
    """Return the seconds of an interval between two looks in which the process was stopped, or got no CPU.

    After an interval that is longer than the ``period`` of the looks, the looking thread itself got no CPU, or not the
    interpreter, which the loop's thread had for the seconds that it ``computed``.
    """
    return max(0.0, interval - computed) if interval >= 2 * period else 0.0


@dataclass
class Stall:
    """A callback that has not ended yet, ``since`` a time: the lines at which it was seen."""

    since: float
    asked: float
    """The time from which on the loop can answer."""
    preempted: float
    lines: Counter[CodeLine] = field(default_factory=Counter)
    is_known: bool = False
    """True once the log has a line about it."""

    @property
    def line(self) -> CodeLine:
        """The line at which it was seen most often."""
        return self.lines.most_common(1)[0][0]

    def seconds(self, now: float) -> float:
        """Return the seconds until ``now``."""
        return now - self.since - self.preempted


class Reports:
    """The lines of the log: the first at once, and then one per `QUIET` seconds for each stage."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._unlogged: Counter[str] = Counter()

    def ended(self, stall: Stall, seconds: float, now: float) -> None:
        """Log a stall that has ended; always if there is a line about its beginning."""
        line = stall.line
        if not stall.is_known and not self._is_due(line, now):
            self._unlogged[line.key] += 1
            return
        others = self._unlogged.pop(line.key, 0)
        more = f"; {counted(others, 'more hold')} since the line before" if others else ""
        logger.warning("The event loop was held for %.2f s %s%s", seconds, line, more)

    def goes_on(self, stall: Stall, now: float) -> None:
        """Log a stall that has not ended."""
        if self._is_due(stall.line, now):
            stall.is_known = True
            text = "The event loop has been held for %.0f s, and still is, %s"
            logger.warning(text, stall.seconds(now), stall.line)

    def _is_due(self, line: CodeLine, now: float) -> bool:
        if now - self._logged.get(line.key, -QUIET) < QUIET:
            return False
        self._logged[line.key] = now
        return True


class Watchdog:
    """Logs the code that holds the event loop for more than ``slow`` seconds, while it is entered.

    A thread looks at the loop's thread once in a period.  If that is in a callback, the loop gets another callback to
    answer: until the answer, the loop is held.  An idle loop has nothing to do.

    ``own`` has the names of the server's stages by their code; those of an operator have guards.
    If it is None, only these are looked for.
    """

    def __init__(self, slow: float, own: Mapping[CodeType, str] | None, patience: float = PATIENCE) -> None:
        self._slow = slow
        self._own = own
        self._patience = patience
        self._period = max(slow / LOOKS, PERIOD)
        self._answered = 0.0
        self._outside: Collection[FrameType] = ()  # the frames of the loop itself and of its callers
        self._running = threading.Lock()  # released by the end of the block; cheaper to wait for than an event
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        self._loop, self._watched = asyncio.get_running_loop(), threading.current_thread()
        self._running.acquire()
        self._beginning = self._loop.call_soon(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        self._running.release()
        self._beginning.cancel()
        if self._thread.ident is not None:  # a short block ends before the loop has called `_begin`
            self._thread.join()
        self._outside = ()

    # On the loop

    def _begin(self) -> None:
        self._outside = frozenset(_outward(inspect.currentframe()))
        self._thread.start()

    def _answer(self) -> None:
        self._answered = time.monotonic()

    # In the thread

    def _watch(self) -> None:
        reports, period = Reports(), self._period
        cpu_clock = time.pthread_getcpuclockid(self._watched.ident or 0)
        now, computed = time.monotonic(), time.clock_gettime(cpu_clock)
        stall: Stall | None = None
        while not self._running.acquire(timeout=period):
            before, computed_before = now, computed
            now, computed = time.monotonic(), time.clock_gettime(cpu_clock)
            lost = preempted(now - before, period, computed - computed_before)
            if stall:
                stall.preempted += lost
                if self._answered >= stall.asked:
                    if (seconds := stall.seconds(self._answered)) > self._slow or stall.is_known:
                        reports.ended(stall, seconds, now)
                    stall = None
            if line := self._line():
                if stall is None:
                    stall = Stall(before + period / 2, time.monotonic(), lost)  # on average, it began in the middle
                    self._loop.call_soon_threadsafe(self._answer)
                stall.lines[line] += 1
            if stall and stall.seconds(now) > self._patience:
                reports.goes_on(stall, now)
        if stall and stall.lines.total() > 1 and (seconds := stall.seconds(time.monotonic())) > self._slow:
            reports.ended(stall, seconds, now)

    def _line(self) -> CodeLine | None:
        """Return the line at which the loop's thread is; None if it is in no callback."""
        frame = sys._current_frames().get(self._watched.ident or 0)  # noqa: SLF001 - documented, for debuggers
        if frame is None or frame in self._outside:
            return None
        line = find_line([frame for frame in _outward(frame) if frame not in self._outside], self._own or {})
        return None if self._own is None and line.culprit is None else line


def find_line(frames: list[FrameType], own: Mapping[CodeType, str]) -> CodeLine:
    """Return the innermost stage of a stack, the innermost frame first; or else the innermost line of penstock.

    A stage of an operator is read by its guard.  Outer stages only wait for the inner ones.
    """
    for frame in frames:
        guard = guard_in(frame.f_back)
        if guard:
            return CodeLine(guard.culprit, _lines(_of_function(guard, frames) or frame, frames[0]))
        if frame.f_code in own:
            return CodeLine(f"stage {own[frame.f_code]!r}", _lines(frame, frames[0]))
    in_penstock = (frame for frame in frames if str(frame.f_globals.get("__name__")).startswith("penstock."))
    return CodeLine(None, _lines(next(in_penstock, frames[0]), frames[0]))


def _of_function(guard: StageGuard, frames: list[FrameType]) -> FrameType | None:
    """Return the innermost frame in the file of the function that a stage runs; None if there is none."""
    code = code_of(guard.function) if guard.function else None
    return next((frame for frame in frames if code and frame.f_code.co_filename == code.co_filename), None)


def _lines(frame: FrameType, innermost: FrameType) -> str:
    return _line(frame) if frame is innermost else f"{_line(frame)}, in {_line(innermost)}"


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


async def name_silent(guards: Collection[StageGuard], silence: float = SILENCE, level: int = logging.INFO) -> None:
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
                    text = "The %s has given nothing for %.0f s, and does not wait for its source: it is at %s"
                    logger.log(level, text, guard.culprit, now - since, guard.location(stage.stream))
