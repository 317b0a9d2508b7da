"""The state machines of the junctions, against the grammars that the docs state, as regular expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.pipeline import frames
from penstock.pipeline.grammar import ORDERS
from penstock.pipeline.lifecycle.rules import InvariantBroken
from penstock.pipeline.protocol import events
from penstock.pipeline.recordings.format import FILES, read_frames
from tests.support.frames import response_frames
from tests.support.paths import CHAT, HARMONY

SERVED = get_args(frames.ServedOpened)
TEXTLESS = (frames.McpListToolsOpened, frames.ShellOutputOpened)

TOKENS = r"(GC*F)+"
ITEM = r"(M[DA]*|OD*|VD*(BE?)?|L(BE?)?)"
TURN = rf"G({ITEM}Z)*({ITEM}zt|[Tt])"
ITEMS = rf"(R((VD*(BE?)?|L(BE?)?)Z)*)?({TURN})+"
EMITTED = r"NQ?(P(Ax*Z)*)?E"
EVENTS = r"(NQ?(E|P(Ax*Z)*(E|Ax*)?)?)?"  # after persist, the end may be missing


def letter(frame: Any) -> str:
    """The letter of a frame in the expressions."""
    match frame:
        case frames.ItemClosed(complete=complete):
            return "Z" if complete else "z"
        case frames.TurnFinished(reason=reason):
            return "T" if reason == "stop" else "t"
        case frames.MessageOpened():
            return "M"
        case _ if isinstance(frame, TEXTLESS):
            return "L"
        case _ if isinstance(frame, SERVED):
            return "V"
        case _ if isinstance(frame, get_args(frames.Opened)):
            return "O"
        case events.OutputItemAdded():
            return "A"
        case events.OutputItemDone():
            return "Z"
        case events.Event() if isinstance(frame, get_args(events.TerminalEvent)):
            return "E"
    letters: dict[type, str] = {
        frames.GenerationStarted: "G",
        frames.TokenChunk: "C",
        frames.GenerationFinished: "F",
        frames.ResponseStarted: "R",
        frames.ItemDelta: "D",
        frames.AnnotationAdded: "A",
        frames.CallStarted: "B",
        frames.CallFinished: "E",
        frames.ItemTokens: "k",
        frames.ItemResult: "k",
        events.ResponseCreated: "N",
        events.ResponseQueued: "Q",
        events.ResponseInProgress: "P",
    }
    return letters.get(type(frame), "x")


def is_right(junction: Any, sequence: Sequence[Any]) -> bool:
    """Decide without the state machines."""
    letters = "".join(map(letter, sequence))
    if junction in (frames.EmittedFrame, events.ResponseEvent):
        numbers = [frame.sequence_number for frame in sequence if isinstance(frame, events.Event)]
        if numbers != [*range(len(numbers))]:
            return False
    if junction is frames.EmittedFrame:
        return letters.rfind("R") == 0 and re.fullmatch(EMITTED, re.sub("[Rk]", "", letters)) is not None
    grammar = {frames.TokenFrame: TOKENS, events.ResponseEvent: EVENTS}.get(junction, ITEMS)
    return re.fullmatch(grammar, letters) is not None


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


@given(st.data())
def test_changed_frames_are_refused_unless_the_grammar_has_them(data: st.DataObject) -> None:
    path, junction = data.draw(st.sampled_from(RECORDED))
    changed = list(recorded(path, junction))
    if junction is frames.EmittedFrame and data.draw(st.booleans()):
        junction, changed = events.ResponseEvent, [frame for frame in changed if isinstance(frame, events.Event)]
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
