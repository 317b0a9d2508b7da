from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline.errors import ContextTooLong, EngineDead, EngineFailed, InvalidPrompt, ServerStopping, StageError
from pipeline.frames import (
    GenerationFinished,
    GenerationStarted,
    Prompt,
    Sampling,
    TokenChunk,
    TokenFrame,
    TokenLogprob,
)
from pipeline.protocol.tools import FunctionTool, Toolset
from pipeline.record import replay, write_frames
from stages.generate.generate import Generate
from stages.generate.replay import ReplayEngine
from stages.generate.scripted import Script, ScriptedEngine
from tests.support.stored_responses import response

TOKENS = (11, 12, 13, 14, 15)
LOGPROBS = tuple(TokenLogprob(-float(token), ((token, -float(token)), (1, -99.0))) for token in TOKENS)


def prompt(**fields: Any) -> Prompt:
    known: dict[str, Any] = {"token_ids": (1, 2, 3), "sampling": Sampling(0.0, 1.0)}
    return Prompt(response=response(), input=(), stop_token_ids=(), **(known | fields))


async def generated(engine: ScriptedEngine, asked: Prompt) -> list[TokenFrame]:
    return [frame async for frame in Generate(engine)(replay([asked]))]


async def test_the_first_frame_tells_of_the_request() -> None:
    """All that the stages behind need of the prompt stands in the first frame."""
    tools = Toolset((FunctionTool("f"),), choice="required")
    asked = prompt(tools=tools, raw_messages=({"role": "user"},), sampling=Sampling(0.0, 1.0, stop=("END",)))
    first, *_ = await generated(ScriptedEngine(), asked)
    assert first == GenerationStarted(asked.response, (), 3, tools, ("END",), ({"role": "user"},))


async def test_the_first_frame_says_whether_there_is_a_grammar() -> None:
    """Whoever reads the tokens knows whether anything was promised of them."""
    for grammar in (None, "start: /x/"):
        first, *_ = await generated(ScriptedEngine(), prompt(grammar=grammar))
        assert isinstance(first, GenerationStarted)
        assert first.held_to_grammar is (grammar is not None)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 9])
async def test_logprobs_go_with_their_tokens(chunk_size: int) -> None:
    """However tokens are chunked, each keeps its own logprob."""
    engine = ScriptedEngine(Script(TOKENS, chunk_size=chunk_size, logprobs=LOGPROBS))
    chunks = [
        frame
        for frame in await generated(engine, prompt(sampling=Sampling(0.0, 1.0, logprobs=1)))
        if isinstance(frame, TokenChunk)
    ]
    told = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.logprobs, strict=True)]
    assert told == list(zip(TOKENS, LOGPROBS, strict=True))


async def test_no_logprobs_are_told_unasked() -> None:
    """Nobody pays for what nobody asked for."""
    frames = await generated(ScriptedEngine(Script(TOKENS, logprobs=LOGPROBS)), prompt())
    assert [frame.logprobs for frame in frames if isinstance(frame, TokenChunk)] == [()] * len(TOKENS)


@pytest.mark.parametrize(
    ("token_ids", "error"),
    [((), InvalidPrompt), ((99,), InvalidPrompt), ((-1,), InvalidPrompt), ((1,) * 10, ContextTooLong)],
)
async def test_impossible_prompts_never_reach_the_engine(token_ids: tuple[int, ...], error: type[StageError]) -> None:
    """What would kill vLLM for everybody is refused ahead of it."""
    engine = ScriptedEngine(context_length=10, vocabulary_size=50)
    with pytest.raises(error):
        await generated(engine, prompt(token_ids=token_ids))
    assert engine.prompts == []


@pytest.mark.parametrize(("asked", "given"), [(None, 7), (3, 3), (100, 7)])
async def test_the_limit_ends_with_the_context(asked: int | None, given: int) -> None:
    """An answer may fill what the prompt leaves of the context, and no more."""
    engine = ScriptedEngine(Script((5,), endless=True), context_length=10)
    *_, end = await generated(engine, prompt(sampling=Sampling(0.0, 1.0, asked)))
    assert engine.prompts[0].sampling.max_tokens == given
    assert isinstance(end, GenerationFinished)
    assert end.reason == "length"


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("dies", [False, True])
async def test_engines_fail_at_any_token(before: int, dies: bool) -> None:
    """Tokens that came ahead of a failure are passed on, then the failure; nothing is left running."""
    error = EngineDead("dead") if dies else EngineFailed("failed")
    engine = ScriptedEngine(Script(TOKENS[:before], error=error, dies=dies))
    seen: list[TokenFrame] = []
    with pytest.raises(type(error)):
        async for frame in Generate(engine)(replay([prompt()])):
            seen.append(frame)  # noqa: PERF401 - the loop ends by its error
    assert len(seen) == 1 + before
    assert (engine.running, engine.is_alive) == (0, not dies)


