"""Shapes: the types that a prompt can speak of, and how several of them are one.

A shape is what TypeScript has words for; a node is a shape with the notes that a reader of the prompt finds beside it.
All of them are values: equal shapes are the same shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias


@dataclass(frozen=True)
class Word:
    """A type that is spelled as it stands: a keyword or a literal."""

    text: str


@dataclass(frozen=True)
class Choice:
    """One of several types, short enough for one line."""

    options: tuple[Shape, ...]


@dataclass(frozen=True)
class Union:
    """One of several types, each with notes of its own: ``oneOf`` or ``anyOf``."""

    variants: tuple[Node, ...]


@dataclass(frozen=True)
class Intersection:
    """All of several types at once."""

    parts: tuple[Shape, ...]


@dataclass(frozen=True)
class Array:
    """Any number of items."""

    items: Node


@dataclass(frozen=True)
class Object:
    """Named properties, and the type of all others where the schema gives one (``index``)."""

    properties: tuple[tuple[str, Node], ...] = ()
    required: frozenset[str] = frozenset()
    index: Node | None = None

    @property
    def is_empty(self) -> bool:
        """True where it says no more than that there is an object."""
        return not self.properties and self.index is None


Shape: TypeAlias = Word | Choice | Union | Intersection | Array | Object


@dataclass(frozen=True)
class Notes:
    """What a schema tells its reader beside the type; ``examples`` and ``default`` are JSON."""

    title: str | None = None
    description: str | None = None
    examples: tuple[str, ...] = ()
    default: str | None = None
    of_enum: bool = False
    """True where the schema lists its values, of which the default is one."""


@dataclass(frozen=True)
class Node:
    """A shape and the notes on it."""

    shape: Shape
    notes: Notes = Notes()


ANY = Word("any")
NULL = Word("null")
STRING = Word("string")
NUMBER = Word("number")
BOOLEAN = Word("boolean")
OBJECT = Word("object")
ANY_ARRAY = Word("Array<any>")
NEVER = Word("never")

_LOOSE = frozenset({STRING, NUMBER, BOOLEAN, NULL, OBJECT, ANY_ARRAY})
_EMPTY_OBJECT = Object()


def intersection(shapes: Iterable[Shape]) -> Shape:
    """The shape that is all of ``shapes`` at once, as simply as it can be said."""
    told = [shape for shape in shapes if shape != ANY]
    if len(told) < 2:
        return told[0] if told else ANY
    told = list(dict.fromkeys(told))
    objects = [shape for shape in told if isinstance(shape, Object)]
    others = [shape for shape in told if not isinstance(shape, (Object, Union))]
    base = [*([_merged(objects)] if objects else []), *others]
    unions = [union for shape in told if isinstance(shape, Union) for union in _narrowed(shape, base)]
    tight = [shape for shape in base if not _is_loose(shape)]
    parts = [*tight, *unions] or base
    return parts[0] if len(parts) == 1 else Intersection(tuple(parts))


def _merged(objects: list[Object]) -> Object:
    properties: dict[str, Node] = {}
    for name, node in (pair for shape in objects for pair in shape.properties):
        known = properties.get(name)
        properties[name] = Node(intersection([known.shape, node.shape]), known.notes) if known else node
    required = frozenset[str]().union(*(shape.required for shape in objects))
    index = next((shape.index for shape in objects if shape.index), None)
    return Object(tuple(properties.items()), required, index)


def _narrowed(union: Union, base: Sequence[Shape]) -> Iterator[Union]:
    """The union beside ``base``: its variants that name no type have that of the base, or say nothing new at all."""
    if not base:
        yield union
        return
    stand_in = base[0] if len(base) == 1 and not isinstance(base[0], Object) else _EMPTY_OBJECT
    noted = any(variant.notes != Notes() for variant in union.variants)
    if all(_is_silent(variant.shape) for variant in union.variants) and not (noted and stand_in != _EMPTY_OBJECT):
        return
    variants = (replace(variant, shape=stand_in) if variant.shape == ANY else variant for variant in union.variants)
    yield Union(tuple(variants))


def _is_silent(shape: Shape) -> bool:
    return shape == ANY or (isinstance(shape, Object) and shape.is_empty)


def _is_loose(shape: Shape) -> bool:
    """True for a shape that any tighter one beside it makes superfluous."""
    match shape:
        case Word(text):
            return shape in _LOOSE or text.startswith("any")
        case Choice(options):
            return all(_is_loose(option) for option in options)
        case Object():
            return shape.is_empty
        case Union() | Intersection() | Array():
            return False


def choice(options: Iterable[Shape]) -> Shape:
    """One of ``options``, whatever their number."""
    several = tuple(options)
    if not several:
        return ANY
    return several[0] if len(several) == 1 else Choice(several)


def or_null(shape: Shape) -> Shape:
    """The shape, or null, if it is not one of its own options."""
    match shape:
        case Union(variants):
            return shape if _admits_null(shape) else Union((*variants, Node(NULL)))
        case Choice(options):
            return shape if _admits_null(shape) else Choice((*options, NULL))
        case _:
            return shape if _admits_null(shape) else Choice((shape, NULL))


def _admits_null(shape: Shape) -> bool:
    match shape:
        case Union(variants):
            return any(_admits_null(variant.shape) for variant in variants)
        case Choice(options):
            return NULL in options
        case _:
            return shape == NULL
