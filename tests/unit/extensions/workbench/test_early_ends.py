"""Recordings that end early, as a stage raised, and replays that do: what the commands and `replayed` make of them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.cli.replayer import NoReplay, replay_of
from penstock.extensions.workbench.diff import comparisons, recorded_lines, replayed_lines
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import StageFault
from penstock.pipeline.frames import GenerationStarted, ParsedFrame, TokenFrame
from penstock.pipeline.plugins import Install, WrongPlugin, guarded, load
from penstock.pipeline.protocol.events import ReasoningTextDelta
from penstock.pipeline.recordings.format import (
    CAUSES,
    FILES,
    End,
    Failure,
    in_words,
    read_frames,
    read_header,
    write_frames,
)
from penstock.testing import replayed, turn
from tests.support.paths import HARMONY
from tests.support.plugins import install_of
from tests.support.processes import RunCommand

pytestmark = pytest.mark.io  # a watchdog of the stages sleeps

GREETING = HARMONY / "greeting"
PARSED = 21
"""The frames that the parser makes of the greeting."""

ENDS_EARLY = "the recording ends early, after 7 frames: a stage raised, the client left, or the response was cancelled"

STAGES = """
from collections.abc import AsyncGenerator, AsyncIterator
from penstock.pipeline.frames import ItemClosed, ItemDelta, ParsedFrame

