"""Recorded tokens in place of an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.errors import InvalidPrompt
from penstock.pipeline.frames import EngineFrame, GenerationFinished, GenerationStarted, Prompt, TokenChunk, with_facts
from penstock.pipeline.recordings.format import write_frames
from penstock.services.engines.token_replay import TokenReplayEngine
from tests.support.stored_responses import facts, response

FIRST = [TokenChunk((1, 2)), TokenChunk((3,)), GenerationFinished("stop", 0, 0.5)]
SECOND = [TokenChunk((4,)), GenerationFinished("length", 0, 0.25)]
PROMPT = Prompt(facts(), (1,), ())


@pytest.fixture
def engine(tmp_path: Path) -> TokenReplayEngine:
    begun = GenerationStarted(PROMPT.facts, 1)
    write_frames(tmp_path / "tokens.jsonl", [begun, *FIRST, begun, *SECOND])
    return TokenReplayEngine(tmp_path / "tokens.jsonl")


async def generate(engine: TokenReplayEngine, prompt: Prompt = PROMPT) -> list[EngineFrame]:
    async with engine.open(prompt) as frames:
        return [frame async for frame in frames]


async def test_recording_is_played_turn_by_turn(engine: TokenReplayEngine) -> None:
    other = with_facts(PROMPT, response=response("resp_2"))
    assert await generate(engine) == FIRST
    assert await generate(engine, other) == FIRST
    assert await generate(engine) == SECOND
    assert await generate(engine, other) == SECOND


async def test_prompt_without_a_recorded_turn_is_refused(engine: TokenReplayEngine) -> None:
    await generate(engine)
    await generate(engine)
    with pytest.raises(InvalidPrompt, match="no turn 3"):
        await generate(engine)
    engine.path.unlink()
    with pytest.raises(InvalidPrompt, match="no recording"):
        await generate(engine)
