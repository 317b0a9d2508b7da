"""The rules of a grammar in llguidance's dialect of Lark, over the vocabulary of a chat model.

What the tokenizer has a token of its own for, such as ``<tool_call>``, can only be that token: no text of a grammar
matches one.  So literals come apart into marks and words, and free text ends at a mark by itself; where it has to end
at words, it is matched together with them, up to where they come first.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from llguidance import regex_to_lark

from penstock.stages.models.chat.vocabulary import Vocabulary
from penstock.stages.render.constraint import escaped

ANY_TEXT = r"(.|\n)*"
SPACE = r"/\n{0,2}/"
"""White space between one thing and the next."""


@dataclass(frozen=True)
class Mark:
    """One token."""

    token: int


@dataclass(frozen=True)
class Words:
    """These words."""

    text: str


@dataclass(frozen=True)
class Free:
    """Text that matches a pattern, in which none of ``excluded`` may stand."""

    pattern: str = ANY_TEXT
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Body:
    """A rule of that name, or as many times of it as follows the name."""

    name: str


Part: TypeAlias = Mark | Words | Free | Body
"""What a rule is a sequence of."""


class Rules:
    """Names what one grammar needs to be named; what is the same has one name."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names: dict[tuple[str, str], str] = {}

    @property
    def marks(self) -> Mapping[str, int]:
        """What has a token of its own."""
        return self._vocabulary.marks

    def literal(self, text: str) -> list[Part]:
        """The parts of ``text``: its marks, and the words between them."""
        marks = self._vocabulary.marks
        parts: list[Part] = []
        at = 0
        for found in self._vocabulary.marks_pattern.finditer(text):
            parts += [Words(text[at : found.start()]), Mark(marks[found[0]])]
            at = found.end()
        return [part for part in (*parts, Words(text[at:])) if part != Words("")]

    def is_mark(self, text: str) -> bool:
        """Whether ``text`` has a mark in it, so that no text can match it."""
        return self._vocabulary.marks_pattern.search(text) is not None

    def named(self, expression: str, options: str = "") -> str:
        """The name of a rule for ``expression``."""
        key = expression, options
        if key not in self._names:
            self._names[key] = f"r{len(self._names)}"
        return self._names[key]

    def terminal(self, free: Free) -> str:
        """The name of a terminal, which matches as much as it can."""
        key = self._pattern(free), "terminal"
        if key not in self._names:
            self._names[key] = f"T{len(self._names)}"
        return self._names[key]

    def up_to(self, free: Free, words: str) -> str:
        """The name of a rule for text and the ``words`` that it ends with, where they come first."""
        pattern = Free(f"(?:{free.pattern}){escaped(words)}", free.excluded)
        return self.named(self._pattern(pattern), "[lazy]")

    def joined(self, parts: Iterable[Part]) -> str:
        """The expression for ``parts``, one behind the other."""
        return " ".join(self._expressions(_merged(parts))) or '""'

    def body(self, expression: str, times: str = "") -> Body:
        """A rule for ``expression``, so many ``times``."""
        return Body(self.named(expression) + times)

    def either(self, branches: Iterable[Iterable[Part]], times: str = "") -> Body:
        """A rule for any of the branches."""
        return self.body(" | ".join(dict.fromkeys(map(self.joined, branches))), times)

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(
            [
                f"start: {start}",
                *(
                    f"{name}{'' if options == 'terminal' else options}: {expression}"
                    for (expression, options), name in self._names.items()
                ),
                "",
            ]
        )

    def _expressions(self, parts: Sequence[Part]) -> Iterator[str]:
        rest = deque(parts)
        while rest:
            match rest.popleft():
                case Mark(token):
                    yield f"<[{token}]>"
                case Words(text):
                    yield quoted(text)
                case Body(name):
                    yield name
                case Free() as free:
                    yield self._text(free, rest)

    def _text(self, free: Free, rest: deque[Part]) -> str:
        """Free text, and the words behind it, taken from the ``rest``."""
        if not rest or not isinstance(words := rest[0], Words):
            return self.terminal(free)
        rest.popleft()
        if rest and isinstance(rest[0], Mark):
            return self.terminal(Free(f"(?:{free.pattern}){escaped(words.text)}", free.excluded))
        return self.up_to(free, words.text)

    def _pattern(self, free: Free) -> str:
        """The pattern, as Lark has it; what has a mark in it need not be excluded."""
        pattern = f"/{regex_to_lark(free.pattern, '')}/"
        excluded = "|".join(escaped(text) for text in free.excluded if not self.is_mark(text))
        if not excluded:
            return pattern
        return f"{pattern} & ~/{regex_to_lark(f'{ANY_TEXT}(?:{excluded}){ANY_TEXT}', '')}/"


def quoted(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _merged(parts: Iterable[Part]) -> list[Part]:
    """The parts, words that stand beside each other made one."""
    merged: list[Part] = []
    for part in parts:
        match merged, part:
            case [*_, Words(before)], Words(text):
                merged[-1] = Words(before + text)
            case _, Words(""):
                pass
            case _:
                merged.append(part)
    return merged
