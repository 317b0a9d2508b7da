"""Turns of messages that name their recipients, as Muse writes them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.forms import MESSAGE_FORMS
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, ReasoningPiece
from penstock.stages.models.chat.syntaxes import OutputStart
from penstock.testing import check_parser
from tests.support.examples import examples

CITIES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITIES}}]
START = OutputStart(FUNCTIONS)
GLIMMER = MESSAGE_FORMS["muse_glimmer"]

ASSISTANT = "<|start|>assistant"


def call(city: str = "Paris", name: str = "get_weather") -> str:
    parameter = f'<atem:parameter name="city">{city}</atem:parameter>'
    return f'<atem:function_calls>\n<atem:invoke name="{name}">\n{parameter}\n</atem:invoke>\n</atem:function_calls>'


Said = tuple[str, str, list[tuple[str, dict[str, Any]]]]
"""The thoughts, the answers, and the calls."""


def read(
    text: str, start: OutputStart = START, *, form: str = "muse_glimmer", cut: bool = False, size: int = 3
) -> Said:
    reader = MESSAGE_FORMS[form](start)
    pieces = [piece for at in range(0, len(text), size) for piece in reader.feed(text[at : at + size])]
    pieces += reader.finish(cut=cut)
    thought = "".join(piece.text for piece in pieces if isinstance(piece, ReasoningPiece))
    answer = "".join(piece.text for piece in pieces if isinstance(piece, ContentPiece))
    calls: list[tuple[str, str]] = []
    for piece in pieces:
        if isinstance(piece, CallPiece):
            calls.append((piece.name, ""))
        elif isinstance(piece, ArgumentsPiece):
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.text)
    return thought, answer, [(name, json.loads(arguments)) for name, arguments in calls]


PARIS = ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" to=user<|message|>Hello.\nYes?<|eot|>", ("", "Hello.\nYes?", [])),
        (f" to=get_weather<|message|>{call()}<|eot|>", ("", "", [PARIS])),
        (
            f" to=self<|message|>Hm.<|eom|>{ASSISTANT} to=get_weather<|message|>{call()}<|eom|>"
            f"{ASSISTANT} to=get_weather<|message|>{call('Rome')}<|eom|>{ASSISTANT} to=user<|message|>I have asked.",
            ("Hm.", "I have asked.", [PARIS, ("get_weather", {"city": "Rome"})]),
        ),
        # the header of a later message without its beginning, and without the end of the one before
        (f" to=self<|message|>Hm. to=get_weather<|message|>{call()}", ("Hm.", "", [PARIS])),
        (f" to=user<|message|>I ask.\nto=get_weather<|message|>{call()}", ("", "I ask.", [PARIS])),
        # no header at all
        ("Hello, assistant to=x.", ("", "Hello, assistant to=x.", [])),
        (f"I ask.\n{call()}", ("", "I ask.\n", [PARIS])),
        ('[{"a": 1}]', ("", '[{"a": 1}]', [])),
        # a function in a namespace that is its name
        (f" to=get_weather.get_weather<|message|>{call(name='get_weather.get_weather')}", ("", "", [PARIS])),
        (
            f" to=news.get_weather<|message|>{call(name='news.get_weather')}",
            ("", "", [("news.get_weather", {"city": "Paris"})]),
        ),
        # a call counts in a message to a function alone
        (f" to=self<|message|>Use {call()} here.", (f"Use {call()} here.", "", [])),
        (f" to=user<|message|>Write:\n{call()}<|eot|>", ("", f"Write:\n{call()}", [])),
        (" to=get_weather<|message|>Paris, please.<|eom|>", ("", "Paris, please.", [])),
        # no headers
        (" to=user<|message|>Set to=a or to= b", ("", "Set to=a or to= b", [])),
        (f"<|message|>Hi.<|eom|>\n{ASSISTANT}<|eot|>", ("", "Hi.", [])),
        (f"{ASSISTANT[:-3]} to=user<|message|>Hi.", ("", "assistHi.", [])),
        (
            f" to=get_weather<|message|>{call('a to=b <|x|> to=')}",
            ("", "", [("get_weather", {"city": "a to=b <|x|> to="})]),
        ),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 10_000])
def test_messages_are_read(text: str, expected: Said, size: int) -> None:
    assert read(text, size=size) == expected


@pytest.mark.parametrize(("form", "said"), [("muse", ("Hi.", "", [])), ("muse_glimmer", ("", "Hi.", []))])
def test_a_message_to_nobody_is_a_thought_of_muse_alone(form: str, said: Said) -> None:
    assert read("<|message|>Hi.<|eom|>", form=form) == said


def test_header_that_is_cut_is_no_text() -> None:
    for length in range(len(" to=self<|message|>")):
        assert read(" to=self<|message|>"[:length], cut=True)[1].strip(" to") == ""
    assert read(" to=user<|message|>It belongs to", cut=True) == ("", "It belongs to", [])


MARKS = {"<|start|>": 1, "<|message|>": 2, "<|eom|>": 3, "<|eot|>": 4}
WORDS = {5: "assistant", 6: " to=self", 7: " to=user", 8: "Hm", 9: "user"}


def after(*prompt: int, thinks: bool = False) -> OutputStart:
    texts = WORDS | {token: mark for mark, token in MARKS.items()}
    return OutputStart(FUNCTIONS, prompt, MARKS, thinks, lambda tokens: "".join(texts[token] for token in tokens))


@pytest.mark.parametrize(
    ("start", "kind"),
    [
        (after(1, 9, 2, 8, 4, 1, 5), "header"),
        (after(1, 5, 6, 2, 8, 3, 1, 5), "header"),
        (after(1, 5, 6, 2), "thought"),
        (after(1, 5, 6, 2, 8), "thought"),
        (after(1, 5, thinks=True), "thought"),
        (after(1, 5, 7, 2, 8), "answer"),
    ],
)
def test_prompt_shows_in_which_message_the_output_begins(start: OutputStart, kind: str) -> None:
    header = " to=user<|message|>" if kind == "header" else ""
    assert read(f"{header}Yes.{call()}", start)[0 if kind == "thought" else 1] == f"Yes.{call()}"


TEXT = (
    f" to=self<|message|>Hm.<|eom|>{ASSISTANT} to=get_weather<|message|>{call()}<|eom|>"
    f"{ASSISTANT} to=user<|message|>Yes."
)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("form", {form: name for name, form in MESSAGE_FORMS.items()}.values())
def test_forms_of_messages_keep_all_rules(form: str) -> None:
    check_parser(
        MESSAGE_FORMS[form],
        {
            TEXT: [
                ReasoningPiece("Hm."),
                CallPiece("get_weather"),
                ArgumentsPiece('{"city": "Paris"}'),
                ContentPiece("Yes."),
            ],
            " to=user<|message|>Yes.": [ContentPiece("Yes.")],
        },
        START,
    )


NAMES = ("assistant", " to=", "to=", "self", "user", "get_weather")
PARTS = st.lists(st.sampled_from([*MARKS, *NAMES, " ", "\n", "t", "to", call(), "<atem:", "Yes."]), max_size=12)


@given(PARTS.map("".join), st.sets(st.integers(0, 300), max_size=20), st.booleans())
@examples(200)
def test_chunks_make_no_difference(text: str, cuts: set[int], cut: bool) -> None:
    def said(spans: list[tuple[int, int]]) -> list[tuple[type, str]]:
        reader = GLIMMER(START)
        pieces = [piece for a, b in spans for piece in reader.feed(text[a:b])] + list(reader.finish(cut=cut))
        joined: list[tuple[type, str]] = []
        for piece in pieces:
            more = piece.name if isinstance(piece, CallPiece) else piece.text
            if joined and joined[-1][0] is type(piece) and not isinstance(piece, CallPiece):
                joined[-1] = (type(piece), joined[-1][1] + more)
            elif more:
                joined.append((type(piece), more))
        return joined

    whole = said([(0, len(text))])
    assert said([(at, at + 1) for at in range(len(text))]) == whole
    assert said(list(pairwise([0, *sorted(each for each in cuts if each < len(text)), len(text)]))) == whole
