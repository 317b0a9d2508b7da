"""Stages, and the pipelines that they are composed into.

A stage turns an async iterator of frames into an async generator of frames.  A pipeline is an immutable list of steps,
which are stages with names.  Every junction is checked twice: by a type checker, through ``then``, and from the
annotations when the pipeline is built.  Frames only flow inside ``Pipeline.open``, which closes every stage, so a stage
needs no code for a consumer that leaves early.

A stage waits, and its state machine decides: ``machine.feed(frame)`` returns the frames that follow from a frame.  The
machines on the way of every token offer a hot path: ``machine.feed_text(frame)`` returns the single frame that follows
from plain text.  It returns None, without changing anything, if ``feed`` has to read the frame.  A machine that never
changes such a frame offers less: while ``machine.is_plain``, the stage yields the frame itself and gives its text to
``machine.take_text(text)``.  A stage never changes the attributes of its machine.
`penstock.pipeline.hot_path` calls these functions without the stages, where no other stage stands between.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

from penstock.pipeline.faults import name_stage, names_by_code, running
from penstock.pipeline.junction import Junction, inner_junctions, junctions
from penstock.pipeline.stage_guard import StageGuard

In = TypeVar("In")
Out = TypeVar("Out")
First = TypeVar("First")
Next = TypeVar("Next")

Stage: TypeAlias = Callable[[AsyncIterator[In]], AsyncGenerator[Out, None]]
"""The unit of composition: an async generator function over the frames of its source.

