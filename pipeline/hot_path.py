"""The hot path of a response: plain text goes from the engine to the client without waking the task of the response.

A task that wakes up for each token costs more than all that is done with it: the loop calls it, and each stage on the
way is a generator to resume.  Nearly every token is plain text, and for that each state machine has a function (see
`penstock.pipeline.core`).  So while the task waits for its engine, and only stages of penstock's own stand between it
and the client, the engine calls these functions one after another, in the order of its step.  All other frames wake the
task, as do tokens that come while it does something else.  The machines are the same, and so are the bytes.

Each stage on the way joins with its machine when it begins:

    join(log=run)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from penstock.pipeline.frames import ItemDelta, TokenChunk, TokenFrame
from penstock.pipeline.protocol.events import ResponseEvent

if TYPE_CHECKING:
    from penstock.pipeline.core import Pipeline, Step

Kind = TypeVar("Kind", bound=type[Any])

_begins: dict[type[Any], bool] = {}
"""The stages that join: True for the one that reads the engine, before which any stage may stand."""


class Turn(Protocol):
    """The turn of the model."""

    is_plain: bool
    """True while deltas may be passed on as they are."""
    take_text: Callable[[str], object]


class Writer(Protocol):
    """The writer of events."""

    feed_text: Callable[[ItemDelta], ResponseEvent | None]


class Log(Protocol):
    """The log of the events."""

    ended: bool

    def append(self, event: Any) -> bool:
        """Append the next event."""
        ...


class Outlet(Protocol):
    """The connection to the client."""

    @property
    def is_ready(self) -> bool:
        """True if all that was written before is on its way, and more may be written."""
        ...

    def put(self, event: Any) -> None:
        """Write an event without waiting."""
        ...


class HotPath:
    """The hot path of one response: what its stages have joined."""

    __slots__ = ("_is_whole", "has_begun", "log", "outlet", "read", "rewrite", "turn", "upto", "writer")

    read: Callable[[TokenFrame], ItemDelta | None]
    turn: Turn
    writer: Writer
    log: Log
    rewrite: Callable[[ResponseEvent], Iterable[Any]]
    """Return the events of the client's dialect for one of the response."""
    outlet: Outlet

    def __init__(self) -> None:
        self.has_begun = False
        """True once the client has had its first delta, whose time is measured."""
        self.upto = -1
        """The sequence number of the latest event that went over it, also once it has ended."""
        self._is_whole = False

    def take(self, chunk: TokenChunk) -> bool:
        """Pass a chunk on to the client; return False, with nothing done, if the task has to read it.

        Call it only while the task waits for the engine and has read all tokens before these.
        """
        if not (self._is_whole or self._has_become_whole()):
            return False
        turn, log, outlet = self.turn, self.log, self.outlet
        if not turn.is_plain or log.ended or not outlet.is_ready:
            return False
        delta = self.read(chunk)
        if delta is None:
            return False
        turn.take_text(delta.text)
        event = self.writer.feed_text(delta)
        if event is not None and log.append(event):
            self.upto = event.sequence_number
            for written in self.rewrite(event):
                outlet.put(written)
        return True

    def clear(self) -> None:
        """Forget what has joined: from now on the path takes nothing."""
        self.has_begun = self._is_whole = False
        for joined in _JOINED:
            if hasattr(self, joined):
                delattr(self, joined)

    def _has_become_whole(self) -> bool:
        self._is_whole = self.has_begun and all(hasattr(self, joined) for joined in _JOINED)
        return self._is_whole


_JOINED = ("outlet", "turn", "writer", "log", "rewrite", "read")


_current: ContextVar[HotPath | None] = ContextVar("hot_path", default=None)


def current() -> HotPath | None:
    """Return the path of the response that runs; None if it has none."""
    return _current.get()


def join(**machines: Any) -> None:
    """Join the path of the response that runs, if it has one, under the name that its machine has in `HotPath`."""
    path = _current.get()
    if path is not None:
        for name, machine in machines.items():
            setattr(path, name, machine)


def on_the_way(stage: Kind) -> Kind:
    """Mark a class of stages that joins the path of its response, if that has one."""
    _begins[stage] = False
    return stage


def at_the_engine(stage: Kind) -> Kind:
    """Mark the class of the stage that reads the engine."""
    _begins[stage] = True
    return stage


def begin(pipeline: Pipeline[Any, Any], *, is_read: bool = True) -> HotPath | None:
    """Give the response that the pipeline is going to run a path, if all stages behind its engine join.

    Without ``is_read``, its task writes to no client: the path ends at the log, which others read.
    """
    path = HotPath() if _all_join(pipeline) else None
    _current.set(path)
    if path and not is_read:
        path.outlet, path.rewrite, path.has_begun = _NOBODY, _as_it_is, True
    return path


def lead_through(outgoing: Pipeline[ResponseEvent, Any] | None) -> None:
    """Lead the path of the response through the stage that rewrites its events for the client; None rewrites nothing.

    There is no path through stages that do not join, or several.
    """
    if outgoing is None:
        join(rewrite=_as_it_is)
    elif not (len(outgoing.steps) == 1 and _joins(outgoing.steps[0])):
        end(current())


class _Nobody:
    """The outlet of a path that ends at the log."""

    is_ready = True

    def put(self, event: Any) -> None:
        """Write nothing."""


_NOBODY = _Nobody()


def _as_it_is(event: ResponseEvent) -> tuple[ResponseEvent]:
    return (event,)


def end(path: HotPath | None) -> None:
    """Take the path from the response.

    A task begun meanwhile may keep its context, but should not keep what has joined.
    """
    _current.set(None)
    if path is not None:
        path.clear()


def _joins(step: Step) -> bool:
    return type(step.stage) in _begins and step.guard is None


def _all_join(pipeline: Pipeline[Any, Any]) -> bool:
    for step in reversed(pipeline.steps):
        if not _joins(step):
            return False
        if _begins[type(step.stage)]:
            return True
        if step.inner is not None:
            return _all_join(step.inner)
    return False
