"""Keep the text of clients from being read as marks of the template, such as ``<|im_start|>``.

A template renders to plain text, and there a mark that a client wrote looks like any other.  So a character that occurs
nowhere in the conversation is first inserted into each mark that a client wrote.  After rendering, the text is cut at
these characters and the pieces are encoded separately.  No piece then contains a mark that the template did not write.

A template may also write a client's name between its own ``<`` and ``>``, or two texts in a row, and so complete a
mark.  Parts of a mark at the ends of a text are therefore broken up as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from penstock.pipeline.errors import InvalidRequest
from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.render.chat.messages import Arguments

_PRIVATE = range(0xE000, 0xF8FF)
"""Unicode's private-use characters, which have no meaning: one of them is inserted into marks."""

_TAKEN = re.compile("([\ue000-\uf8ff])|[uU]([eEfF][0-9a-fA-F]{3})")
"""Private-use characters, as they are and as JSON escapes."""

_NOTHING = re.compile(r"(?!)")


class Guard:
    """Guards the texts in ``values``: messages, functions, variables.

    Raises `InvalidRequest` if the values use all private-use characters themselves.
    """

    def __init__(self, vocabulary: Vocabulary, values: Iterable[Any]) -> None:
        self._marks = vocabulary.marks_pattern
        self._parts = vocabulary.mark_parts
        self._values = tuple(values)
        texts = list(_texts(self._values))
        text = "\0".join(texts)
        self.is_needed = self._marks.search(text) is not None or any(map(self._has_part, texts))
        self._inset = _unused(text) if self.is_needed else ""

    def _has_part(self, text: str) -> bool:
        return self._parts.at_start(text) or self._parts.at_end(text)

    @property
    def cut(self) -> re.Pattern[str]:
        """The pattern at which to cut a rendered text.  A template that writes JSON may have escaped the character."""
        return re.compile(rf"{self._inset}|\\+{_escaped(self._inset)}", re.IGNORECASE) if self.is_needed else _NOTHING

    def guarded(self) -> tuple[Any, ...]:
        """Return the values with all marks broken up."""
        return tuple(map(self._guarded, self._values)) if self.is_needed else self._values

    def _guarded(self, value: Any) -> Any:
        match value:
            case str():
                return self._broken(value)
            case Arguments():
                return Arguments(self._broken(value.text), self._guarded(dict(value)))
            case dict():
                return {self._guarded(key): self._guarded(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self._guarded(inner) for inner in value]
            case _:
                return value

    def _broken(self, text: str) -> str:
        while self._marks.search(text):  # once more for marks that overlap
            text = self._marks.sub(lambda match: f"{match[0][0]}{self._inset}{match[0][1:]}", text)
        if self._parts.at_start(text):
            text = f"{text[0]}{self._inset}{text[1:]}"
        if self._parts.at_end(text):
            text = f"{text[:-1]}{self._inset}{text[-1]}"
        return text


def unused_in(*values: Any) -> str:
    """Return a private-use character that is not in the texts of ``values``."""
    return _unused("\0".join(_texts(values)))


def _unused(text: str) -> str:
    """Return a private-use character that is not in ``text``."""
    taken = {ord(char) if char else int(code, 16) for char, code in _TAKEN.findall(text)}
    for code in _PRIVATE:
        if code not in taken:
            return chr(code)
    raise InvalidRequest(
        "This conversation uses all private-use characters of Unicode: the server needs one of them.", param="input"
    )


def _escaped(char: str) -> str:
    return f"u{ord(char):04x}"


def _texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            if isinstance(value, Arguments):
                yield value.text
            for key, inner in value.items():
                yield from _texts(key)
                yield from _texts(inner)
        case list() | tuple():
            for inner in value:
                yield from _texts(inner)
        case _:
            pass
