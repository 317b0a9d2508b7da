"""Guards: checks of the frames that an operator's stages give.

Without a guard, a mistake of such a stage would show in a later stage, as a bug of that one.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from traceback import walk_tb
from typing import Any

from penstock.pipeline.errors import StageFault
from penstock.pipeline.faults import name_stage, note_stage
from penstock.pipeline.field_types import WrongType, check_fields
from penstock.pipeline.grammar import Order
from penstock.pipeline.junction import Junction
from penstock.pipeline.lifecycle.rules import InvariantBroken

SHOWN = 4
"""The number of last frames that a fault names."""


@dataclass(frozen=True)
class Guard:
    """Checks the frames of the stage ``name``: that each is ``accepted``, its fields, and their ``order``.

    Raises `StageFault` at the first wrong frame, and for `SystemExit`, which would end the server.
    """

    name: str
    accepted: Junction
    order: Callable[[], Order] | None

    def open(self, stage: Any, source: AsyncGenerator[Any, None]) -> list[AsyncGenerator[Any, None]]:
        """Return the running stage, and the running guard that reads it."""
        order = self.order() if self.order else None
        try:
            stream = stage(order.taken_from(source) if order else source)
        except Exception as error:  # noqa: BLE001 - `_failing` raises it when the first frame is taken
            return [_failing(error)]
        if not isinstance(stream, AsyncGenerator):
            problem = f"returned {_described(stream)} instead of an async generator"
            return [_failing(self._fault(problem, _place(stage)))]
        return [stream, self._checked(stream, order)]

    async def _checked(self, stream: AsyncGenerator[Any, None], order: Order | None) -> AsyncGenerator[Any, None]:
        last: deque[Any] = deque(maxlen=SHOWN)
        note, accepted, feed = last.append, self.accepted.frames, order.feed if order else _unordered
        try:
            async for frame in stream:
                note(frame)
                try:
                    if type(frame) not in accepted:
                        self._check_class(frame)
                    check_fields(frame)
                    feed(frame)
                except InvariantBroken as broken:
                    raise self._fault(f"broke a rule: {broken}", _place(stream), last) from None
                except WrongType as wrong:
                    raise self._fault(f"gave a wrong type: {wrong}", _place(stream), last) from None
                yield frame
        except (SystemExit, asyncio.CancelledError) as error:
            if _is_cancelled(error) or name_stage(error) != self.name:
                raise
            raise self._fault(f"raised {type(error).__name__}", _place(stream, error), last) from error
        try:
            if order is not None:
                order.finish()
        except InvariantBroken as broken:
            raise self._fault(f"ended too early: {broken}", _place(stream), last) from None

    def _check_class(self, frame: Any) -> None:
        if not isinstance(frame, tuple(self.accepted.frames)):
            raise WrongType(f"expected {self.accepted.label}, got {_described(frame)}")

    def _fault(self, problem: str, place: str, last: Iterable[Any] = ()) -> StageFault:
        frames = ", ".join(map(_described, last)) or "none"
        fault = StageFault(self.name, problem, f"at {place}; its last frames: {frames}")
        note_stage(fault, self.name)
        return fault


async def _failing(error: Exception) -> AsyncGenerator[Any, None]:
    raise error
    yield


def _unordered(_frame: Any) -> None:
    """Take a frame of a junction without an order."""


def _is_cancelled(error: BaseException) -> bool:
    """Return True if ``error`` is the cancellation of the task, not one that the stage brought about itself."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling() > 0)


def _place(stage: Any, error: BaseException | None = None) -> str:
    """Return the file and the line where ``error`` was raised in a stage, where it stands, or else where it begins."""
    code = getattr(stage, "ag_code", None)
    if code is None:
        function = inspect.unwrap(stage if inspect.isroutine(stage) else type(stage).__call__)
        code = getattr(function, "__code__", None)
    if code is None:
        return repr(type(stage))
    raised = [line for frame, line in walk_tb(error.__traceback__ if error else None) if frame.f_code is code]
    standing = getattr(stage, "ag_frame", None)
    line = raised[-1] if raised else standing.f_lineno if standing else code.co_firstlineno
    return f"{code.co_filename}:{line}"


def _described(frame: Any) -> str:
    """Return the class of a frame and its size; its text may be private."""
    name = type(frame).__name__
    for field, unit in (("text", "character"), ("delta", "character"), ("token_ids", "token")):
        if isinstance(value := getattr(frame, field, None), str | tuple | list):
            return f"{name} of {len(value)} {unit}{'' if len(value) == 1 else 's'}"
    return name
