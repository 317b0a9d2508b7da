"""The orders of the junctions, against Python's `re` for the same grammar."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.core import source_of
from penstock.pipeline.frame_order import ORDERS
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol import events
from penstock.pipeline.recordings.format import FILES, read_frames
from tests.support.frames import response_frames, started
from tests.support.paths import CHAT, HARMONY

VARIANTS = {frames.ItemClosed: ("complete", "cut"), frames.TurnFinished: ("stop", "cut")}
JUNCTIONS = {
    name: getattr(events if name == "ResponseEvent" else frames, name)
    for name in ("TokenFrame", "ParsedFrame", "ConversedFrame", "EmittedFrame", "ResponseEvent")
}
"""The junctions whose order is a rule."""

KINDS = list(dict.fromkeys(kind for junction in JUNCTIONS.values() for kind in get_args(junction)))
LETTERS = {
    letter: chr(0x100 + number)
    for number, letter in enumerate((kind, variant) for kind in KINDS for variant in VARIANTS.get(kind, ("",)))
}
"""A letter for each class of frames, and each variant of it."""


def expression(rule: str) -> str:
    """The regular expression of a rule of the grammar, over `LETTERS`."""
    return re.sub(r"[\s.]", "", re.sub(r"[\w\[\]]+", lambda word: _expression_of(word[0]), frames.GRAMMAR[rule]))


def _expression_of(word: str) -> str:
    if word in frames.GRAMMAR:
        return f"(?:{expression(word)})"
    name, variant = re.fullmatch(r"(\w+)(?:\[(\w+)\])?", word).groups("")  # type: ignore[union-attr]
    union = getattr(frames, name, None) or getattr(events, name)
    fitting = [
        letter
        for (kind, own), letter in LETTERS.items()
        if issubclass(kind, get_args(union) or union) and variant in ("", own)
    ]
    assert fitting, word
    return f"[{''.join(fitting)}]"


EXPRESSIONS = {name: re.compile(expression(name)) for name in JUNCTIONS}


def letter(frame: Any) -> str:
    return LETTERS[type(frame), frames.variant_of(frame)]


def matches(rule: str, sequence: Iterable[Any]) -> bool:
    return EXPRESSIONS[rule].fullmatch("".join(map(letter, sequence))) is not None


def is_empty(frame: Any) -> bool:
    """True for text or tokens that are none, and for logprobs of some of the tokens only."""
    if isinstance(frame, frames.TokenChunk):
        return not frame.token_ids or len(frame.logprobs) not in (0, len(frame.token_ids))
    return isinstance(frame, frames.ItemDelta) and not frame.text


def is_right(junction: Any, sequence: Sequence[Any]) -> bool:
    """Decide without the state machines."""
    if any(is_empty(frame) for frame in sequence):
        return False
    sent = events_of(sequence)
    if [event.sequence_number for event in sent] != [*range(len(sent))]:
        return False
    [rule] = [name for name, each in JUNCTIONS.items() if each == junction]
    return matches(rule, sequence) and (junction is not frames.EmittedFrame or matches("ResponseEvent", sent))


def passes(junction: Any, sequence: Iterable[Any], source: AsyncGenerator[Any, None] | None = None) -> bool:
    """Return True if the guard of the junction passes a sequence whose ``source`` goes on."""
    order = ORDERS[frozenset(get_args(junction))]()
    order.taken_from(source or source_of([]))
    try:
        for frame in sequence:
            order.feed(frame)
        order.finish()
    except InvariantBroken:
        return False
    return True


FOLDERS = sorted(path for root in (HARMONY, CHAT) for path in root.iterdir() if path.is_dir())
RECORDED = [
    (folder / file, junction)
    for folder in FOLDERS
    for file, junction in FILES.values()
    if (folder / file).is_file() and get_args(junction)
]
"""The recorded frames of all junctions that have an order."""


@cache
def recorded(path: Path, junction: Any) -> tuple[Any, ...]:
    return tuple(read_frames(path, junction))


def test_recorded_frames_are_in_order() -> None:
    refused = [path for path, junction in RECORDED if not passes(junction, recorded(path, junction))]
    assert (refused, len(RECORDED) > 500) == ([], True)


def blank(kind: type[Any], variant: str) -> Any:
    """Return a frame without its content."""
    content = dict.fromkeys(kind.__struct_fields__[: -len(kind.__struct_defaults__) or None]) | {
        "token_ids": (1,),
        "text": "a",
        "complete": variant == "complete",
        "reason": variant,
        "sequence_number": 0,
        "response": started().facts.response,
    }
    return kind(**{name: value for name, value in content.items() if name in kind.__struct_fields__})


FRAMES = {letter: blank(*of) for of, letter in LETTERS.items()}


@pytest.mark.parametrize("rule", JUNCTIONS)
@given(st.data())
def test_frames_pass_if_the_regular_expression_of_their_grammar_matches(rule: str, data: st.DataObject) -> None:
    letters = list(data.draw(st.from_regex(EXPRESSIONS[rule], fullmatch=True)))
    own = [letter for (kind, _), letter in LETTERS.items() if kind in get_args(JUNCTIONS[rule])]
    changes = data.draw(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 40)), max_size=2))
    for change, at in changes:
        letters = change(letters, at)
    for added, at in data.draw(st.lists(st.tuples(st.sampled_from(own), st.integers(0, 40)), max_size=2)):
        letters.insert(at, added)
    sequence = renumbered(FRAMES[letter] for letter in letters)
    assert passes(JUNCTIONS[rule], sequence) == is_right(JUNCTIONS[rule], sequence)


async def test_events_may_end_early_if_their_source_has() -> None:
    sent = events_of(recorded(HARMONY / "weather" / "events.jsonl", frames.EmittedFrame))
    ended: AsyncGenerator[Any, None] = source_of([])
    assert [frame async for frame in ended] == []
    for end in range(len(sent)):
        assert passes(events.ResponseEvent, sent[:end], ended)
        assert not passes(events.ResponseEvent, sent[:end])
    assert not passes(events.ResponseEvent, [*sent[:3], sent[2]], ended)


@given(response_frames())
def test_frames_of_any_response_are_in_order(sequence: Sequence[frames.ConversedFrame]) -> None:
    assert passes(frames.ConversedFrame, sequence)


def drop(sequence: list[Any], at: int) -> list[Any]:
    return sequence[:at] + sequence[at + 1 :]


def double(sequence: list[Any], at: int) -> list[Any]:
    return sequence[: at + 1] + sequence[at:]


def swap(sequence: list[Any], at: int) -> list[Any]:
    return sequence[:at] + sequence[at : at + 2][::-1] + sequence[at + 2 :]


CHANGES: list[Callable[[list[Any], int], list[Any]]] = [drop, double, swap]


def renumbered(sequence: Iterable[Any]) -> list[Any]:
    numbers = count()
    return [
        replace(frame, sequence_number=next(numbers)) if isinstance(frame, events.Event) else frame
        for frame in sequence
    ]


MORE = (
    frames.ItemDelta("more"),
    frames.ItemDelta(""),
    frames.AnnotationAdded({}),
    frames.CallStarted(),
    frames.CallFinished(),
    frames.TokenChunk((1,)),
    frames.TokenChunk(()),
    frames.TokenChunk((1, 2), (frames.TokenLogprob(-0.5),)),
)


def events_of(sequence: Iterable[Any]) -> list[Any]:
    return [frame for frame in sequence if isinstance(frame, events.Event)]


@pytest.mark.parametrize("case", ["weather", "served_mcp", "served_shell", "served_cut_in_code"])
def test_each_change_of_a_recording_is_refused_unless_the_grammar_has_it(case: str) -> None:
    for path, junction in RECORDED:
        if path.parent == HARMONY / case:
            sequence = list(recorded(path, junction))
            taken = [more for more in MORE if type(more) in get_args(junction)]
            changed = [change(sequence, at) for change in CHANGES for at in range(len(sequence))]
            changed += [renumbered(each) for each in changed]
            changed += [[*sequence[:at], more, *sequence[at:]] for more in taken for at in range(len(sequence) + 1)]
            changed += [sequence[:at] for at in range(len(sequence))]
            assert [passes(junction, each) for each in changed] == [is_right(junction, each) for each in changed]


@given(st.data())
def test_changed_frames_are_refused_unless_the_grammar_has_them(data: st.DataObject) -> None:
    path, junction = data.draw(st.sampled_from(RECORDED))
    changed = list(recorded(path, junction))
    if junction is frames.EmittedFrame and data.draw(st.booleans()):
        junction, changed = events.ResponseEvent, events_of(changed)
    for change in data.draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3)):
        changed = change(changed, data.draw(st.integers(0, max(0, len(changed) - 1))))
    if data.draw(st.booleans()):
        changed = renumbered(changed)
    assert passes(junction, changed) == is_right(junction, changed)


@given(response_frames(), st.data())
def test_changed_frames_of_tools_are_refused_too(
    sequence: Sequence[frames.ConversedFrame], data: st.DataObject
) -> None:
    changed = list(sequence)
    for change in data.draw(st.lists(st.sampled_from(CHANGES), min_size=1, max_size=3)):
        changed = change(changed, data.draw(st.integers(0, max(0, len(changed) - 1))))
    assert passes(frames.ConversedFrame, changed) == is_right(frames.ConversedFrame, changed)
