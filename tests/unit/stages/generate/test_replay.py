"""Recorded tokens in place of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from pipeline.errors import InvalidPrompt
from pipeline.frames import EngineFrame, GenerationFinished, GenerationStarted, Prompt, Sampling, TokenChunk
from pipeline.record import write_frames
from stages.generate.replay import ReplayEngine
from tests.support.stored_responses import response

FIRST = [TokenChunk((1, 2)), TokenChunk((3,)), GenerationFinished("stop", 0, 0.5)]
SECOND = [TokenChunk((4,)), GenerationFinished("length", 0, 0.25)]
PROMPT = Prompt(response("resp_1"), (), (1,), (), Sampling(0.0, 1.0))


@pytest.fixture
def engine(tmp_path: Path) -> ReplayEngine:
    begun = GenerationStarted(PROMPT.response, (), 1)
    write_frames(tmp_path / "tokens.jsonl", [begun, *FIRST, begun, *SECOND])
    return ReplayEngine(tmp_path / "tokens.jsonl")


async def said(engine: ReplayEngine, prompt: Prompt = PROMPT) -> list[EngineFrame]:
    async with engine.open(prompt) as frames:
        return [frame async for frame in frames]


async def test_a_recording_is_played_turn_by_turn(engine: ReplayEngine) -> None:
    """Each prompt of a response gets the next turn, whatever other responses get meanwhile."""
    other = replace(PROMPT, response=response("resp_2"))
    assert await said(engine) == FIRST
    assert await said(engine, other) == FIRST
    assert await said(engine) == SECOND
    assert await said(engine, other) == SECOND


async def test_what_was_not_recorded_is_not_said(engine: ReplayEngine) -> None:
    """Behind the last turn, and where there is no recording, a prompt is refused."""
    await said(engine)
    await said(engine)
    with pytest.raises(InvalidPrompt, match="no turn 3"):
        await said(engine)
    engine.path.unlink()
    with pytest.raises(InvalidPrompt, match="no recording"):
        await said(engine)
