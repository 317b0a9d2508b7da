"""Calls as JSON objects and in Python, with and without marks."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.forms import CALL_FORMS
from penstock.stages.models.chat.json_calls import JsonCall
from penstock.stages.models.chat.marked_calls import CallForm
from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece
from penstock.stages.models.chat.python_call import PythonCall
from penstock.stages.models.chat.syntaxes import OutputStart

MARKED = CallForm(("<tool_calls>",), ("</tool_calls>",))
BARE = CallForm(("<|python_tag|>",), is_bare=True)
KEYED = CallForm(("<|tools_prefix|>",), ("<|tools_suffix|>",), shapes=(JsonCall(is_keyed=True),))
PYTHON = CallForm(("<|python_start|>",), ("<|python_end|>",), is_bare=True, shapes=(PythonCall(),))
FENCED = CallForm(("<tool_call>",), ("</tool_call>", "```"), ("```json", "```"), is_bare=True)
FORMS = (MARKED, BARE, KEYED, FENCED)
NAMES = ("get_weather", "get_time")

Read = list[tuple[str, str]]


def calls_and_texts(form: CallForm, text: str, cuts: Any = (), *, cut: bool = False) -> Read:
    """Return the calls by name, and the texts with an empty name."""
    functions = [{"type": "function", "function": {"name": name}} for name in NAMES]
    syntax = form(OutputStart(functions))
    spans = pairwise([0, *sorted(cuts), len(text)])
    found: Read = []
    for piece in [piece for a, b in spans for piece in syntax.feed(text[a:b])] + list(syntax.finish(cut=cut)):
        match piece:
            case ContentPiece(text) if found and not found[-1][0]:
                found[-1] = ("", found[-1][1] + text)
            case ContentPiece(text):
                found.append(("", text))
            case CallPiece(name):
                found.append((name, ""))
            case ArgumentsPiece(text):
                found[-1] = (found[-1][0], found[-1][1] + text)
            case other:
                raise AssertionError(other)
    return found


PARIS = ("get_weather", '{"city": "Paris"}')
CALL = '{"name": "get_weather", "arguments": {"city": "Paris"}}'


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        (
            MARKED,
            f"I look.<tool_calls>[{CALL}, {CALL}]</tool_calls>Done.",
            [("", "I look."), PARIS, PARIS, ("", "Done.")],
        ),
        (MARKED, '<tool_calls>[{"arguments": {"city": "Paris"}, "name": "get_weather"}]</tool_calls>', [PARIS]),
        (MARKED, '<tool_calls>{"id": 7, "name": "get_wether", "parameters": {}}', [("get_wether", "{}")]),
        (MARKED, "<tool_calls>not json at all", [("", "<tool_calls>not json at all")]),
        (MARKED, '<tool_calls>[{"foo": 1}]</tool_calls>', [("", '<tool_calls>[{"foo": 1}]</tool_calls>')]),
        (MARKED, "Write <tool_calls", [("", "Write <tool_calls")]),
        (MARKED, '<tool_calls>[{"name": "get_time"}]</tool_calls>', [("get_time", "{}")]),
        (MARKED, '<tool_calls>{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\"}"}', [PARIS]),
        (BARE, CALL.replace("arguments", "parameters"), [PARIS]),
        (BARE, f"<|python_tag|>{CALL}; {CALL}", [PARIS, PARIS]),
        (BARE, f"I look.\n{CALL}", [("", "I look.\n"), PARIS]),
        (BARE, '{"name": "Ada", "age": 36}', [("", '{"name": "Ada", "age": 36}')]),
        (BARE, '{"age": 36, "name": "get_time"}', [("", '{"age": 36, "name": "get_time"}')]),
        (BARE, "[1, 2]", [("", "[1, 2]")]),
        (BARE, f"Write {CALL} for it.", [("", f"Write {CALL} for it.")]),
        (FENCED, f"I look.\n```json\n[{CALL}]\n```", [("", "I look.\n"), PARIS]),
        (FENCED, f"```{CALL}```", [PARIS]),
        (FENCED, f"I look.<tool_call>[{CALL}]</tool_call>", [("", "I look."), PARIS]),
        (FENCED, '```json\n[{"name": "Ada"}]\n```', [("", '```json\n[{"name": "Ada"}]\n```')]),
        (FENCED, "```js\nf()\n```", [("", "```js\nf()\n```")]),
        (KEYED, '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>', [PARIS]),
        (KEYED, '<|tools_prefix|>[{"get_weather": {"n": 1.5e3}}]<|tools_suffix|>', [("get_weather", '{"n": 1.5e3}')]),
    ],
)
def test_calls_and_texts_are_read(form: CallForm, text: str, expected: Read) -> None:
    for size in (1, 3, len(text)):
        assert calls_and_texts(form, text, range(size, len(text), size)) == expected


@pytest.mark.parametrize("form", [MARKED, BARE])
def test_a_cut_call_keeps_its_arguments_and_shows_no_half_of_its_head(form: CallForm) -> None:
    text = f"{form.begins[0]}[{CALL}"
    for length in range(len(form.begins[0]), len(text)):
        assert calls_and_texts(form, text[:length], cut=True) in (
            [],
            [("get_weather", text[text.index('{"city') : length][:17])],
        )


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(st.text(), JSON, max_size=3)), min_size=1, max_size=3
)


@given(CALLS, st.sampled_from(FORMS), st.sampled_from([None, 1]), st.booleans(), st.data())
def test_any_calls_in_any_pieces_are_read(
    calls: list[tuple[str, Any]], form: CallForm, indent: int | None, is_ascii: bool, data: st.DataObject
) -> None:
    listed = [{name: given} if form is KEYED else {"name": name, "arguments": given} for name, given in calls]
    text = form.begins[0] + json.dumps(listed, indent=indent, ensure_ascii=is_ascii)
    found = calls_and_texts(form, text, data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


WORDS = (
    "<tool_calls>",
    "</tool_calls>",
    "<|python_tag|>",
    "<tool",
    '{"name": "get_time"',
    '"arguments": {',
    '"name": "x"',
)
SOUP = st.lists(st.sampled_from((*WORDS, *'{}[]"\\,;:\n 1aé', CALL)), max_size=30).map("".join)


@given(SOUP, st.sampled_from(FORMS), st.data())
def test_no_text_outside_calls_is_lost_in_any_pieces(text: str, form: CallForm, data: st.DataObject) -> None:
    whole = calls_and_texts(form, text)
    assert calls_and_texts(form, text, data.draw(st.sets(st.integers(0, len(text)), max_size=20))) == whole
    if all(not name for name, _ in whole):
        assert "".join(piece for _, piece in whole) == text


# Calls in Python


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[get_weather(city='Paris')]", {"city": "Paris"}),
        (
            "[get_weather(n=37, a={'k': 'v', 'n': [1, (2, 3)]}, r=None, t=True)]",
            {"n": 37, "a": {"k": "v", "n": [1, [2, 3]]}, "r": None, "t": True},
        ),
        ("[get_weather(r=null, t=true, month=07, x=-1.5e3)]", {"r": None, "t": True, "month": 7, "x": -1500.0}),
        (
            r"[get_weather(city='Martha\'s Vineyard', metric='\"cool units\"')]",
            {"city": "Martha's Vineyard", "metric": '"cool units"'},
        ),
        ("[get_weather(command='sed -n '1,9p' f.py')]", {"command": "sed -n '1,9p' f.py"}),
        (
            r"""[get_weather(command='python -c "print(latex(3*x, mul_symbol='\,'))"', n=1)]""",
            {"command": r"""python -c "print(latex(3*x, mul_symbol='\,'))" """.rstrip(), "n": 1},
        ),
        ("[get_weather(command='f('a', 'b'); {'c': 1}')]", {"command": "f('a', 'b'); {'c': 1}"}),
        ("[get_weather(command='a\nb', empty='', other=\"\")]", {"command": "a\nb", "empty": "", "other": ""}),
        ('[get_weather(text="""one "two"\nthree""")]', {"text": 'one "two"\nthree'}),
        (r"[get_weather(text='\u00e9\x41\n\t\\')]", {"text": "éA\n\t\\"}),
        (
            r"[get_weather(text='\ud83d\ude00 \ud83d', of=['\ude00'])]",
            {"text": "\U0001f600 \ud83d", "of": ["\ude00"]},
        ),
        ("[get_weather(where=here)]", {"where": "here"}),
        ("<|python_start|>[get_weather( city = 'Paris' , )]<|python_end|>", {"city": "Paris"}),
        ("[get_weather()]", {}),
        ("<|python_start|>get_weather(city='Paris')<|python_end|>", {"city": "Paris"}),
        ("[get_weather(city='Paris'", {"city": "Paris"}),
    ],
)
def test_python_calls_are_translated(text: str, expected: dict[str, Any]) -> None:
    for size in (1, 3, len(text)):
        [(name, arguments)] = calls_and_texts(PYTHON, text, range(size, len(text), size))
        assert (name, json.loads(arguments.encode())) == ("get_weather", expected)


@pytest.mark.parametrize(
    "text", ["[max(a=1, b=2)] is how you write it.", "[1, 2]", "[a link](https://x.example)", "Call [get_time()] now."]
)
def test_text_with_brackets_is_no_python_call(text: str) -> None:
    assert calls_and_texts(PYTHON, text) == [("", text)]


def test_several_python_calls_and_text_after_them() -> None:
    text = "<|python_start|>[get_time(), get_weather(city='Paris')]<|python_end|>Done."
    assert calls_and_texts(PYTHON, text, range(1, len(text))) == [("get_time", "{}"), PARIS, ("", "Done.")]


PYTHON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
PYTHON_CALLS = st.lists(
    st.tuples(st.sampled_from(NAMES), st.dictionaries(KEYS, PYTHON_VALUES, max_size=3)), min_size=1, max_size=3
)


@given(PYTHON_CALLS, st.data())
def test_any_python_calls_in_any_pieces_are_translated(
    calls: list[tuple[str, dict[str, Any]]], data: st.DataObject
) -> None:
    written = [f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})" for name, given in calls]
    text = f"[{', '.join(written)}]"
    found = calls_and_texts(PYTHON, text, data.draw(st.sets(st.integers(0, len(text)), max_size=20)))
    assert [(name, json.loads(arguments)) for name, arguments in found] == calls


PYTHON_SOUP = st.lists(
    st.sampled_from(
        (
            "<|python_start|>",
            "<|python_end|>",
            "get_time(",
            "get_weather(city=",
            "'",
            '"',
            "\\",
            "'a'",
            *"()[]{},=.\n 17aé",
        )
    ),
    max_size=30,
).map("".join)


@given(PYTHON_SOUP, st.data())
def test_any_text_gives_the_same_in_any_pieces(text: str, data: st.DataObject) -> None:
    whole = calls_and_texts(PYTHON, text)
    assert calls_and_texts(PYTHON, text, data.draw(st.sets(st.integers(0, len(text)), max_size=20))) == whole
    if all(not name for name, _ in whole):
        assert "".join(piece for _, piece in whole) == text


# Calls with a head


DEEPSEEK = CALL_FORMS["deepseek_v3"]
ONE = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{ARGUMENTS}\n```<｜tool▁call▁end｜>"
NEWER = "<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"


@pytest.mark.parametrize("one", [ONE, NEWER])
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', '{\n  "city": "Paris",\n  "days": [1]\n}'])
def test_calls_with_a_head_keep_all_lines_of_their_arguments(one: str, arguments: str) -> None:
    call = one.replace("{ARGUMENTS}", arguments)
    text = f"I look.<｜tool▁calls▁begin｜>{call}\n{call}<｜tool▁calls▁end｜>Done."
    expected = [("", "I look."), *[("get_weather", arguments)] * 2, ("", "Done.")]
    for size in (1, 3, len(text)):
        assert calls_and_texts(DEEPSEEK, text, range(size, len(text), size)) == expected


@pytest.mark.parametrize(
    "text", ["<｜tool▁calls▁begin｜>none", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>" + "x" * 600]
)
def test_marks_without_a_head_are_text(text: str) -> None:
    for size in (1, 3, len(text)):
        assert calls_and_texts(DEEPSEEK, text, range(size, len(text), size)) == [("", text)]