async def raises(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    count = 0
    async for frame in source:
        count += isinstance(frame, ItemDelta)
        if count == 3:
            raise KeyError("third")
        yield frame

async def empties(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield ItemDelta("") if isinstance(frame, ItemDelta) else frame

async def leaves_open(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        if not isinstance(frame, ItemClosed):
            yield frame

async def passes(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
    async for frame in source:
        yield frame

def installing(stage):
    return lambda pipeline: pipeline.insert_after("parse", stage.__name__, stage)

faulty, empty, unclosed, fixed = map(installing, (raises, empties, leaves_open, passes))
"""


def raising_at(number: int) -> Install:
    """A plug-in whose stage raises at a frame of the parser's."""

    async def raising(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:
        count = 0
        async for frame in source:
            if count == number:
                raise KeyError(number)
            count += 1
            yield frame

    return install_of(lambda pipeline: guarded(pipeline.insert_after("parse", "raising", raising), pipeline))


async def record(folder: Path, install: Install) -> Path:
    """Record what passes between the stages of a replay, as a server does while it runs."""
    replay = await replay_of(GREETING, install=install)
    for crossed in replay.trace.junctions:
        if crossed.stage in FILES and crossed.stage != "persist":
            path = folder / FILES[crossed.stage][0]
            write_frames(path, crossed.frames, replay.recording.header, End(0, abandoned=crossed.abandoned))
    return folder


@pytest.fixture
def stages(tmp_path: Path) -> Path:
    path = tmp_path / "stages_of_mine.py"
    path.write_text(STAGES)
    return path


@pytest.fixture
async def failed(tmp_path: Path, stages: Path) -> Path:
    """The recording of a stage that raised."""
    folder = tmp_path / "failed"
    folder.mkdir()
    return await record(folder, load([f"{stages}:faulty"]))


@given(st.integers(1, PARSED - 1))  # a fault before the first event leaves no recording
async def test_recording_of_a_fault_equals_its_replay(tmp_path_factory: pytest.TempPathFactory, number: int) -> None:
    folder = await record(tmp_path_factory.mktemp("recorded"), raising_at(number))
    again = replayed_lines(await replay_of(folder, install=raising_at(number)))
    compared = list(comparisons(recorded_lines(folder), again))
    assert {each.file for each in compared} == {"parsed.jsonl", "events.jsonl"}
    assert [each.difference(exact=True) for each in compared] == [None] * len(compared)


@given(st.integers(0, PARSED - 1))
async def test_fault_in_a_replay_is_where_it_ends(number: int) -> None:
    again = replayed_lines(await replay_of(GREETING, install=raising_at(number)))
    parsed, *_ = comparisons(recorded_lines(GREETING), again)
    assert parsed.reaches_further
    assert len(parsed.other) == number + 2
    assert parsed.difference(exact=True) is None


def test_same_fault_is_no_difference(penstock: RunCommand, failed: Path, stages: Path) -> None:
    result = penstock("diff", failed, "--with", f"{stages}:faulty")
    assert (result.status, result.out) == (0, b"the same: parsed.jsonl (5 frames), events.jsonl (11 frames)\n")


def test_mended_stage_goes_on_where_the_recording_ends(penstock: RunCommand, failed: Path, stages: Path) -> None:
    result = penstock("diff", failed, "--with", f"{stages}:fixed")
    assert result.status == 1
    assert result.out.startswith(b"events.jsonl:8: response.reasoning_text.delta delta 'The user' != 'The user wants'")
    assert result.err == f"penstock: {failed}: {ENDS_EARLY}\n"


@pytest.mark.parametrize(
    ("name", "stage", "problem", "line"),
    [
        ("faulty", "raises", "raised KeyError: 'third'", 7),
        ("empty", "empties", "broke a rule: an ItemDelta is never empty", 5),
        ("unclosed", "leaves_open", "broke a rule: after ItemDelta: expected ItemDelta, ItemClosed[complete]", 12),
    ],
)
def test_stage_that_ends_a_replay_is_named(
    penstock: RunCommand, stages: Path, name: str, stage: str, problem: str, line: int
) -> None:
    for since, file in ((), "parsed"), (("--from", "render"), "tokens"):
        result = penstock("diff", GREETING, "--with", f"{stages}:{name}", *since)
        assert result.status == 1
        found = re.fullmatch(
            r"(\w+)\.jsonl:(\d+): the replay ends here.*: the stage '(\w+)' (.*)\n", result.out.decode()
        )
        assert found
        assert found[1] == file
        assert found[3] == stage
        assert found[4].startswith(problem)
        assert file == "tokens" or found[2] == str(line)
    assert penstock("diff", GREETING, "--with", f"{stages}:{name}", "--context", "1").status == 1


def test_shrunk_recording_that_ends_early_has_what_the_stages_make_of_it(
    penstock: RunCommand, failed: Path, stages: Path
) -> None:
    small = failed.with_name("failed-small")
    assert penstock("shrink", failed, "--with", f"{stages}:faulty").status == 0
    assert {path.name for path in small.iterdir()} == {"tokens.jsonl", "parsed.jsonl", "events.jsonl"}
    assert penstock("diff", small, "--with", f"{stages}:fixed").status == 0
    assert penstock("diff", small, "--with", f"{stages}:faulty").status == 1


ENDS = {
    **{cause or "without a cause": End(0, abandoned=True, cause=cause) for cause in ("", *CAUSES)},
    "failed": End(0, Failure("EngineFailed", "out of memory")),
}


@pytest.mark.parametrize("stages_of_mine", [(), ("fixed",)], ids=["alone", "with a stage"])
@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_early_end_without_a_fault_is_nothing_to_shrink(
    penstock: RunCommand, tmp_path: Path, stages: Path, end: End, stages_of_mine: tuple[str, ...]
) -> None:
    folder = tmp_path / "left"
    folder.mkdir()
    tokens = FILES["generate"][0]
    write_frames(
        folder / tokens, [*read_frames(GREETING / tokens, TokenFrame)][:9], read_header(GREETING / tokens), end
    )
    options = [option for name in stages_of_mine for option in ("--with", f"{stages}:{name}")]
    ended = penstock("shrink", folder, *options)
    why = (
        "ends with a recorded failure: EngineFailed: out of memory"
        if end.failure
        else f"ends early: {in_words(end.cause)}"
    )
    assert ended.status == 2
    assert ended.err == f"penstock: the stages do not fail on the recording as it is; it {why}\n"
    assert not folder.with_name("left-small").exists()


async def test_recording_that_ends_early_is_replayed_in_part(failed: Path, stages: Path) -> None:
    with pytest.raises(NoReplay, match=rf"{re.escape(ENDS_EARLY)}; partial=True returns"):
        await replayed(failed, load([f"{stages}:fixed"]))
    events = await replayed(failed, load([f"{stages}:fixed"]), partial=True)
    assert [event.delta for event in events if isinstance(event, ReasoningTextDelta)] == ["The", " user", " wants"]
    with pytest.raises(StageFault):
        await replayed(failed, load([f"{stages}:faulty"]), partial=True)


def nothing(pipeline: Pipeline[Any, Any]) -> Any:
    """Forget to return the pipeline."""


async def test_install_that_returns_no_pipeline_is_named() -> None:
    with pytest.raises(WrongPlugin, match="nothing: it returned None instead of a pipeline"):
        await replayed(GREETING, nothing)


async def test_turn_has_an_owner_and_a_key() -> None:
    started, *_ = await turn("x", owner="alice", key_name="laptop")
    assert isinstance(started, GenerationStarted)
    assert (started.facts.origin.owner, started.facts.origin.key_name) == ("alice", "laptop")
