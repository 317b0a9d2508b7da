"""Stages, and the pipelines that they are composed into.

A stage turns an async iterator of frames into an async generator of frames.  A pipeline is an immutable list of named
stages.  Every junction is checked twice: by a type checker, through ``then``, and from the annotations when the
pipeline is built.  Frames only flow inside ``Pipeline.open``, which closes every stage, so a stage needs no code for a
consumer that leaves early.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeAlias, TypeVar

from penstock.pipeline.faults import name_stage, place_of, running
from penstock.pipeline.junction import Junction, inner_junctions, junctions

In = TypeVar("In")
Out = TypeVar("Out")
First = TypeVar("First")
Next = TypeVar("Next")

Stage: TypeAlias = Callable[[AsyncIterator[In]], AsyncGenerator[Out, None]]
"""The unit of composition: an async generator function over the frames of its source.

A stage without settings is a function.  A stage with settings is a frozen dataclass with ``__call__``; a method or a
``functools.partial`` works, too.  It holds configuration only: the state of a response belongs in local variables of
the running generator.  It closes what it opened, but never its source.  A stage that takes a bare type variable,
``Any`` or ``object`` fits anywhere; a stage that takes and gives the same type variable passes frames through.
A dataclass stage with a `Pipeline` in a field ``inner`` is composite: its inner stages can be edited by name.
"""


@dataclass(frozen=True)
class Step:
    """A stage and its name in the pipeline."""

    name: str
    stage: Stage[Any, Any]

    @property
    def inner(self) -> Pipeline[Any, Any] | None:
        """The pipeline inside a composite stage; None for other stages."""
        inner = getattr(self.stage, "inner", None)
        return inner if isinstance(inner, Pipeline) else None

    def with_inner(self, inner: Pipeline[Any, Any]) -> Step:
        """Return this composite step around another pipeline."""
        stage = typing.cast("Any", self.stage)
        return Step(self.name, dataclasses.replace(stage, inner=inner))

    def names(self) -> Iterator[str]:
        """Yield the name of this step and the names of the steps inside it."""
        yield self.name
        if self.inner:
            for step in self.inner.steps:
                yield from step.names()

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


Edit: TypeAlias = Callable[[Step], tuple[Step, ...]]
"""A function from one step to the steps that replace it."""


@dataclass(frozen=True)
class Pipeline(Generic[In, Out]):
    """An ordered, immutable list of named stages, from frames of type ``In`` to frames of type ``Out``.

    Raises `JunctionError` if two neighbours do not fit, and `ValueError` if a name repeats or there is no stage.
    """

    steps: tuple[Step, ...]

    # Composing

    @staticmethod
    def start(name: str, stage: Stage[First, Next]) -> Pipeline[First, Next]:
        """Return a pipeline of one stage."""
        return Pipeline((Step(name, stage),))

    def then(self, name: str, stage: Stage[Out, Next]) -> Pipeline[In, Next]:
        """Return this pipeline with one more stage at its end; only here can a type checker follow the frames."""
        return Pipeline((*self.steps, Step(name, stage)))

    # Editing: each method returns a new, checked pipeline, and finds stages inside composite stages, too.  A cut
    # inside a composite stage drops the composite: the inner stages that are left join the pipeline and run once.

    def before(self, anchor: str, name: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Insert a stage before ``anchor``."""
        return self.edited(anchor, lambda step: (Step(name, stage), step))

    def after(self, anchor: str, name: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Insert a stage after ``anchor``."""
        return self.edited(anchor, lambda step: (step, Step(name, stage)))

    def replace(self, anchor: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Replace the stage ``anchor``; the new stage takes its name."""
        return self.edited(anchor, lambda step: (Step(step.name, stage),))

    def without(self, anchor: str) -> Pipeline[In, Out]:
        """Remove the stage ``anchor``."""
        return self.edited(anchor, lambda step: ())

    def since(self, anchor: str) -> Pipeline[Any, Out]:
        """Return the stages from ``anchor`` on."""
        at, step = self._holding(anchor)
        head = (step,) if step.name == anchor else self.inner(step.name).since(anchor).steps
        return Pipeline((*head, *self.steps[at + 1 :]))

    def upto(self, anchor: str) -> Pipeline[In, Any]:
        """Return the stages up to ``anchor``, included."""
        at, step = self._holding(anchor)
        tail = (step,) if step.name == anchor else self.inner(step.name).upto(anchor).steps
        return Pipeline((*self.steps[:at], *tail))

    def behind(self, anchor: str) -> Pipeline[Any, Out]:
        """Return the stages after ``anchor``."""
        return Pipeline(self.since(anchor).steps[1:])

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

    @asynccontextmanager
    async def open(self, source: AsyncGenerator[In, None]) -> AsyncGenerator[AsyncIterator[Out], None]:
        """Run ``source`` through the stages for the duration of the block.

        However the block ends (exhaustion, break, error, cancellation), every stage is closed, downstream first, and
        then the source.  An error gets a note with the name of the stage that raised it.
        """
        around = running.get()
        names: dict[Any, str] = {}
        streams: list[AsyncGenerator[Any, None]] = [source]
        try:
            try:
                for step in self.steps:
                    streams.append(step.stage(streams[-1]))
                    names[place_of(streams[-1], names, *around)] = step.name
                running.set((names, *around))
                yield streams[-1]
            finally:
                await _close(streams)
        except Exception as error:
            name_stage(error)
            raise
        finally:
            names.clear()  # a task begun in the block may keep its context, but should not keep the frames
            running.set(around)

    # Inspecting

    def names(self) -> list[str]:
        """The names of all stages, inner ones included."""
        return [name for step in self.steps for name in step.names()]

    def accepts(self) -> Junction:
        """The frames that the pipeline takes: the input of its first stage that is not a pass-through."""
        return next((step.accepts() for step in self.steps if not step.is_open), self.steps[0].accepts())

    def emits(self) -> Junction:
        """The frames that the pipeline gives: the output of its last stage that is not a pass-through."""
        return next((step.emits() for step in reversed(self.steps) if not step.is_open), self.steps[-1].emits())

    def __str__(self) -> str:
        """Draw the stages and the frames that cross each junction."""
        return "\n".join([self.accepts().label, *self._draw()])

    def _draw(self) -> Iterator[str]:
        flowing = self.accepts().label
        for step in self.steps:
            yield f"  -> {step.name}"
            if step.inner:
                yield from (f"       {line}" for line in str(step.inner).splitlines())
            flowing = flowing if step.emits().is_open else step.emits().label
            yield flowing

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

    def edited(self, anchor: str, edit: Edit) -> Pipeline[In, Out]:
        """Replace the step ``anchor``, at any depth, with the steps that ``edit`` returns."""
        if all(anchor not in step.names() for step in self.steps):
            raise LookupError(f"no stage named {anchor!r}; there are {', '.join(self.names())}")
        return Pipeline(tuple(new for step in self.steps for new in _edited_step(step, anchor, edit)))

    def _holding(self, anchor: str) -> tuple[int, Step]:
        """The position and the step of ``anchor``, or of the composite step around it."""
        for position, step in enumerate(self.steps):
            if anchor in step.names():
                return position, step
        raise LookupError(f"no stage named {anchor!r}; there are {', '.join(self.names())}")


async def _close(streams: list[AsyncGenerator[Any, None]]) -> None:
    """Close all streams, the last one first, even if closing one of them raises."""
    try:
        while streams:
            await streams.pop().aclose()
    finally:
        if streams:
            await _close(streams)


def _edited_step(step: Step, anchor: str, edit: Edit) -> tuple[Step, ...]:
    if step.name == anchor:
        return edit(step)
    if step.inner and anchor in step.names():
        return (step.with_inner(step.inner.edited(anchor, edit)),)
    return (step,)
