"""Junctions: the frames that pass between two stages, read from the annotations of the stages."""

from __future__ import annotations

import functools
import inspect
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_OPTIONAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class JunctionError(TypeError):
    """Two neighbouring stages do not agree on the frames that pass between them."""


@dataclass(frozen=True)
class Junction:
    """One side of a stage: the frame classes that cross it, and their name in its annotation."""

    frames: frozenset[type]
    label: str
    is_open: bool
    """True for a bare type variable: frames of any type pass."""

    def refuses(self, arriving: Junction) -> list[str]:
        """Return the names of the arriving frame classes that do not fit."""
        if self.is_open or arriving.is_open or Any in self.frames | arriving.frames:
            return []
        accepted = tuple(self.frames)
        return sorted(frame.__name__ for frame in arriving.frames - self.frames if not issubclass(frame, accepted))

    def check(self, arriving: Junction, upstream: str, downstream: str) -> None:
        """Raise `JunctionError` unless this side, the input of ``downstream``, takes all frames of ``upstream``."""
        if refused := self.refuses(arriving):
            some = len(refused) < len(arriving.frames)
            raise JunctionError(
                f"{upstream} -> {downstream}: {upstream} gives {arriving.label}, and {downstream} takes {self.label}"
                + (f": it does not accept {_first_names(refused)}" if some else "")
            )


def junctions(name: str, stage: Any) -> tuple[Junction, Junction]:
    """Return the input and the output of a stage; raise `JunctionError` if its annotations do not name frames."""
    if inspect.isclass(stage):
        raise JunctionError(f"stage {name!r} is the class {stage.__name__}: give an instance, {stage.__name__}(...)")
    if isinstance(stage, types.CoroutineType):
        stage.close()
    if isinstance(stage, types.AsyncGeneratorType | types.GeneratorType | types.CoroutineType):
        raise JunctionError(f"stage {name!r} has been called: give the function, {stage.__name__}, not what it returns")
    if inspect.isroutine(stage) or isinstance(stage, functools.partial):
        return _ends(name, _annotated(stage), [*inspect.signature(stage).parameters.values()])
    kind: Any = type(stage)
    return _ends_of_instances(name, kind)


@functools.lru_cache
def _ends_of_instances(name: str, kind: Any) -> tuple[Junction, Junction]:
    """Read the annotations of a class of stages; cached, as an answer may have an instance of its own."""
    return _ends(name, kind.__call__, [*inspect.signature(kind.__call__).parameters.values()][1:])


def _ends(name: str, function: Any, parameters: list[inspect.Parameter]) -> tuple[Junction, Junction]:
    if inspect.iscoroutinefunction(function):
        raise JunctionError(f"stage {name!r} is no generator: it has no yield")
    if inspect.isgeneratorfunction(function):
        raise JunctionError(f"stage {name!r} is no async generator: begin it with `async def` instead of `def`")
    try:
        hints = _hints(getattr(function, "__func__", function))
    except NameError as error:
        raise JunctionError(f"stage {name!r} has an annotation that its module does not define: {error}") from error
    raw_hints = inspect.get_annotations(function)
    source = parameters[0].name if parameters else None
    if needed := [each.name for each in parameters[1:] if each.default is each.empty and each.kind not in _OPTIONAL]:
        raise JunctionError(
            f"stage {name!r} is called with its source alone, so bind its {' and '.join(needed)}"
            " to a value, as functools.partial does"
        )
    if source not in hints or "return" not in hints:
        raise JunctionError(
            f"stage {name!r} is not annotated with the frames that it takes and gives: write `AsyncIterator[...]` after"
            " its source and `-> AsyncGenerator[..., None]` after its arguments, with the frames of its place"
        )
    known = getattr(function, "__globals__", {})
    return _junction(hints[source], raw_hints[source], known), _junction(hints["return"], raw_hints["return"], known)


@functools.lru_cache
def _hints(annotated: Any) -> dict[str, Any]:
    """Evaluate annotations; cached, because every edit of a pipeline checks all of its steps again."""
    return typing.get_type_hints(annotated)


def inner_junctions(composite: type) -> tuple[Junction, Junction] | None:
    """Return the ends of the inner pipeline, read from the annotation of ``inner``; None if it names no frames."""
    ends = typing.get_args(_hints(composite).get("inner"))
    if len(ends) != 2:
        return None
    match = re.fullmatch(r"\w+\[(.+), (.+)\]", str(inspect.get_annotations(composite).get("inner")))
    given, taken = match.groups() if match else (None, None)
    return _junction_of(ends[0], given), _junction_of(ends[1], taken)


def _annotated(stage: Any) -> Any:
    """Return the function, method or ``__call__`` that carries the annotations of a function or a partial."""
    while isinstance(stage, functools.partial):
        stage = stage.func
    return stage if inspect.isroutine(stage) else type(stage).__call__


def _junction(hint: Any, annotation: Any, known: Mapping[str, Any]) -> Junction:
    arguments = typing.get_args(hint)
    if not arguments:
        raise JunctionError(f"{hint!r} does not name the frames that it carries")
    alias = re.fullmatch(r"\w+\[(.+?)(, None)?\]", annotation) if isinstance(annotation, str) else None
    return _junction_of(arguments[0], alias[1] if alias else _alias(arguments[0], known))


def _junction_of(frames: Any, alias: str | None) -> Junction:
    """Return the junction of a type hint, labelled with ``alias`` or else with the names of its members."""
    members = typing.get_args(frames) if _is_union(frames) else (frames,)
    classes = frozenset(typing.get_origin(member) or member for member in members)
    label = alias or " | ".join(getattr(member, "__name__", str(member)) for member in members)
    label = re.sub(r"\w+\.", "", label)  # the annotation may name the module of a frame, too
    return Junction(classes, label, is_open=isinstance(frames, TypeVar))


def _alias(frames: Any, known: Mapping[str, Any]) -> str | None:
    """Return the name of a union in the stage's module; needed if annotations are objects, not strings."""
    return next((name for name, value in known.items() if _is_union(value) and value == frames), None)


def _is_union(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
