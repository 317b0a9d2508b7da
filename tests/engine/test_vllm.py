"""vLLM in this process, with a real model: what the engine adapter promises, and what the fixtures recorded."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import pytest_asyncio

from pipeline.errors import ContextTooLong, EngineDead, EngineFailed, EngineOverloaded, InvalidPrompt
from pipeline.frames import EngineFrame, GenerationFinished, Prompt, Sampling, TokenChunk, TokenFrame
from pipeline.record import read_frames, replay, write_frames
from stages.generate.generate import Generate
from stages.generate.vllm import VllmEngine, start_vllm
from stages.harmony import STOP_TOKENS, VOCABULARY_SIZE, HarmonyEncoding
from tests.engine.tiny import ARGUMENTS, CHECKPOINT, CONTEXT_LENGTH
from tests.serving import serving
from tests.streams import final, read_sse
from tests.test_fixtures import CASES

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn
]

QUEUE = 12
RECORDED = [case for case in CASES if not (case / "completion.txt").exists()]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncGenerator[VllmEngine, None]:
    engine = start_vllm(str(CHECKPOINT), [*ARGUMENTS, f"--max-num-queued-reqs={QUEUE}"])
    yield engine
    await engine.close()


def prompt(encoding: HarmonyEncoding, text: str, name: str = "greeting", max_tokens: int | None = 200) -> Prompt:
    """A fixture's prompt with another last user message."""
    recorded: Prompt
    (recorded,) = read_frames(CASES[0].parent / name / "prompt.jsonl", Prompt)
    head = encoding.decode(recorded.token_ids).split("<|start|>user")[0]
    tokens = encoding.encode_markup(f"{head}<|start|>user<|message|>{text}<|end|><|start|>assistant")
    return msgspec.structs.replace(recorded, token_ids=tuple(tokens), sampling=Sampling(0.0, 1.0, max_tokens))


async def generate(engine: VllmEngine, prompt: Prompt, *, pause: float = 0.0) -> list[EngineFrame]:
    frames = []
    async with engine.open(prompt) as stream:
        async for frame in stream:
            frames.append(frame)
            await asyncio.sleep(pause)
    return frames


def token_ids(frames: Iterable[Any]) -> list[int]:
    return [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]


async def until_idle(engine: VllmEngine) -> None:
    async with asyncio.timeout(5):
        while engine._llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
async def test_the_engine_says_what_was_recorded(
    folder: Path, engine: VllmEngine, request: pytest.FixtureRequest
) -> None:
    """Greedy generation of a recorded prompt gives the recorded tokens; ``--regen`` records them anew."""
    prompts = list(read_frames(folder / "prompt.jsonl", Prompt))
    stage = Generate(engine)(replay(prompts))
    frames = [frame async for frame in stage]
    if request.config.getoption("--regen"):
        write_frames(folder / "tokens.jsonl", frames)
    recorded = list(read_frames(folder / "tokens.jsonl", TokenFrame))
    assert token_ids(frames) == token_ids(recorded)
    assert frames[0] == recorded[0]
    assert isinstance(frames[-1], GenerationFinished)
    assert frames[-1].reason == recorded[-1].reason


