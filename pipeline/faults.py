"""Find the stage that an error comes from.

The stage is read from the traceback after the error, so that nothing has to wrap the stages while they run.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from logging import Logger
from traceback import walk_tb
from types import CodeType
from typing import Any, TypeVar

from penstock.pipeline import metrics
from penstock.pipeline.errors import StageError, StageFault
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.lifecycle.rules import InvariantBroken

Frame = TypeVar("Frame")

running: ContextVar[tuple[dict[int, str], ...]] = ContextVar("running", default=())
"""The names of the running stages, the innermost pipeline first: by the id of the code of their generators, or frame.

Those by code belong to the pipeline: all that run it share them.
"""

_IN = "in stage "

UNKNOWN = "an unknown stage"


def names_by_code(stream: Any, name: str, names: dict[int, str], around: Iterable[dict[int, str]]) -> bool:
    """Note the name of a stage in ``names``, by the id of the code of its generator, as the hash of code takes long.

    Return False if another stage runs the same code: in a traceback, only the frame then tells them apart.  Code is
    preferred because reading ``ag_frame`` creates a frame object, which takes as much memory as the generator and lives
    as long.
    """
    code = id(getattr(stream, "ag_code", None))
    return names.setdefault(code, name) == name and not any(code in others for others in around)


def code_of(stage: Any) -> CodeType | None:
    """Return the code of a stage, which need not run; None if it is no Python function."""
    while isinstance(stage, functools.partial):
        stage = stage.func
    function = inspect.unwrap(stage if inspect.isroutine(stage) else type(stage).__call__)
    return getattr(function, "__code__", None)


def name_stage(error: BaseException) -> str:
    """Return the name of the stage that raised ``error``, and note it on the error.

    If the error has such a note already, its name is returned.  The result is ``an unknown stage`` if the traceback
    has no running stage.
    """
    noted: list[str] = [note.removeprefix(_IN) for note in getattr(error, "__notes__", ()) if note.startswith(_IN)]
    if noted:
        return noted[0]
    names = {identity: name for pipeline in running.get() for identity, name in pipeline.items()}
    identities = (id(frame) if id(frame) in names else id(frame.f_code) for frame, _ in walk_tb(error.__traceback__))
    raised_in = [names[identity] for identity in identities if identity in names]
    if not raised_in:
        return UNKNOWN
    note_stage(error, raised_in[-1])
    return raised_in[-1]


def note_stage(error: BaseException, stage: str) -> None:
    """Note on ``error`` that it comes from ``stage``."""
    error.add_note(f"{_IN}{stage}")


def log_failure(logger: Logger, response_id: str, error: Exception) -> None:
    """Log and count the error that ends a response, with the stage that it comes from."""
    stage = name_stage(error)
    metrics.STAGE_ERRORS.labels(stage).inc()
    code = error.code if isinstance(error, StageError) else "server_error"
    about = {"response_id": response_id, "stage": stage, "code": code}
    match error:
        case StageFault():
            logger.error(
                "Response %s failed: %s", response_id, named_error(error), exc_info=error.__cause__, extra=about
            )
        case StageError():
            text = "Response %s failed in %s: %s"
            logger.warning(text, response_id, stage, named_error(error), exc_info=error.__cause__, extra=about)
        case _:
            logger.error("Response %s met a bug in %s", response_id, stage, exc_info=error, extra=about)


async def first(frames: AsyncIterator[Frame]) -> Frame:
    """Return the first frame; raise `InvariantBroken` if there is none, because a stage has lost it."""
    try:
        return await anext(frames)
    except StopAsyncIteration:
        raise InvariantBroken("a stream has a first frame: a stage has lost it") from None
