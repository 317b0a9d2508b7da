"""Calls as a JSON list, and as bare arguments: a grammar imposes these on models with unknown markup."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.stages.models.chat.model import ArgumentsPiece, CallPiece, ContentPiece, Piece
from penstock.stages.models.chat.syntaxes import BareArguments, ListedCalls, Syntax

NAMES = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1)
ARGUMENTS = st.dictionaries(st.text(), st.none() | st.text() | st.lists(st.integers()), max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=4)


def pieces(syntax: Syntax, text: str, cuts: set[int]) -> list[Piece]:
    spans = pairwise([0, *sorted(cuts), len(text)])
    return [piece for a, b in spans for piece in syntax.feed(text[a:b])] + list(syntax.finish())


def calls(read: list[Piece]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for piece in read:
        match piece:
            case CallPiece(name):
                found.append((name, ""))
            case ArgumentsPiece(text):
                found[-1] = (found[-1][0], found[-1][1] + text)
            case other:
                raise AssertionError(f"{other} is no call")
    return found


@pytest.mark.defect("32")
@given(CALLS, st.sampled_from([None, 2]), st.data())
def test_list_in_any_pieces_gives_its_calls(
    listed: list[tuple[str, dict[str, object]]], indent: int | None, data: st.DataObject
) -> None:
    text = json.dumps([{"name": name, "parameters": given} for name, given in listed], indent=indent)
    read = calls(pieces(ListedCalls(), text, data.draw(st.sets(st.integers(0, len(text))))))
    assert [(name, json.loads(arguments)) for name, arguments in read] == listed


def test_output_that_is_no_list_is_text() -> None:
    assert pieces(ListedCalls(), "I cannot do that.", set()) == [ContentPiece("I cannot do that.")]
    assert pieces(ListedCalls(), "[]\n", set()) == []


def test_arguments_of_a_list_stream() -> None:
    syntax = ListedCalls()
    assert list(syntax.feed('[{"name": "f", "parameters": {"a')) == [CallPiece("f"), ArgumentsPiece('{"a')]
    assert list(syntax.feed('": 1}')) == [ArgumentsPiece('": 1}')]
    assert list(syntax.feed("}]")) == []


@given(ARGUMENTS, st.data())
def test_bare_arguments_call_the_only_tool(given_arguments: dict[str, object], data: st.DataObject) -> None:
    text = "\n" + json.dumps(given_arguments)
    ((name, arguments),) = calls(pieces(BareArguments("f"), text, data.draw(st.sets(st.integers(0, len(text))))))
    assert (name, json.loads(arguments)) == ("f", given_arguments)


def test_blank_output_is_no_call() -> None:
    assert pieces(BareArguments("f"), " \n", {1}) == []
