"""Every family: the tokens of a text make no difference, and a damaged call is never taken for a whole one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.forms import CALL_FORMS, MESSAGE_FORMS, THOUGHT_FORMS
from penstock.stages.models.chat.inkling import INKLING_MARKS
from penstock.stages.models.chat.json_value import is_json_object
from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, DroppedPiece, Piece
from penstock.stages.models.chat.output import ReadOutput
from penstock.stages.models.chat.registry import OWN_CALLS, OWN_THOUGHTS, reader, tokens_of_marks
from penstock.stages.models.chat.syntaxes import MakeSyntax, OutputStart
from tests.support.call_markup import CALL_MARKUP, CITY, OWN_MARKUP
from tests.support.examples import examples

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}]
START = OutputStart(FUNCTIONS)

Pair: TypeAlias = tuple[str | None, str | None]
"""A parser of thoughts and one of calls."""

PAIRS: Sequence[Pair] = (
    *((name, name if name in OWN_CALLS else "hermes") for name in OWN_THOUGHTS),
    *(("qwen3", name) for name in CALL_FORMS),
    *((None, name) for name in CALL_FORMS),
)
WORDS = ("Hello", " ", "\n", "\n\n", "it", "`", "```", "a < b", "{", "}", '"', "[", "]", "get_weather", "Rome", "to=")
MARKUP = {**CALL_MARKUP, **OWN_MARKUP}


def parsers(pair: Pair) -> tuple[MakeSyntax | None, MakeSyntax | None]:
    return OWN_THOUGHTS[pair[0]] if pair[0] else None, OWN_CALLS[pair[1]] if pair[1] else None


def marks_of(pair: Pair) -> list[str]:
    """All marks of a family."""
    thoughts, form = THOUGHT_FORMS.get(pair[0] or ""), CALL_FORMS.get(pair[1] or "")
    marks = list(INKLING_MARKS) if "inkling" in pair else []
    if message := MESSAGE_FORMS.get(pair[1] or ""):
        form, marks = message.calls, [*message.texts, " to=user", " to=self", " to=get_weather"]
    if thoughts:
        marks += [thoughts.start, thoughts.end, *thoughts.starts, *thoughts.ends, *thoughts.drops, thoughts.header]
    if form:
        marks += [*form.begins, *form.ends, *form.fences, *form.lists, *form.between, *form.drops, *form.heads]
    return sorted({mark for mark in marks if mark and "…" not in mark})


def output(pair: Pair, marks: Iterable[str] = ()) -> ReadOutput:
    known = {mark: token for token, mark in enumerate(marks, 1)}
    thoughts, calls = parsers(pair)
    start = OutputStart(FUNCTIONS, marks=known)
    return ReadOutput(reader(thoughts, calls, "native", start), tokens_of_marks((thoughts, calls), known))


def heard(read: ReadOutput, texts: Iterable[str], *, bypasses: bool, tokens: Sequence[str] = ()) -> list[list[str]]:
    """The kinds and texts of an output; plain text goes past the reader as the parse stage lets it, if it bypasses."""
    joined: list[list[str]] = []
    latest = "ContentPiece"

    def add(pieces: Iterable[Piece]) -> None:
        nonlocal latest
        for piece in pieces:
            kind = type(piece).__name__
            latest = latest if isinstance(piece, DroppedPiece) else kind
            if joined and joined[-1][0] == kind and not isinstance(piece, CallPiece):
                joined[-1][1] += written(piece)
            else:
                joined.append([kind, written(piece)])

    for text in texts:
        is_plain = read.triggers is not None and read.triggers.isdisjoint(text) and text not in tokens
        if bypasses and read.is_idle and is_plain:
            add([ContentPiece(text)] if latest == "ContentPiece" else [])
            joined[-1][1] += text if latest != "ContentPiece" else ""
        else:
            add(read.feed(tokens.index(text) + 1 if text in tokens else 0, text))
    add(read.finish(cut=False))
    return [each for each in joined if each[1]]


def written(piece: Piece) -> str:
    return piece.name if isinstance(piece, CallPiece) else piece.text


def cut_up(text: str, cuts: Iterable[int]) -> Iterator[str]:
    yield from (text[a:b] for a, b in pairwise([0, *sorted(cut for cut in cuts if 0 < cut < len(text)), len(text)]))


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@given(st.data(), st.sets(st.integers(1, 200), max_size=60))
@examples(12)
def test_tokens_make_no_difference(pair: Pair, data: st.DataObject, cuts: set[int]) -> None:
    markup = [MARKUP[pair[1]].replace(CITY, "Rome")] if pair[1] in MARKUP else []
    text = "".join(data.draw(st.lists(st.sampled_from([*marks_of(pair), *WORDS, *markup]), max_size=14)))
    whole = heard(output(pair), [text], bypasses=False)
    assert heard(output(pair), text, bypasses=True) == whole
    assert heard(output(pair), cut_up(text, cuts), bypasses=True) == whole


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@given(st.data(), st.booleans())
@examples(6)
def test_a_mark_is_one_only_as_its_token(pair: Pair, data: st.DataObject, by_letters: bool) -> None:
    """Text in which the marks are spelled with other tokens passes unchanged."""
    tokens = [mark for mark in marks_of(pair) if mark[0] == "<" and mark[-1] == ">"]
    words = st.sampled_from([*tokens, "Hello", " ", "it", "\n"])
    text = "Hello " + "".join(data.draw(st.lists(words, max_size=8)))
    texts = list(text) if by_letters else [text[:-1], text[-1:]]
    start = output(pair, tokens)
    begun = [] if pair[0] is None else heard(output(pair, tokens), ["Hello"], bypasses=False)
    kind = begun[0][0] if begun else "ContentPiece"
    assert heard(start, texts, bypasses=True, tokens=tokens) == [[kind, text]]


# Damaged calls


def damaged(text: str, form: CallForm) -> Iterator[tuple[int, str]]:
    """Each text with one character less, or one more, or with a mark that ends calls in it; and the place."""
    for at in range(len(text)):
        yield at, text[:at] + text[at + 1 :]
        for more in (text[at], '"', "{", "}", ",", "<", ">", *form.ends[:1]):
            yield at, text[:at] + more + text[at:]


def read_calls(form: CallForm, text: str) -> tuple[list[tuple[str, str, bool]], str]:
    """The calls, each with its arguments and whether a form explains them, and the text after the first one."""
    calls: list[tuple[str, str, bool]] = []
    after = ""
    syntax = form(START)
    for piece in [*syntax.feed(text), *syntax.finish()]:
        if isinstance(piece, CallPiece):
            calls.append((piece.name, "", True))
        elif isinstance(piece, ArgumentsPiece):
            name, arguments, is_explained = calls[-1]
            calls[-1] = name, arguments + piece.text, is_explained and not piece.is_unexplained
        elif isinstance(piece, ContentPiece) and calls:
            after += piece.text
    return calls, after


def lies_between(after: str, form: CallForm) -> bool:
    """True if text after a call stands before a mark that ends calls, so that it is part of the call."""
    return any(mark in after for mark in form.ends)


def is_damaged_value(arguments: dict[str, Any]) -> bool:
    """True for the only argument, with a text that is the true one but for what was put into it."""
    ((_, value),) = arguments.items() if len(arguments) == 1 else [("", None)]
    return isinstance(value, str) and any(
        holds_in_order(value, "Paris"[:at] + "Paris"[at + 1 :]) for at in range(len("Paris"))
    )


def holds_in_order(value: str, letters: str) -> bool:
    """True if the letters occur in the value in their order, with any others between them."""
    rest = iter(value)  # the search for a letter goes on after the one before
    return all(letter in rest for letter in letters)


@pytest.mark.slow
@pytest.mark.parametrize("family", CALL_FORMS)
@given(st.data())
@examples(60)
def test_a_completed_call_has_all_its_text(family: str, data: st.DataObject) -> None:
    form, markup = CALL_FORMS[family], MARKUP[family].replace(CITY, "Paris")
    _, text = data.draw(st.sampled_from(list(damaged(markup, form))))
    calls, after = read_calls(form, text)
    for name, arguments, is_explained in calls:
        if name == "get_weather" and is_explained and is_json_object(arguments):
            assert is_damaged_value(json.loads(arguments))
            assert not lies_between(after, form)


def test_a_fence_after_calls_is_a_mark_only_before_a_mark_that_ends_calls() -> None:
    form, markup = CALL_FORMS["deepseek_v3"], MARKUP["deepseek_v3"].replace(CITY, "Paris")
    (end,), fence, call = form.ends, "```python\nx = 1\n```", ("get_weather", '{"city": "Paris"}', True)
    assert read_calls(form, markup.replace("\n```<", f"{end}\n```<")) == ([call], "")
    assert read_calls(form, markup.replace("\n```<", f"\n{end}```<")) == ([call], "")
    assert read_calls(form, markup + fence) == ([call], fence)
    assert read_calls(form, f"{markup}\n{fence}\n") == ([call], f"\n{fence}\n")
