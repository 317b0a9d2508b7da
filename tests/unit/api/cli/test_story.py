"""Stories and their rows: every token and every event has one place."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import pytest
from rich.console import Console

from penstock.api.cli.page import facts as page_facts
from penstock.api.cli.page.flow import flow_of
from penstock.api.cli.rerun import unedited
from penstock.api.cli.story import Crossing, Speed, Story, aligned, speed_of, tell
from penstock.api.cli.timeline import facts
from penstock.api.cli.timeline.rows import Row, folded, rewritten, rows_of
from penstock.api.cli.timeline.shown import visible
from penstock.api.cli.timeline.timeline import Timeline
from penstock.pipeline.frames import (
    AnnotationAdded,
    CallFinished,
    CallStarted,
    GenerationFinished,
    ItemClosed,
    ItemDelta,
    ParsedFrame,
    TokenChunk,
    TokenFrame,
)
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.format import line, read_frames, read_recording
from tests.support.paths import FIXTURES

HARMONY = sorted((FIXTURES / "harmony").glob("*/"), key=lambda case: case.name)
CHAT = sorted((FIXTURES / "chat").glob("deepseek_*/"), key=lambda case: case.name)

SPELLED_OTHERWISE = {
    "logprobs_of_recovered_text",
    "stop_text_in_reasoning",
    "stop_text_inside_a_token",
    "text_behind_channel",
    "text_behind_constrain",
}
"""Cases with an item whose text differs from its tokens: it is cut inside a token, or is in several places."""

TOOLS = (CallStarted, CallFinished, AnnotationAdded)

REWRITTEN = {"served_browser": {6}}
"""Items whose final text differs from the parsed one: citations became links."""


def spelled(story: Story, item: int) -> str:
    return b"".join(token.written for token in story.tokens if token.item == item).decode(errors="replace")


@pytest.mark.parametrize("case", HARMONY, ids=lambda case: case.name)
async def test_every_token_and_event_has_its_place(case: Path) -> None:
    """Tokens keep their order and spell the text of their item; repairs are marked; rows leave nothing out."""
    story = await tell(case)
    chunks = [frame for frame in read_frames(case / "tokens.jsonl", TokenFrame) if isinstance(frame, TokenChunk)]
    assert [token.id for token in story.tokens] == [token for chunk in chunks for token in chunk.token_ids]
    texts, repaired = items_of(case)
    assert {repair for token in story.tokens for repair in token.repairs} == repaired
    if case.name not in SPELLED_OTHERWISE:
        assert [spelled(story, item).strip() for item in range(len(texts))] == [text.strip() for text in texts]
    rows = rows_of(story)
    others = rewritten(story)
    assert others == REWRITTEN.get(case.name, set())
    assert [token for row in rows for token in row.tokens] == [each for each in story.tokens if each.item not in others]
    events = [crossing.frame for crossing in story.junctions[-1].crossings]
    assert all(isinstance(event, Event) for event in events)
    assert [event for row in rows for event in row.events] == events
    assert sum(fold.count for row in rows for fold in folded(row.events)) == len(events)


def items_of(case: Path) -> tuple[list[str], set[str]]:
    """The texts of the recorded items, and all repairs."""
    texts, repaired = [""], set[str]()
    for frame in read_frames(case / "parsed.jsonl", ParsedFrame):
        if isinstance(frame, ItemDelta):
            texts[-1] += frame.text
        elif isinstance(frame, ItemClosed):
            texts.append("")
            repaired.update(frame.repairs)
    return texts[:-1], repaired


@pytest.mark.parametrize("case", HARMONY[::5], ids=lambda case: case.name)
async def test_timeline_shows_all_tokens_in_order(case: Path) -> None:
    """All tokens can be read in their order."""
    story = await tell(case)
    console = Console(width=4000, highlight=False, markup=False)
    with console.capture() as captured:
        for _, part in Timeline(story, full=True, width=80).parts():
            console.print(part)
    shown, at = "".join(captured.get().split()), 0
    for row in rows_of(story):
        for text in visible_words(row):
            assert (at := shown.find(text, at)) >= 0, text


def visible_words(row: Row) -> list[str]:
    """The visible text of a row's tokens without white space, split at repaired tokens."""
    runs = groupby(row.tokens, lambda token: token.repairs)
    texts = [visible(b"".join(token.written for token in run).decode(errors="replace")) for _, run in runs]
    return ["".join(text.split()) for text in texts]