A stage without settings is a function.  A stage with settings is a frozen dataclass with ``__call__``; a method or a
``functools.partial`` works, too.  It holds configuration only: state belongs in local variables of the running
generator, which is that of one turn inside ``converse``, and that of one response elsewhere.  It closes what it opened,
but never its source.  A stage that takes a bare type variable, ``Any`` or ``object`` fits anywhere; a stage that takes
and gives the same type variable passes frames through.
A dataclass stage with a `Pipeline` in a field ``inner`` is composite: its inner stages can be edited by name.
"""


async def source_of(frames: Iterable[In]) -> AsyncGenerator[In, None]:
    """Yield ``frames`` as the source of a pipeline or a stage.

    A source is an async generator, and not any async iterator, because the pipeline closes it.

        async with pipeline.open(source_of([request])) as events:
            ...
    """
    for frame in frames:
        yield frame


@dataclass(frozen=True)
class Step:
    """A stage with its name in a pipeline: an element of `Pipeline.steps`.

    The name is unique in the pipeline, composite stages included.  It is the ``anchor`` of an edit, and recordings,
    logs and errors show it.
    """

    name: str
    stage: Stage[Any, Any]
    guard: StageGuard | None = None
    """Checks the frames that the stage gives, if the operator put it in."""

    def open(self, source: AsyncGenerator[Any, None]) -> list[AsyncGenerator[Any, None]]:
        """Return the running stage, followed by its running guard if it has one."""
        return [self.stage(source)] if self.guard is None else self.guard.open(self.stage, source)

    @property
    def inner(self) -> Pipeline[Any, Any] | None:
        """The pipeline inside a composite stage; None for other stages."""
        inner = getattr(self.stage, "inner", None)
        return inner if isinstance(inner, Pipeline) else None

    def with_inner(self, inner: Pipeline[Any, Any]) -> Step:
        """Return this composite step around another pipeline."""
        stage = typing.cast("Any", self.stage)
        return dataclasses.replace(self, stage=dataclasses.replace(stage, inner=inner))

    def names(self) -> Iterator[str]:
        """Return the name of this step and the names of the steps inside it."""
        return (step.name for step in self.every_step())

    def every_step(self) -> Iterator[Step]:
        """Yield this step and the steps inside it."""
        yield self
        if self.inner:
            for step in self.inner.steps:
                yield from step.every_step()

    def accepts(self) -> Junction:
        """The frames this step takes in."""
        return self._junctions[0]

    def emits(self) -> Junction:
        """The frames this step gives out."""
        return self._junctions[1]

    @cached_property
    def _junctions(self) -> tuple[Junction, Junction]:
        """Both sides of the stage; cached, because every edit checks all steps, most of them unchanged."""
        return junctions(self.name, self.stage)

    @property
    def is_open(self) -> bool:
        """True if the stage passes frames of any type through."""
        return self.accepts().is_open and self.emits().is_open

    def check_inner(self) -> None:
        """Raise `JunctionError` unless the inner pipeline matches the annotation of its field."""
        junctions_within = inner_junctions(type(self.stage)) if self.inner else None
        if self.inner and junctions_within:
            given, taken = junctions_within
            self.inner.accepts().check(given, self.name, self.inner.steps[0].name)
            taken.check(self.inner.emits(), self.inner.steps[-1].name, self.name)


_Edit: TypeAlias = Callable[[Step], tuple[Step, ...]]
"""A function from one step to the steps that replace it."""


@dataclass(frozen=True)
class Pipeline(Generic[In, Out]):
    """An ordered, immutable list of named stages, from frames of type ``In`` to frames of type ``Out``.

    Compose one with `start` and `then`, and run it with `open`.  An edit returns a new pipeline and leaves this one as
    it is, so that a plug-in is a function from one pipeline to another:

        def install(pipeline):
            return pipeline.insert_after("parse", "shout", shout)

    Every pipeline is checked when it is made, whichever way: `JunctionError` is raised if a stage gives frames that the
    next one does not take, and `ValueError` if a name repeats or there is no stage.  Methods that take the name of a
    stage raise `LookupError` if the pipeline has none of that name.
    """

    steps: tuple[Step, ...]

    # Composing

    @staticmethod
    def start(name: str, stage: Stage[First, Next]) -> Pipeline[First, Next]:
        """Return a pipeline of one stage, to which `then` adds more."""
        return Pipeline((Step(name, stage),))

    def then(self, name: str, stage: Stage[Out, Next]) -> Pipeline[In, Next]:
        """Return this pipeline with one more stage at its end.

        A type checker follows the frames here: it reports a stage that does not take what this pipeline gives.  The
        methods that edit a pipeline name a stage by a text, which a type checker cannot follow; they are checked when
        they run.
        """
        return Pipeline((*self.steps, Step(name, stage)))

    # Editing: each method returns a new, checked pipeline, and finds stages inside composite stages, too.  A cut
    # inside a composite stage drops the composite: the inner stages that are left join the pipeline and run once.

    def insert_before(self, anchor: str, name: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Insert a stage before ``anchor``: it sees the frames that ``anchor`` would take."""
        return self._edited(anchor, lambda step: (Step(name, stage), step))

    def insert_after(self, anchor: str, name: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Insert a stage after ``anchor``: it sees the frames that ``anchor`` gives."""
        return self._edited(anchor, lambda step: (step, Step(name, stage)))

    def replace(self, anchor: str, stage: Stage[Any, Any], *, first: str | None = None) -> Pipeline[In, Out]:
        """Replace the stage ``anchor``, or all from ``first`` to it; the new stage takes the name of ``anchor``.

        To wrap a stage, give one that holds the old one, which `stage` returns.  Raises `LookupError` if ``first`` is
        not in the same pipeline as ``anchor``, or comes after it.
        """
        names = _neighbours(self.steps, first, anchor) if first else (anchor,)
        return self._edited(anchor, lambda step: (Step(step.name, stage),), names[:-1])

    def remove(self, anchor: str) -> Pipeline[In, Out]:
        """Remove the stage ``anchor``; its neighbours must fit each other."""
        return self._edited(anchor, lambda step: ())

    def from_stage(self, anchor: str) -> Pipeline[Any, Out]:
        """Return the stages from ``anchor`` on, ``anchor`` included: a replay begins there."""
        at, step = self._holding(anchor)
        head = (step,) if step.name == anchor else self.inner(step.name).from_stage(anchor).steps
        return Pipeline((*head, *self.steps[at + 1 :]))

    def through(self, anchor: str) -> Pipeline[In, Any]:
        """Return the stages up to ``anchor``, included: a request can be rendered without an answer."""
        at, step = self._holding(anchor)
        tail = (step,) if step.name == anchor else self.inner(step.name).through(anchor).steps
        return Pipeline((*self.steps[:at], *tail))

    def following(self, anchor: str) -> Pipeline[Any, Out]:
        """Return the stages after ``anchor``; raise `ValueError` if it is the last."""
        return Pipeline(self.from_stage(anchor).steps[1:])

    def stage(self, anchor: str) -> Any:
        """Return the stage ``anchor``, for example to replace it with a stage that wraps it."""
        return self.from_stage(anchor).steps[0].stage

    def inner(self, anchor: str) -> Pipeline[Any, Any]:
        """Return the pipeline inside the composite stage ``anchor``; raise `LookupError` if it is not composite."""
        step = self._holding(anchor)[1]
        inner = step.inner
        if step.name != anchor and inner is not None:
            return inner.inner(anchor)
        if inner is None:
            raise LookupError(f"stage {anchor!r} holds no inner pipeline")
        return inner

    # Running

    def open(self, source: AsyncGenerator[In, None]) -> AbstractAsyncContextManager[AsyncIterator[Out]]:
        """Run ``source`` through the stages for the duration of the block, which reads the frames of the last stage.

            async with pipeline.open(source_of([request])) as events:
                async for event in events:
                    ...

        Nothing runs ahead: a stage reads its source only when the next one asks it for a frame.  However the block ends
        (exhaustion, break, error, cancellation), every stage is closed, downstream first, and then the source.  The
        error of a stage is raised in the block, with a note that names the stage.
        """
        if not isinstance(source, AsyncGenerator):
            given = type(source).__name__
            raise TypeError(f"a source is an async generator, such as source_of([frame]), not a {given}")
        return _Open(self.steps, source, self._names)

    @cached_property
    def _names(self) -> dict[int, str]:
        """The names of its stages by their code, as far as it has run (see `names_by_code`)."""
        return {}

    # Inspecting

    def names(self) -> list[str]:
        """The names of all stages, inner ones included."""
        return [step.name for step in self.every_step()]

    def every_step(self) -> Iterator[Step]:
        """Yield all steps, inner ones included."""
        for step in self.steps:
            yield from step.every_step()

    def accepts(self) -> Junction:
        """The frames that the pipeline takes: the input of its first stage that is not a pass-through."""
        return next((step.accepts() for step in self.steps if not step.is_open), self.steps[0].accepts())

    def emits(self) -> Junction:
        """The frames that the pipeline gives: the output of its last stage that is not a pass-through."""
        return next((step.emits() for step in reversed(self.steps) if not step.is_open), self.steps[-1].emits())

    def __str__(self) -> str:
        """Draw one line per stage: its name, and the frames that it takes and gives."""
        return self.drawn({})

    def drawn(self, notes: Mapping[str, str]) -> str:
        """Draw one line per stage as ``str`` does, with its note if there is one; ``notes`` has the names as keys."""
        lines = list(_drawn(self, "", notes))
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}} : {frames}" for name, frames in lines)

    # Checking

    def __post_init__(self) -> None:
        if not self.steps:
            raise ValueError("a pipeline has at least one stage")
        names = self.names()
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"stage names repeat: {', '.join(repeated)}")
        arriving, upstream = self.steps[0].accepts(), "the source"
        for step in self.steps:
            step.accepts().check(arriving, upstream, step.name)
            step.check_inner()
            arriving = arriving if step.emits().is_open else step.emits()
            upstream = step.name

    def _edited(self, anchor: str, edit: _Edit, dropped: Collection[str] = ()) -> Pipeline[In, Out]:
        """Replace the step ``anchor``, at any depth, with the steps that ``edit`` returns; leave out ``dropped``."""
        self._holding(anchor)
        return Pipeline(_edited(self.steps, anchor, edit, dropped))

    def _holding(self, anchor: str) -> tuple[int, Step]:
        """The position and the step of ``anchor``, or of the composite step around it."""
        for position, step in enumerate(self.steps):
            if anchor in step.names():
                return position, step
        raise LookupError(f"no stage named {anchor!r}; there are {', '.join(self.names())}")


class _Open:
    """The block in which a pipeline is open: a class, as the frame of a generator would take more memory."""

    __slots__ = ("_around", "_by_frame", "_names", "_steps", "_streams")

    def __init__(self, steps: tuple[Step, ...], source: AsyncGenerator[Any, None], names: dict[int, str]) -> None:
        self._steps = steps
        self._streams = [source]
        self._names = names
        self._by_frame: dict[int, str] | None = None

    async def __aenter__(self) -> AsyncIterator[Any]:
        around, streams, names, by_frame = running.get(), self._streams, self._names, dict[int, str]()
        self._around = around
        try:
            for step in self._steps:
                stream, *guarding = step.open(streams[-1])
                streams += (stream, *guarding)
                if not names_by_code(stream, step.name, names, around):
                    by_frame[id(getattr(stream, "ag_frame", None))] = step.name
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        if by_frame:
            self._by_frame, around = by_frame, (by_frame, *around)
        running.set((names, *around))
        return streams[-1]

    async def __aexit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        try:
            await _close(self._streams)
            if isinstance(error, Exception):
                name_stage(error)
        except Exception as raised:  # by the end of a stage
            name_stage(raised)
            raise
        finally:
            if self._by_frame:  # a task begun in the block may keep its context, and later frames have the same ids
                self._by_frame.clear()
            running.set(self._around)


async def _close(streams: list[AsyncGenerator[Any, None]]) -> None:
    """Close all streams, the last one first, even if closing one of them raises."""
    try:
        while streams:
            await streams.pop().aclose()
    finally:
        if streams:
            await _close(streams)


def _neighbours(steps: tuple[Step, ...], first: str, last: str) -> list[str]:
    """The names of the stages from ``first`` to ``last``, which stand in one pipeline, in this order."""
    for step in steps:
        if step.inner and first in step.inner.names():
            return _neighbours(step.inner.steps, first, last)
    names = [step.name for step in steps]
    between = names[names.index(first) : names.index(last) + 1] if {first, last} <= {*names} else []
    if not between:
        raise LookupError(f"no stage named {last!r} comes with or after {first!r} in its pipeline")
    return between


def _edited(steps: tuple[Step, ...], anchor: str, edit: _Edit, dropped: Collection[str]) -> tuple[Step, ...]:
    edited: list[Step] = []
    for step in steps:
        if step.name == anchor:
            edited += edit(step)
        elif step.inner and anchor in step.names():
            edited.append(step.with_inner(Pipeline(_edited(step.inner.steps, anchor, edit, dropped))))
        elif step.name not in dropped:
            edited.append(step)
    return tuple(edited)


def _drawn(pipeline: Pipeline[Any, Any], indent: str, notes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    taken = pipeline.accepts().label
    for step in pipeline.steps:
        given = taken if step.emits().is_open else step.emits().label
        note = f"  ({notes[step.name]})" if step.name in notes else ""
        yield f"{indent}{step.name}", f"{taken} -> {given}{note}"
        if step.inner:
            yield from _drawn(step.inner, f"{indent}  ", notes)
        taken = given
