"""Guards: checks of the frames that an operator's stages give.

Without a guard, a mistake of such a stage would show in a later stage, as a bug of that one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from traceback import walk_tb
from types import FrameType
from typing import Any

from penstock.pipeline.errors import StageError, StageFault
from penstock.pipeline.faults import code_of, name_stage, note_stage
from penstock.pipeline.field_types import WrongType, check_fields, is_large
from penstock.pipeline.foreign_errors import text_of
from penstock.pipeline.frame_order import Order
from penstock.pipeline.junction import Junction
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.logs import counted, current_response

SHOWN_FRAMES = 4
"""The number of last frames that a fault names."""


@dataclass(eq=False)
class RunningStage:
    """A stage that runs under a guard, and the ``last`` frames that it gave."""

    stream: AsyncGenerator[Any, None]
    source: AsyncGenerator[Any, None]
    last: deque[Any]
    response_id: str
    is_named: bool = False
    """True once the log has named it as silent."""

    @property
    def is_busy(self) -> bool:
        """True while the stage is to give a frame, and does not wait for one of its source."""
        return _is_asked(self.stream) and not _is_asked(self.source)

    @property
    def last_frame(self) -> Any:
        """The last frame that the stage gave; None if it gave none."""
        return self.last[-1] if self.last else None


@dataclass(frozen=True)
class StageGuard:
    """Checks the frames of the stage ``name``: that each is ``accepted``, its fields, and their ``order``.

    Raises `StageFault` at the first wrong frame, and for each error that the stage raises and that is no `StageError`.
    """

    name: str
    accepted: Junction
    order: Callable[[], Order] | None
    function: Callable[..., Any] | None = None
    """The operator's function that the stage runs, such as that of an engine; None if the stage is the operator's."""
    running: set[RunningStage] = field(default_factory=set, compare=False, repr=False)
    """The stages that run now, one for each response."""

    @property
    def culprit(self) -> str:
        """The operator's stage, or the engine that a stage runs, as messages name it."""
        return f"engine, in stage {self.name!r}," if self.function else f"stage {self.name!r}"

    def location(self, stream: Any, error: BaseException | None = None) -> str:
        """Return the file and the line of an error of the stage; without one, that at which the stage stands."""
        is_own = self.function is None or code_of(self.function) is getattr(stream, "ag_code", None)
        return _location(stream if is_own else self.function, error)

    def open(self, stage: Any, source: AsyncGenerator[Any, None]) -> list[AsyncGenerator[Any, None]]:
        """Return the running stage, and the running guard that reads it."""
        order = self.order() if self.order else None
        try:
            stream = stage(order.taken_from(source) if order else source)
        except StageError as error:
            return [_failing(error)]
        except Exception as error:  # noqa: BLE001 - `_failing` raises it when the first frame is taken
            return [_failing(self._raised(error, stage), error)]
        if not isinstance(stream, AsyncGenerator):
            problem = f"returned {_described(stream)} instead of an async generator"
            return [_failing(self._fault(problem, self.location(stage)))]
        running = RunningStage(stream, source, deque(maxlen=SHOWN_FRAMES), current_response.get())
        return [stream, self.checked(running, order)]

    async def checked(self, stage: RunningStage, order: Order | None) -> AsyncGenerator[Any, None]:
        """Yield the frames of ``stage`` after their checks."""
        self.running.add(stage)
        stream, last = stage.stream, stage.last
        note, accepted, feed = last.append, self.accepted.frames, order.feed if order else _unordered
        try:
            async for frame in stream:
                note(frame)
                try:
                    if type(frame) not in accepted:
                        self._check_class(frame)
                    if is_large(frame):
                        await asyncio.to_thread(check_fields, frame)
                    else:
                        check_fields(frame)
                    feed(frame)
                except InvariantBroken as broken:
                    raise self._fault(f"broke a rule: {broken}", self.location(stream), last) from None
                except WrongType as wrong:
                    raise self._fault(f"gave a wrong type: {wrong}", self.location(stream), last) from None
                yield frame
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            if isinstance(error, StageError) or _is_cancelled(error) or name_stage(error) != self.name:
                raise
            raise self._raised(error, stream, last) from error
        finally:
            self.running.discard(stage)
        try:
            if order is not None:
                order.finish()
        except InvariantBroken as broken:
            raise self._fault(f"ended too early: {broken}", self.location(stream), last) from None

    def _check_class(self, frame: Any) -> None:
        if not isinstance(frame, tuple(self.accepted.frames)):
            raise WrongType(f"expected {self.accepted.label}, got {_described(frame)}")

    def _raised(self, error: BaseException, stage: Any, last: Iterable[Any] = ()) -> StageFault:
        return self._fault(f"raised {type(error).__name__}", self.location(stage, error), last, text_of(error))

    def _fault(self, problem: str, location: str, last: Iterable[Any] = (), message: str = "") -> StageFault:
        frames = ", ".join(map(_described, last)) or "none"
        details = f"at {location}; its last frames: {frames}"
        fault = StageFault(self.culprit, problem, details, message)
        note_stage(fault, self.name)
        return fault


def guard_in(frame: FrameType | None) -> StageGuard | None:
    """Return the guard that runs in ``frame``; None if another function does."""
    return frame.f_locals["self"] if frame and frame.f_code is StageGuard.checked.__code__ else None


async def _failing(error: Exception, cause: Exception | None = None) -> AsyncGenerator[Any, None]:
    raise error from cause
    yield


def _is_asked(stream: Any) -> bool:
    """Return True while a reader waits for the next frame of a generator."""
    return getattr(stream, "ag_running", False)


def _unordered(_frame: Any) -> None:
    """Take a frame of a junction without an order."""


def _is_cancelled(error: BaseException) -> bool:
    """Return True if ``error`` is the cancellation of the task, not one that the stage brought about itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def _location(stage: Any, error: BaseException | None = None) -> str:
    """Return the file and the line where ``error`` was raised in a stage, where it stands, or else where it begins.

    An error that has no line in the file of the stage may have one in the file that it calls: engines have many files.
    """
    code = getattr(stage, "ag_code", None)
    if code is None:
        code = code_of(stage)
    if code is None:
        return repr(type(stage))
    lines = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__ if error else None)]
    called = [file for file, _ in lines[2:3]]  # after the guard and the stage
    for file in (code.co_filename, *called):
        if raised := [line for each, line in lines if each == file]:
            return f"{file}:{raised[-1]}"
    standing = getattr(stage, "ag_frame", None)
    return f"{code.co_filename}:{standing.f_lineno if standing else code.co_firstlineno}"


def _described(frame: Any) -> str:
    """Return the class of a frame and its size; its text may be private."""
    name = type(frame).__name__
    for attribute, unit in (("text", "character"), ("delta", "character"), ("token_ids", "token")):
        if isinstance(value := getattr(frame, attribute, None), str | tuple | list):
            return f"{name} of {counted(len(value), unit)}"
    return name
