"""`check_parser`: penstock's own parsers keep all rules, a toy does, and each broken rule is found and named."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.forms import THOUGHT_FORMS
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.registry import OWN_CALLS
from penstock.stages.models.chat.syntaxes import OutputStart
from penstock.stages.models.chat.thoughts import ThoughtForm
from penstock.testing import BrokenRule, check_parser
from tests.support.call_markup import CALL_MARKUP, CITY
from tests.support.examples import examples

PARIS = (CallPiece("get_weather"), ArgumentsPiece('{"city": "Paris"}'))
PARSERS = OWN_CALLS
CALL = {name: CALL_MARKUP[name].replace(CITY, "Paris") for name in PARSERS if name in CALL_MARKUP}
DIFFERENT = {(PARSERS[name], markup): name for name, markup in CALL.items()}.values()
"""Names of parsers: one of several for the same parser and the same call."""


@pytest.mark.slow
@pytest.mark.parametrize("name", DIFFERENT)
def test_own_parsers_of_calls_keep_all_rules(name: str) -> None:
    check_parser(PARSERS[name], {f"I look.\n{CALL[name]}": [ContentPiece("I look.\n"), *PARIS]})


@pytest.mark.parametrize("name", THOUGHT_FORMS)
def test_own_parsers_of_thoughts_keep_all_rules(name: str) -> None:
    form = THOUGHT_FORMS[name]
    thought = f"{form.start}{form.header}Hm"
    check_parser(
        form,
        {
            f"{thought}.{form.end}Yes.": [ReasoningPiece("Hm."), ContentPiece("Yes.")],
            thought: [ReasoningPiece("Hm")],
        },
    )


CITIES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DIFFERENT if json.dumps(CITY) in CALL_MARKUP[name]])
@given(CITIES)
@examples(2)
def test_own_parsers_keep_them_for_any_argument(name: str, city: str) -> None:
    arguments = json.dumps({"city": city})
    output = CALL_MARKUP[name].replace(CITY, json.dumps(city)[1:-1])
    check_parser(PARSERS[name], {output: [CallPiece("get_weather"), ArgumentsPiece(arguments)]})


MARK, END = re.compile(r"@@(\w+)@@"), re.compile(r"\}\s*;")


class Toy:
    """Reads ``name{...}`` between two ``$`` as a call."""

    def __init__(self, start: OutputStart) -> None:
        self.call: list[str] | None = None

    def feed(self, text: str) -> Iterator[Piece]:
        for letter in text:
            yield from self.read(letter)

    def read(self, letter: str) -> Iterator[Piece]:
        if letter == "$" and self.call is None:
            self.call = []
        elif letter == "$":
            name, brace, rest = "".join(self.call or ()).partition("{")
            self.call = None
            yield from (CallPiece(name), ArgumentsPiece(brace + rest))
        elif self.call is None:
            yield ContentPiece(letter)
        else:
            self.call.append(letter)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if self.call is not None and not cut:
            yield ContentPiece("".join(["$", *self.call]))
        self.call = None


EXAMPLES: Mapping[str, Sequence[Piece]] = {
    'I look.$get_weather{"city": "Paris"}$ Done': [ContentPiece("I look."), *PARIS, ContentPiece(" Done")],
    "$get_time{}$$get_time{}$": [CallPiece("get_time"), ArgumentsPiece("{}")] * 2,
}


def test_toy_keeps_all_rules() -> None:
    check_parser(Toy, EXAMPLES)


def test_start_may_be_given() -> None:
    marks = {"<think>": 7, "</think>": 8}
    thought: Mapping[str, Sequence[Piece]] = {"Hm</think>Yes": [ReasoningPiece("Hm"), ContentPiece("Yes")]}
    check_parser(ThoughtForm(), thought, OutputStart(prompt=[1, 7], marks=marks))
    with pytest.raises(BrokenRule, match="examples"):
        check_parser(ThoughtForm(), thought, OutputStart(prompt=[1, 8], marks=marks))


class Chunky(Toy):
    """Looks for calls in one part of the text only."""

    def feed(self, text: str) -> Iterator[Piece]:
        yield from super().feed(text) if text.count("$") != 1 else (ContentPiece(text),)


class Forgetful(Toy):
    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        yield from ()

    def read(self, letter: str) -> Iterator[Piece]:
        yield from super().read(letter) if letter != ">" else ()


class Repeating(Toy):
    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if self.call is not None:
            yield from [ContentPiece("".join(self.call))] * 2


class Hasty(Toy):
    """Reads a call that has not ended."""

    def read(self, letter: str) -> Iterator[Piece]:
        if letter == "P" and self.call:
            yield from (CallPiece("get_weather"), ArgumentsPiece('{"city": "Paris"}'))
            self.call = None
        yield from super().read(letter)


class Broken(Toy):
    def read(self, letter: str) -> Iterator[Piece]:
        for piece in super().read(letter):
            yield ArgumentsPiece(piece.text.replace("}", "")) if isinstance(piece, ArgumentsPiece) else piece


class Wordy(Toy):
    def read(self, letter: str) -> Iterator[Any]:
        yield from (piece.text if isinstance(piece, ContentPiece) else piece for piece in super().read(letter))


class Loose(Toy):
    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        if self.call is not None:
            yield ArgumentsPiece("{}")


class Restless(Toy):
    is_idle = True


class Slow(Toy):
    """Reads all of a call again for each part of it."""

    def feed(self, text: str) -> Iterator[Piece]:
        if self.call:
            self.look("".join(self.call))
        yield from super().feed(text)

    def look(self, call: str) -> None:
        json.dumps(call)


class Searching(Toy):
    """Searches all of a call again for each part of it, by one call of C code."""

    def feed(self, text: str) -> Iterator[Piece]:
        if self.call:
            END.search("".join(self.call))
        yield from super().feed(text)


class Holding(Toy):
    """Waits for the second half of a mark after any beginning of one, and looks through all that it holds."""

    def __init__(self, start: OutputStart) -> None:
        self.held = ""
        super().__init__(start)

    def feed(self, text: str) -> Iterator[Piece]:
        self.held += text
        if "@" not in self.held or MARK.search(self.held):
            held, self.held = self.held, ""
            yield from super().feed(held)

    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        held, self.held = self.held, ""
        yield from super().feed(held)
        yield from super().finish(cut=cut)


class Raising(Toy):
    def finish(self, *, cut: bool = False) -> Iterator[Piece]:
        assert self.call is None
        yield from ()


@pytest.mark.parametrize(
    ("kind", "broken", "problem"),
    [
        (Chunky, "chunks", "is cut at"),
        (Forgetful, "text", "plain text is returned as it is"),
        (Repeating, "text", "text is returned once"),
        (Hasty, "examples", "and it should be"),
        (Broken, "examples", "and it should be"),
        (Wordy, "examples", "'I' is no piece"),
        (Loose, "arguments", "arguments follow their call"),
        (Restless, "idle", "an idle parser need not see text"),
        (Slow, "work", "times the work"),
        (Searching, "work", "8 times as many parts take .* times the time"),
        (Holding, "streams", "after 'I look @', .* characters wait"),
        (Raising, "chunks", "it raised AssertionError"),
    ],
)
def test_broken_rule_is_named(kind: type[Toy], broken: str, problem: str) -> None:
    with pytest.raises(BrokenRule, match=problem) as wrong:
        check_parser(kind, {**EXAMPLES, "I look @ it.": [ContentPiece("I look @ it.")]})
    assert wrong.value.rule == broken


def test_arguments_are_an_object() -> None:
    with pytest.raises(BrokenRule, match="arguments: the arguments of a call are a JSON object"):
        check_parser(Toy, {"$get_time{$": [CallPiece("get_time"), ArgumentsPiece("{")]})


def test_missing_members_are_named() -> None:
    def nothing(start: OutputStart) -> Any:
        return object()

    with pytest.raises(BrokenRule, match="members: the method feed of object is missing: write it as `def feed"):
        check_parser(nothing, EXAMPLES)
