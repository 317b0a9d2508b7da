from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline import frames
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import ContextTooLong, EngineDead, EngineFailed, InvalidPrompt, ServerStopping, StageError
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.pipeline.recordings.format import write_frames
from penstock.services.engines.engine import LONG_TOKENS
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.engines.token_replay import TokenReplayEngine
from penstock.stages.generate import Generate
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE
from tests.support.stored_responses import facts, pop_fields

TOKENS = (11, 12, 13, 14, 15)
LOGPROBS = tuple(frames.TokenLogprob(-float(token), ((token, -float(token)), (1, -99.0))) for token in TOKENS)


def prompt(**fields: Any) -> frames.Prompt:
    of_request = pop_fields(frames.RequestFacts, fields)
    known: dict[str, Any] = {"token_ids": (1, 2, 3), "stop_token_ids": ()}
    return frames.Prompt(facts(**of_request), **(known | fields))


async def generated(engine: ScriptedEngine, wanted: frames.Prompt) -> list[frames.TokenFrame]:
    return [frame async for frame in Generate(engine)(source_of([wanted]))]


async def test_first_frame_describes_the_request() -> None:
    tools = Toolset((FunctionTool("f"),), choice="required")
    wanted = prompt(tools=tools, raw_messages=({"role": "user"},), sampling=frames.Sampling(0.0, 1.0, stop=("END",)))
    first, *_ = await generated(ScriptedEngine(), wanted)
    assert first == frames.GenerationStarted(wanted.facts, 3, ({"role": "user"},))


async def test_first_frame_says_if_there_is_a_grammar() -> None:
    """The parser needs to know if the turn was constrained."""
    for grammar in (None, "start: /x/"):
        first, *_ = await generated(ScriptedEngine(), prompt(grammar=grammar))
        assert isinstance(first, frames.GenerationStarted)
        assert first.held_to_grammar is (grammar is not None)


@pytest.mark.parametrize("place", [0, LONG_TOKENS - 1, LONG_TOKENS, 2 * LONG_TOKENS])
async def test_unknown_token_is_found_anywhere_in_a_long_prompt(place: int) -> None:
    token_ids = [1] * (2 * LONG_TOKENS + 1)
    token_ids[place] = VOCABULARY_SIZE
    with pytest.raises(InvalidPrompt, match="token ids"):
        await generated(ScriptedEngine(context_length=10 * LONG_TOKENS), prompt(token_ids=tuple(token_ids)))


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 9])
async def test_logprobs_stay_with_their_tokens_in_any_chunks(chunk_size: int) -> None:
    engine = ScriptedEngine(Script(TOKENS, chunk_size=chunk_size, logprobs=LOGPROBS))
    chunks = [
        frame
        for frame in await generated(engine, prompt(sampling=frames.Sampling(0.0, 1.0, logprobs=1)))
        if isinstance(frame, frames.TokenChunk)
    ]
    pairs = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]
    assert pairs == list(zip(TOKENS, LOGPROBS, strict=True))


async def test_logprobs_are_sent_only_if_requested() -> None:
    sequence = await generated(ScriptedEngine(Script(TOKENS, logprobs=LOGPROBS)), prompt())
    assert [frame.logprobs for frame in sequence if isinstance(frame, frames.TokenChunk)] == [()] * len(TOKENS)


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [((), InvalidPrompt), ((99,), InvalidPrompt), ((-1,), InvalidPrompt), ((1,) * 10, ContextTooLong)],
)
async def test_impossible_prompts_never_reach_the_engine(token_ids: tuple[int, ...], error: type[StageError]) -> None:
    """A prompt that would kill vLLM is refused before."""
    engine = ScriptedEngine(context_length=10, vocabulary_size=50)
    with pytest.raises(error):
        await generated(engine, prompt(token_ids=token_ids))
    assert engine.prompts == []


