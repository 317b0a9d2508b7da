"""Timelines, their rows and their drawing in the terminal: every token and every event has one place."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from itertools import accumulate, groupby
from pathlib import Path

import pytest
from rich.console import Console

from penstock.extensions.workbench.terminal import Drawing, visible
from penstock.extensions.workbench.timeline.facts import facts_of, speed_of
from penstock.extensions.workbench.timeline.rows import Row, rows_of
from penstock.extensions.workbench.timeline.timeline import Timeline, aligned, timeline_of
from penstock.pipeline import frames
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.format import line, read_frames, read_recording
from penstock.pipeline.trace import Crossing
from tests.support.paths import FIXTURES
from tests.support.plugins import install_of

HARMONY = sorted((FIXTURES / "harmony").glob("*/"), key=lambda case: case.name)
CHAT = sorted((FIXTURES / "chat").glob("deepseek_*/"), key=lambda case: case.name)

SPELLED_OTHERWISE = {
    "custom_tool_call_in_json",
    "logprobs_of_recovered_text",
    "stop_text_in_reasoning",
    "stop_text_inside_a_token",
    "text_behind_channel",
    "text_behind_constrain",
}
"""Cases with an item whose text differs from its tokens: it is cut inside a token, unwrapped, or in several
places.
"""

TOOLS = (frames.CallStarted, frames.CallFinished, frames.AnnotationAdded)

REWRITTEN = {"served_browser": {6}}
"""Items whose final text differs from the parsed one: citations became links."""


def spelled(timeline: Timeline, item: int) -> str:
    return b"".join(token.written for token in timeline.attributed if token.item == item and token.is_text).decode(
        errors="replace"
    )


@pytest.mark.parametrize("case", HARMONY, ids=lambda case: case.name)
async def test_tokens_spell_the_text_of_their_item(case: Path) -> None:
    timeline = await timeline_of(case)
    recorded = read_frames(case / "tokens.jsonl", frames.TokenFrame)
    chunks = [frame for frame in recorded if isinstance(frame, frames.TokenChunk)]
    assert [token.id for token in timeline.attributed] == [token for chunk in chunks for token in chunk.token_ids]
    texts, repaired = items_of(case)
    assert {repair for token in timeline.attributed for repair in token.repairs} == repaired
    if case.name not in SPELLED_OTHERWISE:
        assert [spelled(timeline, item).strip() for item in range(len(texts))] == [text.strip() for text in texts]
    assert timeline.rewritten == REWRITTEN.get(case.name, set())
    events = [crossing.frame for crossing in timeline.junctions[-1].crossings]
    assert all(isinstance(event, Event) for event in events)
    assert [crossing.frame for crossing in timeline.events] == events


def items_of(case: Path) -> tuple[list[str], set[str]]:
    """The texts of the recorded items, and all repairs."""
    texts, repaired = [""], set[str]()
    for frame in read_frames(case / "parsed.jsonl", frames.ParsedFrame):
        if isinstance(frame, frames.ItemDelta):
            texts[-1] += frame.text
        elif isinstance(frame, frames.ItemClosed):
            texts.append("")
            repaired.update(frame.repairs)
    return texts[:-1], repaired


def drawn(timeline: Timeline, width: int) -> str:
    console = Console(width=4000, highlight=False, markup=False)
    with console.capture() as captured:
        for _, part in Drawing(timeline, full=True, width=width).parts():
            console.print(part)
    return captured.get()


@pytest.mark.parametrize("case", HARMONY[::5], ids=lambda case: case.name)
async def test_terminal_shows_all_tokens_and_events(case: Path) -> None:
    timeline = await timeline_of(case)
    text = drawn(timeline, 80)
    shown, at = "".join(text.split()), 0
    for row in rows_of(timeline):
        for word in visible_words(timeline, row):
            assert (at := shown.find(word, at)) >= 0, word
    folds = re.findall(r"#\d+(?:–\d+ (\d+) ×)? [a-z]", text)
    assert sum(int(count or 1) for count in folds) == len(timeline.events)


def visible_words(timeline: Timeline, row: Row) -> list[str]:
    """The visible text of a row's tokens without white space, split at repairs and at the ends of lines."""
    tokens = [timeline.attributed[index] for index in row.tokens]
    tokens = [token for token in tokens if token.item not in timeline.rewritten or not token.is_text]
    borders = accumulate((token.borders for token in tokens), initial=0)
    keys = [(token.repairs, token.is_text, before) for token, before in zip(tokens, borders, strict=False)]
    runs = groupby(zip(keys, tokens, strict=True), lambda pair: pair[0])
    texts = [visible(b"".join(token.written for _, token in run).decode(errors="replace")) for _, run in runs]
    return ["".join(text.split()) for text in texts]


