"""The state machines of the junctions, against the grammars that the docs state, as regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.frame_order import ORDERS
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol import events
from penstock.pipeline.recordings.format import FILES, read_frames
from tests.support.frames import response_frames
from tests.support.paths import CHAT, HARMONY

TOKENS = r"(GC*F)+"
WRITTEN = r"(M[DA]*|[OS]D*)"
PARSED = rf"(G(({WRITTEN}|VD*)Z)*(({WRITTEN}|VD*)zt|[Tt]))+"
SERVED = r"(VD*|L)"
TURN = rf"G(({WRITTEN}|{SERVED}BE)Z)*(({WRITTEN}|{SERVED}(BE?)?)zt|[Tt])"
CONVERSED = rf"(R(({SERVED}BE|SD*)Z)*)?({TURN})+"
EMITTED = r"NQ?(P(Ax*Z)*)?E"
EVENTS = r"(NQ?(E|P(Ax*Z)*(E|Ax*)?)?)?"  # after persist, the end may be missing


LETTERS: Sequence[tuple[tuple[type, ...], str]] = (
    ((frames.MessageOpened,), "M"),
    ((frames.McpListToolsOpened, frames.ShellOutputOpened), "L"),
    ((frames.ShellCallOpened,), "S"),
    (get_args(frames.ServedOpened), "V"),
    (get_args(frames.Opened), "O"),
    (get_args(events.TerminalEvent), "E"),
    ((frames.GenerationStarted,), "G"),
    ((frames.TokenChunk,), "C"),
    ((frames.GenerationFinished,), "F"),
    ((frames.ResponseStarted,), "R"),
    ((frames.ItemDelta,), "D"),
    ((frames.AnnotationAdded, events.OutputItemAdded), "A"),
    ((frames.CallStarted,), "B"),
    ((frames.CallFinished,), "E"),
    ((frames.ItemClosed, events.OutputItemDone), "Z"),
    ((frames.TurnFinished,), "T"),
    ((frames.ItemTokens, frames.ItemResult), "k"),
    ((events.ResponseCreated,), "N"),
    ((events.ResponseQueued,), "Q"),
    ((events.ResponseInProgress,), "P"),
    ((object,), "x"),
)
"""The letters of the frames in the expressions: the first that fits counts."""


def letter(frame: Any) -> str:
    """The letter of a frame: a small one for the end of an item that was cut, and of a turn that did not just stop."""
    found = next(letter for kinds, letter in LETTERS if isinstance(frame, kinds))
    is_small = getattr(frame, "complete", True) is False or getattr(frame, "reason", "stop") != "stop"
    return found.lower() if is_small and found in "ZT" else found


def is_empty(frame: Any) -> bool:
    """True for text or tokens that are none, and for logprobs of some of the tokens only."""
    if isinstance(frame, frames.TokenChunk):
        return not frame.token_ids or len(frame.logprobs) not in (0, len(frame.token_ids))
    return isinstance(frame, frames.ItemDelta) and not frame.text


def is_right(junction: Any, sequence: Sequence[Any]) -> bool:
    """Decide without the state machines."""
    if any(is_empty(frame) for frame in sequence):
        return False
    letters = "".join(map(letter, sequence))
    if junction in (frames.EmittedFrame, events.ResponseEvent):
        numbers = [frame.sequence_number for frame in sequence if isinstance(frame, events.Event)]
        if numbers != [*range(len(numbers))]:
            return False
    if junction is frames.EmittedFrame:
        return letters.rfind("R") == 0 and re.fullmatch(EMITTED, re.sub("[Rk]", "", letters)) is not None
    grammars = {frames.TokenFrame: TOKENS, frames.ParsedFrame: PARSED, events.ResponseEvent: EVENTS}
    return re.fullmatch(grammars.get(junction, CONVERSED), letters) is not None


def passes(junction: Any, sequence: Iterable[Any]) -> bool:
    order = ORDERS[frozenset(get_args(junction))]()
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
