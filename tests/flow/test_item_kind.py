"""A new kind of item is a struct, its events, an opening frame, a builder, and a row for the writer and the checker.

``penstock.pipeline.lifecycle`` lists the places in the source.  The kind of these tests is a poem that the server
recites: the model writes the verses, and reads how the audience liked them.
"""

from __future__ import annotations

from typing import Any, ClassVar, get_args

import msgspec
import pytest

from penstock.pipeline import frames
from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.lifecycle.checker import StreamChecker
from penstock.pipeline.lifecycle.item_lifecycles import LIFECYCLES, PARTS, ItemLifecycle, Milestone
from penstock.pipeline.lifecycle.item_state import ItemState
from penstock.pipeline.lifecycle.rules import ITEM_RULES, ItemRules
from penstock.pipeline.lifecycle.stream_state import StreamState
from penstock.pipeline.protocol import events, items
from penstock.pipeline.protocol.response import Response
from penstock.stages.converse.transcript import Transcript
from penstock.stages.models.output_items import BUILDERS, Draft
from tests.support.frames import event_types, finished, sse_json, started, written_events


class Poem(items.BaseItem, frozen=True, tag="poem"):
    id_prefix: ClassVar[str] = "poem"
    title: str
    verses: str
    status: items.CallStatus
    applause: str | None = None


class PoemInProgress(events.Progress, frozen=True, tag="response.poem.in_progress"):
    pass


class PoemCompleted(events.Progress, frozen=True, tag="response.poem.completed"):
    pass


class VerseDelta(events.Delta, frozen=True, tag="response.poem_verse.delta"):
    delta: str


class VerseDone(events.Done, frozen=True, tag="response.poem_verse.done"):
    verses: str


class PoemOpened(msgspec.Struct, frozen=True):
    title: str


def poem(opening: PoemOpened, draft: Draft, status: Any) -> Poem:
    applause = draft.finished.result if draft.finished else None
    return Poem(Poem.new_id(draft.key), opening.title, draft.text, status, applause)


def in_any_case(kind: type[events.Event]) -> dict[Any, type[events.Event]]:
    return {"completed": kind, "failed": kind, "incomplete": kind}


@pytest.fixture(autouse=True)
def poems(monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = Poem
    opening: Any = PoemOpened
    delta: Any = VerseDelta
    begun, written, recited = in_any_case(PoemInProgress), in_any_case(VerseDone), {"completed": PoemCompleted}
    steps: Any = (("opened", begun), ("started", written), ("finished", recited))
    lifecycle = ItemLifecycle(
        delta=delta,
        text_field="verses",
        milestones=tuple(Milestone(due, by_status) for due, by_status in steps),
        statuses=("completed", "incomplete", "failed"),
    )
    rules: Any = ItemRules(
        {"verses": "", "applause": None},
        text="verses",
        delta=VerseDelta,
        steps=(begun, written, recited),  # type: ignore[arg-type]
        runs=True,
    )
    monkeypatch.setitem(LIFECYCLES, kind, lifecycle)
    monkeypatch.setitem(ITEM_RULES, kind, rules)
    monkeypatch.setitem(BUILDERS, opening, poem)


def recital(*ran: Any, complete: bool = True) -> Any:
    verses = (frames.ItemDelta("A rose "), frames.ItemDelta("is a rose."))
    return (started(), PoemOpened("Rose"), *verses, *ran, frames.ItemClosed(complete), finished("length"))


def checked(stream: list[events.ResponseEvent]) -> list[events.ResponseEvent]:
    checker = StreamChecker()
    for event in stream:
        checker.feed(event)
    checker.finish()
    return stream


def final(stream: list[events.ResponseEvent]) -> Response:
    assert isinstance(stream[-1], events.TerminalEvent)
    return stream[-1].response


RAN = (frames.CallStarted(), frames.CallFinished("Bravo!"))
FAILED = (frames.CallStarted(), frames.CallFinished(error="Boo!"))
VERSES = ["poem.in_progress", "poem_verse.delta", "poem_verse.delta", "poem_verse.done"]


@pytest.mark.parametrize(
    ("turn", "names", "status"),
    [
        (recital(*RAN), [*VERSES, "poem.completed"], "completed"),
        (recital(*FAILED), VERSES, "failed"),
        (recital(complete=False), VERSES, "incomplete"),
    ],
)
def test_writer_follows_the_row(turn: Any, names: list[str], status: str) -> None:
    stream = checked(written_events(turn))
    assert event_types(stream)[2:-1] == ["output_item.added", *names, "output_item.done"]
    applause = "Bravo!" if status == "completed" else "" if status == "failed" else None
    item = {"type": "poem", "id": "poem_10000", "title": "Rose", "applause": applause}
    assert sse_json(stream[-2])["item"] == {**item, "verses": "A rose is a rose.", "status": status}


@pytest.mark.parametrize("turn", [recital(*RAN), recital(*FAILED), recital(complete=False)])
def test_stream_can_end_after_any_event(turn: Any) -> None:
    whole = written_events(turn)
    for at in range(1, len(whole)):
        stream = StreamState()
        for event in whole[:at]:
            stream.feed(event)
        ended = checked([*whole[:at], *stream.end(EngineFailed("It broke."))])
        is_added = at > 2
        assert [item.id for item in final(ended).output] == ["poem_10000"] * is_added


def test_events_without_news_are_predicted() -> None:
    stream, whole = StreamState(), written_events(recital(*FAILED))
    for event in whole:
        is_new = isinstance(event, events.OutputItemAdded | events.OutputItemDone | VerseDelta)
        assert is_new or event in stream.predict(final(whole))
        stream.feed(event)


def test_transcript_has_the_item_of_the_stream() -> None:
    turn = recital(*RAN)
    transcript = Transcript(turn[0].facts)
    for frame in turn:
        transcript.feed(frame)
    assert tuple(transcript.items) == final(written_events(turn)).output


# No kind is forgotten


def test_tables_have_a_row_for_each_kind() -> None:
    kinds, openings = set(get_args(items.OutputItem)), set(get_args(frames.Opened))
    assert set(LIFECYCLES) == set(ITEM_RULES) == {Poem, *kinds}
    assert set(BUILDERS) == {PoemOpened, *openings}
    assert {PARTS[type(part)] for row in LIFECYCLES.values() for part in row.parts} == set(PARTS.values())


def test_each_event_of_items_is_in_one_row() -> None:
    named: list[type[events.Event]] = [kind for part in PARTS.values() for kind in (part.delta, part.text_done)]
    for row in LIFECYCLES.values():
        named += [row.delta] if row.delta else []
        named += {kind for milestone in row.milestones for kind in milestone.by_status.values()}
    known = [*get_args(events.TextDelta), *get_args(events.TextDone), *get_args(events.ToolProgress)]
    known += (events.CompactionCompacting, PoemInProgress, PoemCompleted, VerseDelta, VerseDone)
    assert sorted(named, key=str) == sorted(known, key=str)


def test_item_without_a_row_is_an_error() -> None:
    not_output: Any = items.FunctionCallOutput("fco_1", "call_1", "2", "completed")
    with pytest.raises(KeyError):
        ItemState(not_output, 0)