@pytest.mark.parametrize("case", CHAT[::5], ids=lambda case: case.name)
async def test_unreadable_tokens_are_shown_as_texts_of_items(case: Path) -> None:
    """Without a vocabulary, rows have the texts of the items, and a note gives the reason."""
    story = await tell(case)
    assert story.tokens == ()
    assert "does not say where its model is" in story.note
    texts = "".join(
        frame.text for frame in read_frames(case / "parsed.jsonl", ParsedFrame) if isinstance(frame, ItemDelta)
    )
    assert "".join(row.text for row in rows_of(story)) == texts


async def test_causes_cross_tool_runs() -> None:
    """If tools ran between the turns, each frame still has a cause, and causes do not go back."""
    story = await tell(FIXTURES / "harmony" / "served_two_calls_at_once")
    assert [junction.stage for junction in story.junctions] == ["generate", "parse", "converse", "emit", "persist"]
    for junction in story.junctions[1:]:
        causes = [-1 if crossing.cause is None else crossing.cause for crossing in junction.crossings]
        assert causes == sorted(causes)


@pytest.mark.parametrize("case", ["served_browser", "served_max_tool_calls"])
async def test_frames_changed_by_tools_have_causes(case: str) -> None:
    """A delta or an end that was changed is caused by its original, or by the frame before it."""
    story = await tell(FIXTURES / "harmony" / case)
    parsed = [crossing.frame for crossing in story.behind("parse")]
    causes = {crossing.cause for crossing in story.behind("converse")}
    for index, frame in enumerate(parsed):
        assert isinstance(frame, ItemDelta) or index in causes
    for crossing in story.behind("converse"):
        if crossing.cause is not None and not isinstance(crossing.frame, (ItemDelta, *TOOLS)):
            assert type(parsed[crossing.cause]) is type(crossing.frame)


def test_frames_are_aligned_by_the_last_common_frame() -> None:
    """A frame without a counterpart is caused by the last frame that has one."""
    assert aligned("abc", "xaybcz") == [None, 0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("chunks", "speed"),
    [
        ([], None),
        ([(None, 2), (None, 1)], None),
        ([(0.5, 3)], Speed(0.5, None)),
        ([(0.5, 3), (0.5, 3)], Speed(0.5, None)),
        ([(0.5, 3), (0.7, 1), (1.0, 4)], Speed(0.5, 10.0)),
        ([(None, 9), (0.5, 3), (1.0, 4)], Speed(0.5, 8.0)),
    ],
)
def test_speed_leaves_out_first_chunk(chunks: list[tuple[float | None, int]], speed: Speed | None) -> None:
    """Tokens of the first chunk took no time; without a later chunk there is no speed."""
    ended = Crossing(GenerationFinished("stop", cached_tokens=0, duration=0.0), at=9.0)
    assert speed_of([*(Crossing(TokenChunk((40,) * count), at=at) for at, count in chunks), ended]) == speed


async def test_timeline_and_page_show_same_speed(tmp_path: Path) -> None:
    """Both count from the start of the response, each in its own format."""
    recording = read_recording(FIXTURES / "harmony" / "greeting" / "tokens.jsonl", TokenFrame)
    lines = [line(frame, 0.5 + number / 4) for number, frame in enumerate(recording.frames)]
    data = b"".join([line(recording.header), *lines, line(recording.end)])
    (tmp_path / "tokens.jsonl").write_bytes(data)
    assert ("speed", "first token after 0.750 s, then 4.0 tokens/s") in [
        (name, told.plain) for name, told in facts.facts_of(await tell(tmp_path), ())
    ]
    on_page = page_facts.facts_of(await flow_of(tmp_path, unedited))
    assert {("First token", "750 ms"), ("Speed", "4.0 tokens/s")} <= {*on_page}