@pytest.mark.parametrize("case", CHAT[::5], ids=lambda case: case.name)
async def test_items_of_unreadable_tokens_are_shown_as_text(case: Path) -> None:
    timeline = await timeline_of(case)
    assert timeline.attributed == ()
    assert "does not say where its model is" in timeline.notes[0]
    shown = "".join(drawn(timeline, 200).split())
    for text in items_of(case)[0]:
        assert "".join(visible(text).split()) in shown


async def test_causes_cross_tool_runs() -> None:
    timeline = await timeline_of(FIXTURES / "harmony" / "served_two_calls_at_once")
    assert [junction.stage for junction in timeline.junctions] == ["generate", "parse", "converse", "emit", "persist"]
    for crossings in (timeline.items, timeline.events):
        causes = [-1 if crossing.cause is None else crossing.cause for crossing in crossings]
        assert causes == sorted(causes)
        assert causes[-1] > 0


@pytest.mark.parametrize("case", ["served_browser", "served_max_tool_calls"])
async def test_frames_changed_by_tools_have_causes(case: str) -> None:
    timeline = await timeline_of(FIXTURES / "harmony" / case)
    parsed = [crossing.frame for crossing in timeline.after("parse")]
    causes = {crossing.cause for crossing in timeline.after("converse")}
    for index, frame in enumerate(parsed):
        assert isinstance(frame, frames.ItemDelta) or index in causes
    for crossing in timeline.after("converse"):
        if crossing.cause is not None and not isinstance(crossing.frame, (frames.ItemDelta, *TOOLS)):
            assert type(parsed[crossing.cause]) is type(crossing.frame)


def test_frames_are_aligned_by_the_last_common_frame() -> None:
    assert aligned("abc", "xaybcz") == [None, 0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("chunks", "facts"),
    [
        ([], []),
        ([(None, 2), (None, 1)], []),
        ([(0.5, 3)], ["500 ms"]),
        ([(0.5, 3), (0.5, 3)], ["500 ms"]),
        ([(0.5, 3), (0.7, 1), (1.0, 4)], ["500 ms", "10.0 tokens/s"]),
        ([(None, 9), (0.5, 3), (1.0, 4)], ["500 ms", "8.0 tokens/s"]),
    ],
)
def test_speed_leaves_out_first_chunk(chunks: list[tuple[float | None, int]], facts: list[str]) -> None:
    """Tokens of the first chunk took no time; without a later chunk there is no speed."""
    ended = Crossing(frames.GenerationFinished("stop", cached_tokens=0, duration=0.0), at=9.0)
    crossings = [*(Crossing(frames.TokenChunk((40,) * count), at=at) for at, count in chunks), ended]
    assert [value for _, value in speed_of(crossings)] == facts


def record_times(folder: Path) -> Path:
    """Write a recording of a greeting whose frames came every quarter of a second, after half a second."""
    recording = read_recording(FIXTURES / "harmony" / "greeting" / "tokens.jsonl", frames.TokenFrame)
    lines = [line(frame, 0.5 + number / 4) for number, frame in enumerate(recording.frames)]
    (folder / "tokens.jsonl").write_bytes(b"".join([line(recording.header), *lines, line(recording.end)]))
    return folder


async def test_times_count_from_the_start_of_the_response(tmp_path: Path) -> None:
    timeline = await timeline_of(record_times(tmp_path))
    assert {("First token", "750 ms"), ("Speed", "4.0 tokens/s")} <= {*facts_of(timeline)}
    text = drawn(timeline, 200)
    assert "   0.500 " in text
    assert "   0.750   +0.250 ╭ reasoning" in text


async def fail(source: AsyncIterator[frames.ParsedFrame]) -> AsyncGenerator[frames.ParsedFrame, None]:
    async for frame in source:
        if hasattr(frame, "text"):
            raise RuntimeError("my own bug")
        yield frame


async def test_times_before_the_error_of_a_stage_are_kept(tmp_path: Path) -> None:
    timeline = await timeline_of(
        record_times(tmp_path), install=install_of(lambda pipeline: pipeline.insert_after("parse", "fail", fail))
    )
    assert timeline.failures == ("the stage 'fail' raised RuntimeError: my own bug",)
    assert {each.at for each in timeline.events} == {0.5, 1.25}
