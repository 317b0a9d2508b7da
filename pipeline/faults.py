"""Which stage a fault comes from.

It is told by the traceback, once there is one: naming stages costs nothing as long as nothing is wrong.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextvars import ContextVar
from traceback import walk_tb
from typing import Any, TypeVar

from penstock.pipeline.lifecycle.rules import InvariantBroken

Frame = TypeVar("Frame")

running: ContextVar[tuple[dict[Any, str], ...]] = ContextVar("running", default=())
"""The names of the stages that run, by their places in a traceback: one dict for each pipeline that is open."""

_IN = "in stage "


def place_of(stream: Any, *known: dict[Any, str]) -> Any:
    """What tells a stage's generator in a traceback: its code, or its frame where that is the code of a ``known`` one.

    A frame that is looked at takes memory as long as it runs, as much as the generator itself.
    """
    code = getattr(stream, "ag_code", None)
    return getattr(stream, "ag_frame", None) if any(code in names for names in known) else code


def name_stage(error: BaseException) -> str:
    """The stage in which an error was raised, as far as it is known; a note on the error names it from then on."""
    noted: list[str] = [note.removeprefix(_IN) for note in getattr(error, "__notes__", ()) if note.startswith(_IN)]
    if noted:
        return noted[0]
    names = {place: name for pipeline in running.get() for place, name in pipeline.items()}
    places = (frame if frame in names else frame.f_code for frame, _ in walk_tb(error.__traceback__))
    raised_in = [names[place] for place in places if place in names]
    if not raised_in:
        return "an unknown stage"
    error.add_note(f"{_IN}{raised_in[-1]}")
    return raised_in[-1]


async def first(frames: AsyncIterator[Frame]) -> Frame:
    """The first of some frames; raises `InvariantBroken` where a stage has lost it."""
    try:
        return await anext(frames)
    except StopAsyncIteration:
        raise InvariantBroken("a stream has a first frame: a stage has lost it") from None