@pytest.mark.parametrize("taken", range(4))
async def test_leaving_at_any_frame_aborts(taken: int) -> None:
    """A consumer that leaves ends the generation, wherever it was."""
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(replay([prompt()]))
    for _ in range(1 + taken):
        await anext(stage)
    await stage.aclose()
    assert (engine.running, engine.aborted) == (0, 1)


async def test_stopping_fails_what_runs() -> None:
    """A stopped engine ends its streams as failed, and takes no prompt any more."""
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(replay([prompt()]))
    await anext(stage)
    await engine.stop()
    with pytest.raises(EngineFailed):
        await anext(stage)
    with pytest.raises(ServerStopping):
        await generated(engine, prompt())
    assert (engine.running, len(engine.prompts)) == (0, 1)


@pytest.mark.parametrize("taken", range(4))
async def test_cancelling_at_any_frame_ends_in_good_order(taken: int) -> None:
    """A cancelled generation leaves the engine before anybody reads on, and its last frame says why it ended."""
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(replay([prompt()]))
    for _ in range(1 + taken):
        await anext(stage)
    assert await engine.cancel("resp_1")
    assert (engine.running, engine.aborted) == (0, 1)
    assert [frame async for frame in stage] == [GenerationFinished("cancelled", 0, 0.0)]
    assert not await engine.cancel("resp_1")
    assert engine.aborted == 1


async def test_cancelling_wakes_a_slow_engine() -> None:
    """However long the engine would take for the next token, a cancelled generation ends at once."""
    engine = ScriptedEngine(Script(TOKENS, latency=60))
    reading = asyncio.create_task(generated(engine, prompt()))
    while not engine.running:
        await asyncio.sleep(0)
    assert await engine.cancel("resp_1")
    assert (await asyncio.wait_for(reading, 120))[1:] == [GenerationFinished("cancelled", 0, 0.0)]


async def test_only_what_runs_can_be_cancelled() -> None:
    """Neither another response nor one that is over is cancelled."""
    engine = ScriptedEngine(Script(TOKENS, endless=True))
    stage = Generate(engine)(replay([prompt(sampling=Sampling(0.0, 1.0, 2))]))
    await anext(stage)
    assert not await engine.cancel("resp_2")
    frames = [frame async for frame in stage]
    assert [frame.reason for frame in frames if isinstance(frame, GenerationFinished)] == ["length"]
    assert not await engine.cancel("resp_1")
    assert (engine.running, engine.aborted) == (0, 0)


async def test_a_recording_can_be_cancelled(tmp_path: Path) -> None:
    """A recorded generation ends in good order as well, behind what it has said."""
    write_frames(tmp_path / "tokens.jsonl", [TokenChunk((token,)) for token in TOKENS])
    engine = ReplayEngine(tmp_path / "tokens.jsonl")
    async with engine.open(prompt()) as frames:
        said = [await anext(frames), await anext(frames)]
        assert await engine.cancel("resp_1")
        said += [frame async for frame in frames]
    assert said == [TokenChunk((11,)), TokenChunk((12,)), GenerationFinished("cancelled", 0, 0.0)]
    assert not await engine.cancel("resp_1")


async def test_a_refusal_comes_ahead_of_any_frame() -> None:
    """What the engine does not accept can still be answered with a status."""
    refusing = ScriptedEngine(Script(refusal=InvalidPrompt("no")))
    with pytest.raises(InvalidPrompt):
        await anext(Generate(refusing)(replay([prompt()])))


async def test_the_engine_sees_the_whole_prompt() -> None:
    """Grammar, sampling and scheduling reach the engine as they were rendered."""
    asked = prompt(grammar="start: /x/", sampling=Sampling(0.5, 0.9, 5, top_k=3, seed=7, logprobs=2))
    engine = ScriptedEngine(Script(TOKENS))
    await generated(engine, asked)
    assert engine.prompts == [msgspec.structs.replace(asked)]
