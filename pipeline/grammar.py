"""Grammars of frames: rules as text, each compiled to an automaton that raises at the first frame out of order.

``penstock.pipeline.frames.GRAMMAR`` has the rules, and explains their notation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, get_args

from penstock.pipeline.lifecycle.rules import InvariantBroken

_TOKEN = re.compile(r"[\w\[\]]+|[^\s\w.]")


class Symbol(NamedTuple):
    """A position in a rule, which one frame fills."""

    name: str
    classes: tuple[type, ...]
    variant: str
    """The variant of the frame, as in ``ItemClosed[cut]``; empty for any."""


class _Part(NamedTuple):
    """A part of a rule: the positions of its symbols at which it can begin and end."""

    is_optional: bool
    first: frozenset[int]
    last: frozenset[int]


class State:
    """A state of an automaton: the ``positions`` in the rule that the latest frame may fill."""

    def __init__(self, automaton: Automaton, positions: frozenset[int]) -> None:
        self.following: dict[Any, State] = {}
        """The states after frames that have come here before: by class, or by class and variant."""
        self._automaton = automaton
        self._positions = positions

    def after(self, frame: Any) -> State:
        """Return the state after one more frame; raise `InvariantBroken` if it is out of order."""
        variant = self._automaton.variant_of(frame)
        key = (type(frame), variant) if variant else type(frame)
        if key not in self.following:
            self.following[key] = self._first_after(frame, variant)
        return self.following[key]

    def _first_after(self, frame: Any, variant: str) -> State:
        symbols = [(at, self._automaton.symbols[at]) for at in self._next_positions()]
        of_class = [(at, symbol.variant) for at, symbol in symbols if isinstance(frame, symbol.classes)]
        positions = {at for at, wanted in of_class if wanted in ("", variant)}
        if not positions:
            raise self._broken(f"{type(frame).__name__}[{variant}]" if variant else type(frame).__name__)
        return self._automaton.state(frozenset(positions))

    def finish(self) -> None:
        """Raise `InvariantBroken` if frames are missing."""
        if not self._positions & self._automaton.ends:
            raise self._broken("the end")

    def _next_positions(self) -> list[int]:
        following = self._automaton.next_positions
        return sorted({each for position in self._positions for each in following[position]})

    def _broken(self, got: str) -> InvariantBroken:
        symbols = self._automaton.symbols
        names = list(dict.fromkeys(symbols[position].name for position in self._next_positions()))
        expected = " or ".join(filter(None, (", ".join(names[:-1]), *names[-1:]))) or "the end"
        return InvariantBroken(f"after {symbols[min(self._positions)].name}: expected {expected}, got {got}")


class Automaton:
    """The automaton of one rule, by Glushkov's construction; its states are made when they are first reached.

    ``rules`` are those that it may name, ``kinds`` its other symbols: a class or a union of classes each.
    """

    def __init__(
        self, name: str, rules: Mapping[str, str], kinds: Mapping[str, Any], variant_of: Callable[[Any], str]
    ) -> None:
        self.variant_of = variant_of
        self.symbols = [Symbol("the start", (), "")]
        self.next_positions: list[frozenset[int]] = [frozenset()]
        self._rules, self._kinds = rules, kinds
        self._states: dict[frozenset[int], State] = {}
        whole = self._rule(name)
        self.next_positions[0] = whole.first
        self.ends = whole.last | {0} if whole.is_optional else whole.last
        self.start = self.state(frozenset({0}))

    def state(self, positions: frozenset[int]) -> State:
        """Return the state of ``positions``."""
        if positions not in self._states:
            self._states[positions] = State(self, positions)
        return self._states[positions]

    def _rule(self, name: str) -> _Part:
        tokens = _TOKEN.findall(self._rules[name])[::-1]
        return self._choice(tokens)

    def _choice(self, tokens: list[str]) -> _Part:
        part = self._sequence(tokens)
        while tokens and tokens[-1] == "|":
            tokens.pop()
            other = self._sequence(tokens)
            part = _Part(part.is_optional or other.is_optional, part.first | other.first, part.last | other.last)
        return part

    def _sequence(self, tokens: list[str]) -> _Part:
        part = self._repeated(tokens)
        while tokens and tokens[-1] not in "|)":
            other = self._repeated(tokens)
            self._link(part.last, other.first)
            part = _Part(
                part.is_optional and other.is_optional,
                part.first | other.first if part.is_optional else part.first,
                part.last | other.last if other.is_optional else other.last,
            )
        return part

    def _repeated(self, tokens: list[str]) -> _Part:
        if (token := tokens.pop()) == "(":
            part = self._choice(tokens)
            tokens.pop()  # the closing parenthesis
        else:
            part = self._rule(token) if token in self._rules else self._word(token)
        times = tokens.pop() if tokens and tokens[-1] in "*+?" else ""
        if times in ("*", "+"):
            self._link(part.last, part.first)
        return part._replace(is_optional=part.is_optional or times in ("*", "?"))

    def _word(self, token: str) -> _Part:
        name, _, variant = token.rstrip("]").partition("[")
        kind = self._kinds[name]
        self.symbols.append(Symbol(token, get_args(kind) or (kind,), variant))
        self.next_positions.append(frozenset())
        position = frozenset({len(self.symbols) - 1})
        return _Part(False, position, position)

    def _link(self, positions: Iterable[int], following: frozenset[int]) -> None:
        for position in positions:
            self.next_positions[position] |= following
