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
from penstock.pipeline.field_types import check_fields
from penstock.pipeline.grammar import OneForOne, Order
from penstock.pipeline.lifecycle.rules import InvariantBroken, rule

SHOWN = 4
"""The number of last frames that a fault names."""


@dataclass(frozen=True)
class Guard:
    """Checks the frames of the stage ``name``: that each is ``accepted``, its fields, and their ``order``.

    Raises `StageFault` at the first wrong frame, and for `SystemExit`, which would end the server.
    """

    name: str
    accepted: tuple[type, ...]
    order: Callable[[], Order] | None

    def open(self, stage: Any, source: AsyncGenerator[Any, None]) -> list[AsyncGenerator[Any, None]]:
        """Return the running stage, and the running guard that reads it."""
        order = self.order() if self.order else None
        stream = stage(order.counted(source) if isinstance(order, OneForOne) else source)
        if not isinstance(stream, AsyncGenerator):
            problem = f"it returned {_described(stream)} instead of an async generator"
            return [_failed(self._fault(problem, _place(stage)))]
        return [stream, self._checked(stream, order)]

    async def _checked(self, stream: AsyncGenerator[Any, None], order: Order | None) -> AsyncGenerator[Any, None]:
        last: deque[Any] = deque(maxlen=SHOWN)
        note, accepted, feed = last.append, frozenset(self.accepted), order.feed if order else _unordered
        try:
            async for frame in stream:
                note(frame)
                try:
                    if type(frame) not in accepted:
                        self._check_class(frame)
                    check_fields(frame)
                    feed(frame)
                except InvariantBroken as broken:
                    raise self._fault(str(broken), _place(stream), last) from None
                yield frame
        except (SystemExit, asyncio.CancelledError) as error:
            if name_stage(error) != self.name or _is_cancelled(error):
                raise
            raise self._fault(f"it raised {type(error).__name__}", _place(stream, error), last) from error
        try:
            if order is not None:
                order.finish()
        except InvariantBroken as broken:
            raise self._fault(f"it ended too early: {broken}", _place(stream), last) from None

    def _check_class(self, frame: Any) -> None:
        names = " | ".join(sorted(kind.__name__ for kind in self.accepted))
        is_accepted = isinstance(frame, self.accepted)
        rule(is_accepted, f"it gave {_described(frame)} instead of {names if len(names) < 200 else 'a frame'}")

    def _fault(self, problem: str, place: str, last: Iterable[Any] = ()) -> StageFault:
        frames = ", ".join(map(_described, last)) or "none"
        fault = StageFault(self.name, problem, f"at {place}; its last frames: {frames}")
        note_stage(fault, self.name)
        return fault


async def _failed(fault: StageFault) -> AsyncGenerator[Any, None]:
    raise fault
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
    for field, unit in (("text", "characters"), ("delta", "characters"), ("token_ids", "tokens")):
        if isinstance(value := getattr(frame, field, None), str | tuple | list):
            return f"{name} of {len(value)} {unit}"
    return name
