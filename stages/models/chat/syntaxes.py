"""Tool calls in a syntax other than the model's own: the answer after the reasoning is read as calls."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Protocol

from penstock.stages.models.chat.json_value import ValueEnd, unquoted
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece

_HEAD = re.compile(r'[\s\[\],}]*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:parameters|arguments)"\s*:\s*(?=\S)')
_PUNCTUATION = "[]{}, \t\r\n"


class Syntax(Protocol):
    """Reads calls from the answer text of the model; see `OutputParser` for ``triggers`` and `is_at_rest`."""

    @property
    def triggers(self) -> frozenset[str]: ...

    @property
    def is_at_rest(self) -> bool: ...

    def feed(self, text: str) -> Iterator[Piece]:
        """Take more of the answer; yield the pieces that are now certain."""
        ...

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        """Return the pieces held back until the end; ``cut`` is True if the model did not end its turn itself."""
        ...


class Restless:
    """A syntax that has to see all text."""

    triggers: frozenset[str] = frozenset()
    is_at_rest = False


class BareArguments(Restless):
    """The whole answer is the JSON arguments of the only function that may be called."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> Iterator[Piece]:
        if not self._has_begun and text.strip():
            self._has_begun = True
            yield CallPiece(self._name)
        if self._has_begun:
            yield ArgumentsPiece(text)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        yield from ()


class ListedCalls(Restless):
    """The answer is a JSON list of calls: objects with ``name`` and ``parameters``, in this order."""

    def __init__(self) -> None:
        self._head = ""
        self._value: ValueEnd | None = None

    def feed(self, text: str) -> Iterator[Piece]:
        while text:
            if self._value:
                end = self._value.feed(text)
                yield ArgumentsPiece(text[:end])
                text = "" if end is None else text[end:]
                self._value = self._value if end is None else None
            else:
                self._head += text
                match = _HEAD.match(self._head)
                if match is None:
                    return
                yield CallPiece(unquoted(match[1]))
                text, self._head, self._value = self._head[match.end() :], "", ValueEnd()

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        """Return text that did not become a call.  If the output was cut, the beginning of a call is dropped."""
        begins_call = self._head.lstrip()[:1] in tuple("[]{},")
        if self._head.strip(_PUNCTUATION) and not (cut and begins_call):
            yield ContentPiece(self._head)