@pytest.mark.parametrize(("requested", "given"), [(None, 7), (3, 3), (100, 7)])
async def test_answer_may_fill_the_rest_of_the_context(requested: int | None, given: int) -> None:
    engine = ScriptedEngine(Script((5,), endless=True), context_length=10)
    *_, end = await generated(engine, prompt(sampling=frames.Sampling(0.0, 1.0, requested)))
    assert engine.prompts[0].facts.sampling.max_tokens == given
    assert isinstance(end, frames.GenerationFinished)
    assert end.reason == "length"


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("dies", [False, True])
async def test_tokens_before_a_failure_are_passed_on(before: int, dies: bool) -> None:
    error = EngineDead("dead") if dies else EngineFailed("failed")
    engine = ScriptedEngine(Script(TOKENS[:before], error=error, dies=dies))
    seen: list[frames.TokenFrame] = []
    with pytest.raises(type(error)):
        async for frame in Generate(engine)(source_of([prompt()])):
            seen.append(frame)  # noqa: PERF401 - the loop ends by its error
    assert len(seen) == 1 + before
    assert (engine.running, engine.is_alive) == (0, not dies)


@pytest.mark.parametrize("taken", range(4))
async def test_leaving_at_any_frame_aborts(taken: int) -> None:
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(source_of([prompt()]))
    for _ in range(1 + taken):
        await anext(stage)
    await stage.aclose()
    assert (engine.running, engine.aborted) == (0, 1)


async def test_stopped_engine_fails_running_and_new_streams() -> None:
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(source_of([prompt()]))
    await anext(stage)
    await engine.stop()
    with pytest.raises(EngineFailed):
        await anext(stage)
    with pytest.raises(ServerStopping):
        await generated(engine, prompt())
    assert (engine.running, len(engine.prompts)) == (0, 1)


@pytest.mark.parametrize("taken", range(4))
async def test_cancelling_at_any_frame_ends_the_generation(taken: int) -> None:
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(source_of([prompt()]))
    for _ in range(1 + taken):
        await anext(stage)
    assert await engine.cancel("resp_1")
    assert (engine.running, engine.aborted) == (0, 1)
    assert [frame async for frame in stage] == [frames.GenerationFinished("cancelled", 0, 0.0)]
    assert not await engine.cancel("resp_1")
    assert engine.aborted == 1


async def test_cancelling_wakes_a_slow_engine() -> None:
    engine = ScriptedEngine(Script(TOKENS, latency=60))
    reading = asyncio.create_task(generated(engine, prompt()))
    while not engine.running:
        await asyncio.sleep(0)
    assert await engine.cancel("resp_1")
    assert (await asyncio.wait_for(reading, 120))[1:] == [frames.GenerationFinished("cancelled", 0, 0.0)]


async def test_only_a_running_response_can_be_cancelled() -> None:
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(source_of([prompt(sampling=frames.Sampling(0.0, 1.0, 2))]))
    await anext(stage)
    assert not await engine.cancel("resp_2")
    sequence = [frame async for frame in stage]
    assert [frame.reason for frame in sequence if isinstance(frame, frames.GenerationFinished)] == ["length"]
    assert not await engine.cancel("resp_1")
    assert (engine.running, engine.aborted) == (0, 0)


async def test_recording_can_be_cancelled(tmp_path: Path) -> None:
    write_frames(tmp_path / "tokens.jsonl", [frames.TokenChunk((token,)) for token in TOKENS])
    engine = TokenReplayEngine(tmp_path / "tokens.jsonl")
    async with engine.open(prompt()) as sequence:
        seen = [await anext(sequence), await anext(sequence)]
        assert await engine.cancel("resp_1")
        seen += [frame async for frame in sequence]
    assert seen == [frames.TokenChunk((11,)), frames.TokenChunk((12,)), frames.GenerationFinished("cancelled", 0, 0.0)]
    assert not await engine.cancel("resp_1")


async def test_refusal_comes_before_any_frame() -> None:
    """It can still become a status."""
    refusing = ScriptedEngine(Script(refusal=InvalidPrompt("no")))
    with pytest.raises(InvalidPrompt):
        await anext(Generate(refusing)(source_of([prompt()])))


async def test_engine_gets_the_whole_prompt() -> None:
    wanted = prompt(grammar="start: /x/", sampling=frames.Sampling(0.5, 0.9, 5, top_k=3, seed=7, logprobs=2))
    engine = ScriptedEngine(Script(TOKENS))
    await generated(engine, wanted)
    assert engine.prompts == [wanted]
