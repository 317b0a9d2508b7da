"""Shapes: the types that a prompt can express, and how they combine.

A shape is a type that TypeScript can express.  A node is a shape with notes, which the prompt shows as comments.
Shapes and nodes are values: they are compared by content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias


@dataclass(frozen=True)
class Word:
    """A type that is printed as it is: a keyword or a literal."""

    text: str
    is_whole: bool = field(default=False, compare=False)
    """True for integers, which TypeScript does not tell from other numbers."""


@dataclass(frozen=True)
class OneOf:
    """One of several types, short enough for one line."""

    options: tuple[Shape, ...]


@dataclass(frozen=True)
class Union:
    """One of several types, each with its own notes: ``oneOf`` or ``anyOf``."""

    variants: tuple[Node, ...]


@dataclass(frozen=True)
class Intersection:
    """All of several types at once."""

    parts: tuple[Shape, ...]


@dataclass(frozen=True)
class Array:
    """An array of any length."""

    items: Node


@dataclass(frozen=True)
class Object:
    """Named properties, and the type of all other properties if the schema gives one (``index``)."""

    properties: tuple[tuple[str, Node], ...] = ()
    required: frozenset[str] = frozenset()
    index: Node | None = None

    @property
    def is_empty(self) -> bool:
        """True if the shape only requires the value to be an object."""
        return not self.properties and self.index is None


Shape: TypeAlias = Word | OneOf | Union | Intersection | Array | Object


@dataclass(frozen=True)
class Notes:
    """The annotations of a schema; ``examples`` and ``default`` are JSON."""

    title: str | None = None
    description: str | None = None
    examples: tuple[str, ...] = ()
    default: str | None = None
    of_enum: bool = False
    """True if the schema has an ``enum``, so that the default is one of its values."""


@dataclass(frozen=True)
class Node:
    """A shape and the notes on it."""

    shape: Shape
    notes: Notes = Notes()


ANY = Word("any")
NULL = Word("null")
STRING = Word("string")
NUMBER = Word("number")
INTEGER = Word("number", is_whole=True)
BOOLEAN = Word("boolean")
OBJECT = Word("object")
ANY_ARRAY = Word("Array<any>")
NEVER = Word("never")

_LOOSE = frozenset({STRING, NUMBER, BOOLEAN, NULL, OBJECT, ANY_ARRAY})
_EMPTY_OBJECT = Object()


def intersection(shapes: Iterable[Shape]) -> Shape:
    """Return the simplest shape that is all of ``shapes`` at once."""
    specific = [shape for shape in shapes if shape != ANY]
    if len(specific) < 2:
        return specific[0] if specific else ANY
    specific = list(dict.fromkeys(specific))
    objects = [shape for shape in specific if isinstance(shape, Object)]
    others = [shape for shape in specific if not isinstance(shape, (Object, Union))]
    base = [*([_merged(objects)] if objects else []), *others]
    unions = [union for shape in specific if isinstance(shape, Union) for union in _narrowed(shape, base)]
    tight = [shape for shape in base if not _is_loose(shape)]
    parts = [*tight, *unions] or base
    return parts[0] if len(parts) == 1 else Intersection(tuple(parts))


def _merged(objects: list[Object]) -> Object:
    properties: dict[str, Node] = {}
    for name, node in (pair for shape in objects for pair in shape.properties):
        existing = properties.get(name)
        properties[name] = Node(intersection([existing.shape, node.shape]), existing.notes) if existing else node
    required = frozenset[str]().union(*(shape.required for shape in objects))
    index = next((shape.index for shape in objects if shape.index), None)
    return Object(tuple(properties.items()), required, index)


def _narrowed(union: Union, base: Sequence[Shape]) -> Iterator[Union]:
    """Adapt a union to ``base``, the other shapes that hold at the same time.

    Variants without a type get the type of the base.  A union that adds nothing to the base is dropped.
    """
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
    match shape:
        case Word(text):
            return shape in _LOOSE or text.startswith("any")
        case OneOf(options):
            return all(_is_loose(option) for option in options)
        case Object():
            return shape.is_empty
        case Union() | Intersection() | Array():
            return False


def choice(options: Iterable[Shape]) -> Shape:
    """Return a choice of ``options``: the option itself if there is only one, `ANY` if there are none."""
    several = tuple(options)
    if not several:
        return ANY
    return several[0] if len(several) == 1 else OneOf(several)


def or_null(shape: Shape) -> Shape:
    """Add null to the options of a shape, unless it is one of them."""
    match shape:
        case Union(variants):
            return shape if _admits_null(shape) else Union((*variants, Node(NULL)))
        case OneOf(options):
            return shape if _admits_null(shape) else OneOf((*options, NULL))
        case _:
            return shape if _admits_null(shape) else OneOf((shape, NULL))


def _admits_null(shape: Shape) -> bool:
    match shape:
        case Union(variants):
            return any(_admits_null(variant.shape) for variant in variants)
        case OneOf(options):
            return NULL in options
        case _:
            return shape == NULL
