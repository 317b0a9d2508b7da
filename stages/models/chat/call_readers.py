"""The protocol of the readers of one call, and their view of the request."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from penstock.stages.models.chat.argument_values import ArgumentSchema
from penstock.stages.models.chat.marks import Marks
from penstock.stages.models.chat.model import ArgumentsPiece, Piece
from penstock.stages.models.chat.syntaxes import OutputStart

MOST_HEAD_CHARACTERS = 512
"""Characters of a name, a key or the space between two marks after which the text is no call."""


@dataclass(frozen=True)
class CallSite:
    """The place of a call: the functions of the request, and the marks that may stand after the call."""

    parameters: Mapping[str, Any] = field(default_factory=dict)
    """The schemas of the arguments, by the names of the functions."""
    is_marked: bool = True
    """True after a mark: what follows is then a call whatever its name."""
    after: Marks = field(default_factory=lambda: Marks(()))
    """The marks that may follow a call."""

    @classmethod
    def of(cls, start: OutputStart, *, is_marked: bool, after: Marks) -> CallSite:
        """Describe a place in the output of a request."""
        functions = (function["function"] for function in start.functions)
        return cls({each["name"]: each.get("parameters") for each in functions}, is_marked, after)

    def may_be_called(self, name: str) -> bool:
        """True if a call of ``name`` is one here."""
        return self.is_marked or name in self.parameters

    def schema(self, name: str) -> ArgumentSchema:
        """Return the schema of the arguments of a function."""
        return ArgumentSchema(self.parameters.get(name))


NameOf: TypeAlias = Callable[[str, CallSite], str]
"""Finds the name of a function in what a head has for it."""


def plain_name(head: str, site: CallSite) -> str:
    """Return the name as the head has it."""
    return head


_MARK = re.compile(r"<\|\w+\|>")


def undoubled_name(head: str, site: CallSite) -> str:
    """Return the function ``get`` for ``get.get``: models that know namespaces repeat a name that has none.

    A mark in the name, as that which ends a header, is no part of it.
    """
    head = _MARK.sub("", head)
    name, _, repeated = head.partition(".")
    return name if name == repeated and head not in site.parameters and name in site.parameters else head


class CallReader(Protocol):
    """Reads one call.  Its text is returned as text if it turns out to be none."""

    text: str
    """The text that was read, until it is a call."""
    is_call: bool
    """True once the call was announced by a `CallPiece`."""
    is_done: bool
    """True if the call has ended, or is none."""
    is_broken: bool
    """True if text of the call came that no form explains: it is done, and not whole."""

    @property
    def may_be_call(self) -> bool:
        """True if the rest of the text may still make a call of it."""
        ...

    def feed(self, text: str) -> Generator[Piece, None, int]:
        """Read on, and return the number of characters that are read; the caller gives the others again."""
        ...

    def end(self, rest: str, *, marked: bool) -> Iterator[Piece]:
        """End a call whose own end has not come, after the ``rest`` of its text.

        It is ``marked`` if a mark that ends calls has come, and else the turn is over.  What nothing explains of the
        rest is given by `unexplained`.
        """
        ...


def unexplained(text: str) -> Iterator[Piece]:
    """Return text of a call that no form explains as more of its arguments."""
    if text.strip():
        yield ArgumentsPiece(text, is_unexplained=True)


class CallShape(Protocol):
    """The way in which one call is written: makes the reader of a call that may begin at a text."""

    @property
    def is_listed(self) -> bool:
        """True if several calls may stand in brackets, with commas between them."""
        ...

    @property
    def begins_with_name(self) -> bool:
        """True if it begins with a bare name, so that only a mark tells it from text."""
        ...

    @property
    def begins(self) -> tuple[str, ...]:
        """The texts that a call of this shape may begin with, if it needs no mark before it."""
        ...

    def may_begin(self, text: str) -> bool | None:
        """True if a call may begin with ``text``, False if not, and None if more text has to show it."""
        ...

    def __call__(self, site: CallSite) -> CallReader:
        """Return a reader."""
        ...
