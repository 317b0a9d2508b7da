"""Stages and the pipelines they are composed into.

A stage turns an async iterator of frames into an async generator of frames.  A pipeline is an immutable list of named
stages; composing checks every junction, statically through ``then`` and once more from the annotations when the
pipeline is built.  Frames only flow inside ``Pipeline.open``, which owns the closing of every stage, so that a stage
never has to think about how its consumer left.
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

A stage without settings is a function; one with settings is a frozen dataclass with ``__call__``, or a method or
``functools.partial`` that fits.  It holds configuration only: whatever belongs to one response is a local variable of
the running generator.  It closes what it opened, and never its source.  A stage that takes a bare type variable,
``Any`` or ``object`` fits anywhere; one that takes and gives the same type variable passes frames through.
A dataclass stage with a field ``inner`` that holds a `Pipeline` is composite: its inner stages are reached by name.
"""


@dataclass(frozen=True)
class Step:
    """A stage under the name that the pipeline gave it."""

    name: str
    stage: Stage[Any, Any]

    @property
    def inner(self) -> Pipeline[Any, Any] | None:
        """The pipeline inside a composite stage."""
        inner = getattr(self.stage, "inner", None)
        return inner if isinstance(inner, Pipeline) else None

    def with_inner(self, inner: Pipeline[Any, Any]) -> Step:
        """The same composite step around another pipeline."""
        stage = typing.cast("Any", self.stage)
        return Step(self.name, dataclasses.replace(stage, inner=inner))

    def names(self) -> Iterator[str]:
        """This step's name and those of the steps inside it."""
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
        """Read once: every edit checks all steps, most of which it has not changed."""
        return junctions(self.name, self.stage)

    @property
    def is_open(self) -> bool:
        """Whether it is a pass-through."""
        return self.accepts().is_open and self.emits().is_open

    def check_inner(self) -> None:
        """Raise `JunctionError` unless the pipeline inside takes and gives what the field that holds it says."""
        junctions_within = inner_junctions(type(self.stage)) if self.inner else None
        if self.inner and junctions_within:
            given, taken = junctions_within
            self.inner.accepts().check(given, self.name, self.inner.steps[0].name)
            taken.check(self.inner.emits(), self.inner.steps[-1].name, self.name)


Edit: TypeAlias = Callable[[Step], tuple[Step, ...]]


@dataclass(frozen=True)
class Pipeline(Generic[In, Out]):
    """An ordered, immutable list of named stages, from frames of type ``In`` to frames of type ``Out``.

    Raises `JunctionError` when two neighbours do not fit and `ValueError` when a name repeats.
    """

    steps: tuple[Step, ...]

    # Composing

    @staticmethod
    def start(name: str, stage: Stage[First, Next]) -> Pipeline[First, Next]:
        """A pipeline of one stage."""
        return Pipeline((Step(name, stage),))

    def then(self, name: str, stage: Stage[Out, Next]) -> Pipeline[In, Next]:
        """This pipeline with one more stage at its end; the one place where types are followed statically."""
        return Pipeline((*self.steps, Step(name, stage)))

    # Editing: each returns a new, checked pipeline and reaches the stages inside composite ones.  A cut inside a
    # composite leaves that one out: its inner stages stand for themselves, and run once.

    def before(self, anchor: str, name: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Insert a stage ahead of ``anchor``."""
        return self.edited(anchor, lambda step: (Step(name, stage), step))

    def after(self, anchor: str, name: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Insert a stage behind ``anchor``."""
        return self.edited(anchor, lambda step: (step, Step(name, stage)))

    def replace(self, anchor: str, stage: Stage[Any, Any]) -> Pipeline[In, Out]:
        """Put another stage in the place, and under the name, of ``anchor``."""
        return self.edited(anchor, lambda step: (Step(step.name, stage),))

    def without(self, anchor: str) -> Pipeline[In, Out]:
        """Take ``anchor`` out."""
        return self.edited(anchor, lambda step: ())

    def since(self, anchor: str) -> Pipeline[Any, Out]:
        """The tail that begins with ``anchor``."""
        at, step = self._holding(anchor)
        head = (step,) if step.name == anchor else self.inner(step.name).since(anchor).steps
        return Pipeline((*head, *self.steps[at + 1 :]))

    def upto(self, anchor: str) -> Pipeline[In, Any]:
        """The head that ends with ``anchor``."""
        at, step = self._holding(anchor)
        tail = (step,) if step.name == anchor else self.inner(step.name).upto(anchor).steps
        return Pipeline((*self.steps[:at], *tail))

    def behind(self, anchor: str) -> Pipeline[Any, Out]:
        """The tail that begins with whatever comes after ``anchor``."""
        return Pipeline(self.since(anchor).steps[1:])

    def inner(self, anchor: str) -> Pipeline[Any, Any]:
        """The pipeline inside the composite stage ``anchor``."""
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
        """Let ``source`` flow through the stages for the length of the block.

        However the block ends (exhaustion, break, error, cancellation), every stage is closed, downstream first, and
        then the source.
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
            names.clear()  # whatever was begun meanwhile may keep the context, but not the frames
            running.set(around)

    # Looking

    def names(self) -> list[str]:
        """The names of all stages, inner ones included."""
        return [name for step in self.steps for name in step.names()]

    def accepts(self) -> Junction:
        """The frames that it takes in: those of its first stage that is no pass-through."""
        return next((step.accepts() for step in self.steps if not step.is_open), self.steps[0].accepts())

    def emits(self) -> Junction:
        """The frames that it gives out: those of its last stage that is no pass-through."""
        return next((step.emits() for step in reversed(self.steps) if not step.is_open), self.steps[-1].emits())

    def __str__(self) -> str:
        """The flow, drawn with the frames that cross each junction."""
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
        """Exchange the step ``anchor``, wherever it is nested, for those that ``edit`` returns."""
        if all(anchor not in step.names() for step in self.steps):
            raise LookupError(f"no stage named {anchor!r}; there are {', '.join(self.names())}")
        return Pipeline(tuple(new for step in self.steps for new in _edited_step(step, anchor, edit)))

    def _holding(self, anchor: str) -> tuple[int, Step]:
        """The step that is ``anchor``, or has it inside, and its position."""
        for position, step in enumerate(self.steps):
            if anchor in step.names():
                return position, step
        raise LookupError(f"no stage named {anchor!r}; there are {', '.join(self.names())}")


async def _close(streams: list[AsyncGenerator[Any, None]]) -> None:
    """Close them all, the last one first, whatever closing one of them raises."""
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
