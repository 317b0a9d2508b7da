from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.pipeline import frames
from penstock.pipeline.core import source_of
from penstock.pipeline.errors import ContextTooLong, EngineDead, EngineFailed, InvalidPrompt, ServerStopping, StageError
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.pipeline.recordings.format import write_frames
from penstock.stages.generate import Generate
from penstock.stages.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.services.engines.token_replay import TokenReplayEngine
from tests.support.stored_responses import facts, pop_fields

TOKENS = (11, 12, 13, 14, 15)
LOGPROBS = tuple(frames.TokenLogprob(-float(token), ((token, -float(token)), (1, -99.0))) for token in TOKENS)


def prompt(**fields: Any) -> frames.Prompt:
    of_request = pop_fields(frames.RequestFacts, fields)
    known: dict[str, Any] = {"token_ids": (1, 2, 3), "stop_token_ids": ()}
    return frames.Prompt(facts(**of_request), **(known | fields))


async def generated(engine: ScriptedEngine, asked: frames.Prompt) -> list[frames.TokenFrame]:
    return [frame async for frame in Generate(engine)(source_of([asked]))]


async def test_first_frame_describes_the_request() -> None:
    tools = Toolset((FunctionTool("f"),), choice="required")
    asked = prompt(tools=tools, raw_messages=({"role": "user"},), sampling=frames.Sampling(0.0, 1.0, stop=("END",)))
    first, *_ = await generated(ScriptedEngine(), asked)
    assert first == frames.GenerationStarted(asked.facts, 3, ({"role": "user"},))


async def test_first_frame_says_if_there_is_a_grammar() -> None:
    """The parser needs to know if the turn was constrained."""
    for grammar in (None, "start: /x/"):
        first, *_ = await generated(ScriptedEngine(), prompt(grammar=grammar))
        assert isinstance(first, frames.GenerationStarted)
        assert first.held_to_grammar is (grammar is not None)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 9])
async def test_logprobs_stay_with_their_tokens(chunk_size: int) -> None:
    """They do so for any chunk size."""
    engine = ScriptedEngine(Script(TOKENS, chunk_size=chunk_size, logprobs=LOGPROBS))
    chunks = [
        frame
        for frame in await generated(engine, prompt(sampling=frames.Sampling(0.0, 1.0, logprobs=1)))
        if isinstance(frame, frames.TokenChunk)
    ]
    told = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]
    assert told == list(zip(TOKENS, LOGPROBS, strict=True))


async def test_logprobs_are_sent_only_if_requested() -> None:
    """Otherwise they would cost time."""
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


@pytest.mark.parametrize(("asked", "given"), [(None, 7), (3, 3), (100, 7)])
async def test_token_limit_is_the_rest_of_the_context(asked: int | None, given: int) -> None:
    """An answer may fill the context after the prompt, but no more."""
    engine = ScriptedEngine(Script((5,), endless=True), context_length=10)
    *_, end = await generated(engine, prompt(sampling=frames.Sampling(0.0, 1.0, asked)))
    assert engine.prompts[0].facts.sampling.max_tokens == given
    assert isinstance(end, frames.GenerationFinished)
    assert end.reason == "length"


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("dies", [False, True])
async def test_engine_may_fail_at_any_token(before: int, dies: bool) -> None:
    """Tokens before a failure are passed on, then the failure; nothing is left running."""
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
    """A consumer that leaves ends the generation."""
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(source_of([prompt()]))
    for _ in range(1 + taken):
        await anext(stage)
    await stage.aclose()
    assert (engine.running, engine.aborted) == (0, 1)


async def test_stopped_engine_fails_running_streams() -> None:
    """It takes no prompt any more."""
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
    """It leaves the engine before the next read, and its last frame has the reason."""
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
    """A cancelled generation ends without waiting for the next token."""
    engine = ScriptedEngine(Script(TOKENS, latency=60))
    reading = asyncio.create_task(generated(engine, prompt()))
    while not engine.running:
        await asyncio.sleep(0)
    assert await engine.cancel("resp_1")
    assert (await asyncio.wait_for(reading, 120))[1:] == [frames.GenerationFinished("cancelled", 0, 0.0)]


async def test_only_a_running_response_can_be_cancelled() -> None:
    """Another or a finished response is not cancelled."""
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(source_of([prompt(sampling=frames.Sampling(0.0, 1.0, 2))]))
    await anext(stage)
    assert not await engine.cancel("resp_2")
    sequence = [frame async for frame in stage]
    assert [frame.reason for frame in sequence if isinstance(frame, frames.GenerationFinished)] == ["length"]
    assert not await engine.cancel("resp_1")
    assert (engine.running, engine.aborted) == (0, 0)


async def test_recording_can_be_cancelled(tmp_path: Path) -> None:
    """A replayed generation ends with a final frame as well."""
    write_frames(tmp_path / "tokens.jsonl", [frames.TokenChunk((token,)) for token in TOKENS])
    engine = TokenReplayEngine(tmp_path / "tokens.jsonl")
    async with engine.open(prompt()) as sequence:
        said = [await anext(sequence), await anext(sequence)]
        assert await engine.cancel("resp_1")
        said += [frame async for frame in sequence]
    assert said == [frames.TokenChunk((11,)), frames.TokenChunk((12,)), frames.GenerationFinished("cancelled", 0, 0.0)]
    assert not await engine.cancel("resp_1")


async def test_refusal_comes_before_any_frame() -> None:
    """It can still become a status."""
    refusing = ScriptedEngine(Script(refusal=InvalidPrompt("no")))
    with pytest.raises(InvalidPrompt):
        await anext(Generate(refusing)(source_of([prompt()])))


async def test_engine_gets_the_whole_prompt() -> None:
    """Grammar, sampling and scheduling reach the engine as they were rendered."""
    asked = prompt(grammar="start: /x/", sampling=frames.Sampling(0.5, 0.9, 5, top_k=3, seed=7, logprobs=2))
    engine = ScriptedEngine(Script(TOKENS))
    await generated(engine, asked)
    assert engine.prompts == [msgspec.structs.replace(asked)]
