"""The rules of reading that hold for every family that a description suffices for."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.forms import CALL_FORMS, THOUGHT_FORMS
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece, ReasoningPiece
from penstock.stages.models.chat.registry import reader
from penstock.stages.models.chat.syntaxes import OutputStart, Syntax
from tests.support.call_markup import CALL_MARKUP, CITY, OWN_MARKUP
from tests.support.examples import examples

CITIES = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "get_weather", "parameters": CITIES}}]
START = OutputStart(FUNCTIONS)

MARKUP = {name: {**CALL_MARKUP, **OWN_MARKUP}[name] for name in CALL_FORMS}
WRITTEN = [name for name, text in MARKUP.items() if json.dumps(CITY) not in text and f'"{CITY}"' not in text]
"""The families whose values are no JSON and no Python."""

every_family = pytest.mark.parametrize("family", MARKUP)


def pieces(syntax: Syntax, text: str, cuts: set[int]) -> list[Piece]:
    spans = pairwise([0, *sorted(cut for cut in cuts if cut < len(text)), len(text)])
    return [piece for a, b in spans for piece in syntax.feed(text[a:b])] + list(syntax.finish())


def read(syntax: Syntax, text: str, cuts: set[int]) -> tuple[str, str, list[tuple[str, str]]]:
    """The thought, the answer and the calls."""
    thought, answer, calls = "", "", list[tuple[str, str]]()
    for piece in pieces(syntax, text, cuts):
        match piece:
            case ReasoningPiece(more):
                thought += more
            case ContentPiece(more):
                answer += more
            case CallPiece(name):
                calls.append((name, ""))
            case ArgumentsPiece(more):
                calls[-1] = (calls[-1][0], calls[-1][1] + more)
            case _:
                pass
    return thought, answer, calls


def marks(family: str) -> list[str]:
    """The marks of a family: what stands in angle or square brackets in its markup."""
    found, text = list[str](), MARKUP[family]
    for begin, end in (("<", ">"), ("[", "]")):
        at = text.find(begin)
        while at >= 0 and (stop := text.find(end, at)) >= 0:
            found.append(text[at : stop + 1])
            at = text.find(begin, at + 1)
    return [mark for mark in found if CITY not in mark] or ["{"]


cuts = st.sets(st.integers(0, 400), max_size=40)


@pytest.mark.parametrize("family", WRITTEN)
@given(st.data(), cuts)
@examples(10)
def test_a_value_may_hold_the_marks_of_its_family(family: str, data: st.DataObject, cuts: set[int]) -> None:
    """No mark ends a value before a letter, as no mark of a call follows."""
    parts = data.draw(st.lists(st.sampled_from([*marks(family), "a b", "\n", "{", '"', "é"]), max_size=6))
    value = "".join(f"{part}x" for part in ["", *parts])
    text = MARKUP[family].replace(CITY, value)
    thought, answer, calls = read(CALL_FORMS[family](START), text, cuts)
    assert (thought, answer.strip()) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", {"city": value})]


@every_family
@given(st.data(), cuts)
@examples(10)
def test_marks_in_a_sentence_are_text(family: str, data: st.DataObject, cuts: set[int]) -> None:
    quoted = data.draw(st.lists(st.sampled_from(marks(family)), min_size=1, max_size=3))
    form = CALL_FORMS[family]
    text = "Write " + " or ".join(f"`{mark}`" for mark in quoted if mark not in form.drops) + " there."
    assert read(form(START), text, cuts) == ("", text, [])


@every_family
@given(st.integers(0, 300), st.booleans())
@examples(20)
def test_an_open_call_in_a_thought_is_thought(family: str, length: int, has_end: bool) -> None:
    markup = MARKUP[family].replace(CITY, "Paris")
    begun = markup[: min(length, len(markup) - 12)]
    form = THOUGHT_FORMS["qwen3"]
    turn = reader(form, CALL_FORMS[family], "native", START)
    assert turn
    text = f"{form.start}I could write {begun}" + (f"{form.end}Done." if has_end else "")
    thought, answer, calls = read(turn, text, set(range(0, len(text), 3)))
    assert answer.strip() == ("Done." if has_end else "")
    if not calls:
        assert thought == f"I could write {begun}"
    else:  # it was whole before the rest of its marks
        assert [json.loads(arguments) for _, arguments in calls] == [{"city": "Paris"}]


@every_family
@given(cuts)
@examples(10)
def test_a_whole_call_in_a_thought_is_a_call(family: str, cuts: set[int]) -> None:
    form = THOUGHT_FORMS["qwen3"]
    turn = reader(form, CALL_FORMS[family], "native", START)
    assert turn
    text = f"{form.start}I look.\n{MARKUP[family].replace(CITY, 'Paris')}\n{form.end}Done."
    thought, answer, calls = read(turn, text, cuts)
    assert (thought.strip(), answer.strip()) == ("I look.", "Done.")
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", {"city": "Paris"})]


@every_family
@given(cuts)
@examples(5)
def test_prompt_may_end_with_the_first_mark(family: str, cuts: set[int]) -> None:
    form, markup = CALL_FORMS[family], MARKUP[family].replace(CITY, "Paris")
    mark = next((each for each in (*form.lists, *form.begins, *form.fences) if markup.startswith(each)), "")
    start = OutputStart(FUNCTIONS, (1,), decode=lambda _: f"{mark}\n")
    _, answer, calls = read(form(start), markup.removeprefix(mark), cuts)
    assert answer.strip() == ""
    assert [(name, json.loads(arguments)) for name, arguments in calls] == [("get_weather", {"city": "Paris"})]


@pytest.mark.parametrize("family", [name for name, form in CALL_FORMS.items() if form.lists])
def test_a_bare_name_in_a_list_is_no_call(family: str) -> None:
    for mark in CALL_FORMS[family].lists:
        text = f"{mark}get_weather\n{mark.replace('<', '</')}"
        assert read(CALL_FORMS[family](START), text, set()) == ("", text, [])


@pytest.mark.parametrize(
    ("name", "start"), [(name, each) for name, form in THOUGHT_FORMS.items() for each in form.starts]
)
def test_each_mark_begins_a_thought(name: str, start: str) -> None:
    form = THOUGHT_FORMS[name]
    end = start.replace("<", "</")
    for prompt, text in (("", f"{start}Hm.{end}Yes."), (f"<turn>{start}", f"Hm.{end}Yes.")):
        after = OutputStart(FUNCTIONS, (1,), decode=prompt.format, wants_no_thought=True)
        assert read(form(after), text, set()) == ("Hm.", "Yes.", [])
