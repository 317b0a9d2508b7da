"""The rules of a grammar in llguidance's dialect of Lark, over the vocabulary of a chat model.

A mark is a string with a token of its own, such as ``<tool_call>``.  It can only be that token: no text in a grammar
matches a mark.  Literals are therefore split into marks and words, and free text ends at a mark by itself.  Free text
that must end at words is matched together with them, up to their first occurrence.
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
"""White space between two elements."""


@dataclass(frozen=True)
class Mark:
    """A mark: a single token."""

    token: int


@dataclass(frozen=True)
class Words:
    """Literal text without marks."""

    text: str


@dataclass(frozen=True)
class Free:
    """Text that matches a pattern and contains none of ``excluded``."""

    pattern: str = ANY_TEXT
    excluded: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reference:
    """A reference to a rule: its name, followed by Lark's repetition operator if it repeats."""

    name: str


Part: TypeAlias = Mark | Words | Free | Reference
"""An element of the sequence that makes a rule."""


class Rules:
    """The named rules of one grammar.  Equal expressions share a name."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._names: dict[tuple[str, str], str] = {}

    @property
    def marks(self) -> Mapping[str, int]:
        """The token ids of the vocabulary's marks."""
        return self._vocabulary.marks

    def literal(self, text: str) -> list[Part]:
        """The parts of ``text``: its marks, and the words between them."""
        marks = self._vocabulary.marks
        parts: list[Part] = []
        at = 0
        for match in self._vocabulary.marks_pattern.finditer(text):
            parts += [Words(text[at : match.start()]), Mark(marks[match[0]])]
            at = match.end()
        return [part for part in (*parts, Words(text[at:])) if part != Words("")]

    def is_mark(self, text: str) -> bool:
        """Return True if ``text`` contains a mark, so that no text can match it."""
        return self._vocabulary.marks_pattern.search(text) is not None

    def named(self, expression: str, options: str = "") -> str:
        """The name of a rule for ``expression``."""
        new_name = f"{'T' if options == 'terminal' else 'r'}{len(self._names)}"
        return self._names.setdefault((expression, options), new_name)

    def terminal(self, free: Free) -> str:
        """The name of a terminal for ``free``; a terminal matches as much text as possible."""
        return self.named(self._pattern(free), "terminal")

    def joined(self, parts: Iterable[Part]) -> str:
        """The expression for ``parts`` in sequence."""
        return " ".join(self._expressions(_merged(parts))) or '""'

    def body(self, expression: str, times: str = "") -> Reference:
        """A rule for ``expression``; ``times`` is a repetition operator of Lark, such as ``*`` or ``{0,3}``."""
        return Reference(self.named(expression) + times)

    def either(self, branches: Iterable[Iterable[Part]], times: str = "") -> Reference:
        """A rule for any of the branches, with the repetition operator ``times``."""
        return self.body(" | ".join(dict.fromkeys(map(self.joined, branches))), times)

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        rules = (
            f"{name}{'' if options == 'terminal' else options}: {expression}"
            for (expression, options), name in self._names.items()
        )
        return "\n".join([f"start: {start}", *rules, ""])

    def _expressions(self, parts: Sequence[Part]) -> Iterator[str]:
        rest = deque(parts)
        while rest:
            match rest.popleft():
                case Mark(token):
                    yield f"<[{token}]>"
                case Words(text):
                    yield json.dumps(text, ensure_ascii=False)
                case Reference(name):
                    yield name
                case Free() as free:
                    yield self._text(free, rest)

    def _text(self, free: Free, rest: deque[Part]) -> str:
        """Return the expression for free text and the words after it, which are taken from ``rest``."""
        if not rest or not isinstance(words := rest[0], Words):
            return self.terminal(free)
        rest.popleft()
        with_words = Free(f"(?:{free.pattern}){escaped(words.text)}", free.excluded)
        if rest and isinstance(rest[0], Mark):  # the mark ends the match, so the text may contain the words
            return self.terminal(with_words)
        return self.named(self._pattern(with_words), "[lazy]")  # up to the first occurrence of the words

    def _pattern(self, free: Free) -> str:
        """Return the pattern in Lark's notation.  Text with a mark need not be excluded, since nothing matches it."""
        pattern = f"/{regex_to_lark(free.pattern, '')}/"
        excluded = "|".join(escaped(text) for text in free.excluded if not self.is_mark(text))
        if not excluded:
            return pattern
        return f"{pattern} & ~/{regex_to_lark(f'{ANY_TEXT}(?:{excluded}){ANY_TEXT}', '')}/"


def _merged(parts: Iterable[Part]) -> list[Part]:
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