async def test_the_stop_token_comes_along(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """Every token is passed on, the one that ends the turn included."""
    frames = await generate(engine, prompt(encoding, "Say hello."))
    assert token_ids(frames)[-1] == STOP_TOKENS[0]
    finished = frames[-1]
    assert isinstance(finished, GenerationFinished)
    assert finished.reason == "stop"
    assert finished.duration > 0


async def test_a_slow_reader_gets_every_token(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """Tokens that came while nobody read arrive together, and none is missing (defects 9, B10)."""
    asked = prompt(encoding, "Count from 1 to 100.", max_tokens=500)
    quick, slow = await generate(engine, asked), await generate(engine, asked, pause=0.1)
    assert token_ids(quick) == token_ids(slow)
    assert len(slow) < len(quick)
    assert max(len(frame.token_ids) for frame in slow if isinstance(frame, TokenChunk)) > 1


async def test_the_limit_ends_a_generation(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """``max_tokens`` is kept, and told as the reason."""
    frames = await generate(engine, prompt(encoding, "Never stop talking.", max_tokens=20))
    assert len(token_ids(frames)) == 20
    assert isinstance(frames[-1], GenerationFinished)
    assert frames[-1].reason == "length"


async def test_leaving_aborts(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """Whoever leaves the block in the middle leaves no request behind in the engine."""
    async with engine.open(prompt(encoding, "Never stop talking.", max_tokens=5000)) as stream:
        await anext(aiter(stream))
    await until_idle(engine)


async def test_cancelling_aborts(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """A cancelled task leaves no request behind in the engine."""
    task = asyncio.create_task(generate(engine, prompt(encoding, "Never stop talking.", max_tokens=5000)))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until_idle(engine)


async def test_a_client_that_leaves_aborts_the_engine(
    engine: VllmEngine, encoding: HarmonyEncoding, tmp_path: Path
) -> None:
    """From the socket to the engine: a closed connection frees the engine within a second (defect 31)."""
    async with serving(engine, encoding, tmp_path) as served:
        body = {"input": "Never stop talking.", "stream": True}
        answer = await served.client.post(f"{served.url}/v1/responses", json=body)
        await answer.content.readline()
        assert engine._llm.get_num_unfinished_requests() == 1
        answer.close()
        await asyncio.wait_for(until_idle(engine), 1)


async def test_stopping_ends_what_runs(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """Every generation that runs when the engine is stopped fails at once, and leaves no request behind."""
    asked = prompt(encoding, "Never stop talking.", max_tokens=5000)
    tasks = [asyncio.create_task(generate(engine, rename(asked, f"resp_{number}"))) for number in range(3)]
    await asyncio.sleep(0.5)
    await engine.stop()
    ends = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 2)
    assert [type(end) for end in ends] == [EngineFailed] * 3
    await until_idle(engine)


async def test_impossible_prompts_never_reach_the_engine(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """A prompt as long as the context, an empty one, or an id beyond the vocabulary are refused; others go on."""
    good = prompt(encoding, "Say hello.")
    for tokens, error in (
        ([5] * CONTEXT_LENGTH, ContextTooLong),
        ([], InvalidPrompt),
        ([5, VOCABULARY_SIZE], InvalidPrompt),
        ([-1], InvalidPrompt),
    ):
        bad = msgspec.structs.replace(good, token_ids=tuple(tokens))
        with pytest.raises(error):
            await anext(Generate(engine)(replay([bad])))
    assert token_ids(await generate(engine, good))


async def test_what_vllm_refuses_is_an_invalid_prompt(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """The refusals of vLLM itself come before the stream begins, as our error."""
    refused = msgspec.structs.replace(prompt(encoding, "Say hello."), sampling=Sampling(-1.0, 1.0, 10))
    with pytest.raises(InvalidPrompt):
        await generate(engine, refused)


async def test_a_full_queue_is_overload(engine: VllmEngine, encoding: HarmonyEncoding) -> None:
    """Beyond vLLM's limit of queued requests the answer is to come again, and those inside go on."""
    asked = prompt(encoding, "Never stop talking.", max_tokens=100)
    inside = [asyncio.create_task(generate(engine, rename(asked, f"resp_{number}"))) for number in range(QUEUE)]
    await asyncio.sleep(0.2)
    with pytest.raises(EngineOverloaded):
        await generate(engine, rename(asked, "resp_outside"))
    assert {len(token_ids(frames)) for frames in await asyncio.gather(*inside)} == {100}


def rename(asked: Prompt, response_id: str) -> Prompt:
    return msgspec.structs.replace(asked, response=msgspec.structs.replace(asked.response, id=response_id))


async def test_zz_a_dead_engine_is_told(engine: VllmEngine, encoding: HarmonyEncoding, tmp_path: Path) -> None:
    """Killing the worker in mid-stream is one response.failed, and health says so; last, as nothing works after it."""
    async with serving(engine, encoding, tmp_path) as served:
        reading = asyncio.create_task(served.stream({"input": "Never stop talking."}))
        await asyncio.sleep(0.5)
        for child in psutil.Process().children(recursive=True):
            if "EngineCore" in " ".join(child.cmdline()) or "EngineCore" in child.name():
                os.kill(child.pid, signal.SIGKILL)
        response = final(read_sse(await asyncio.wait_for(reading, 20)))
        assert response.status == "failed"
        assert response.error is not None
        assert response.error.code == "server_error"
        assert (await served.get("/health"))[0] == 503
        assert (await served.post({"input": "Hi"}))[0] == 503
    with pytest.raises(EngineDead):
        await generate(engine, prompt(encoding, "Say hello."))
