"""A stock `vllm serve` in a process of its own, asked over HTTP: the same tokens as from the engine in this process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec.structs import replace

from pipeline.errors import InvalidPrompt
from pipeline.frames import GenerationFinished, Prompt, TokenFrame
from pipeline.record import read_frames, replay
from stages.generate.endpoints import ENDPOINTS
from stages.generate.generate import Generate
from stages.generate.http import HttpEngine, start_http
from stages.harmony import HarmonyEncoding
from tests.engine.asking import last, logprobs, prompt, rename, sampled, scheduled, token_ids
from tests.engine.tiny import ARGUMENTS, CHECKPOINT, CONTEXT_LENGTH
from tests.processes import free_port
from tests.test_fixtures import CASES

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="session")]

RECORDED = [case for case in CASES if not (case / "completion.txt").exists()][:8]


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """Where the server listens; the engine waits for it."""
    port = free_port()
    command = [Path(sys.executable).with_name("vllm"), "serve", CHECKPOINT, "--host", "127.0.0.1", "--port", port]
    command += [*ARGUMENTS, "--enable-scale-out", "--structured-outputs-config.backend", "guidance"]
    command += ["--enable-prompt-tokens-details"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    log = tmp_path_factory.mktemp("vllm") / "serve.log"
    with log.open("wb") as output:
        process = subprocess.Popen([*map(str, command)], stdout=output, stderr=output, env=environment)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


@pytest_asyncio.fixture(scope="session", loop_scope="session", params=ENDPOINTS, ids=lambda endpoint: endpoint.path)
async def engine(url: str, request: pytest.FixtureRequest) -> AsyncGenerator[HttpEngine, None]:
    engine = await start_http([url], endpoints=(request.param,))
    yield engine
    await engine.close()


async def ask(engine: HttpEngine, asked: Prompt) -> list[Any]:
    async with engine.open(asked) as frames:
        return [frame async for frame in frames]


async def running(url: str) -> float:
    """Requests that the server is at, as its own metrics have it."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


async def test_the_server_is_known(engine: HttpEngine) -> None:
    """Its names, its context, its language, and that it takes grammars."""
    assert engine.models == ("tiny-gpt-oss",)
    assert (engine.context_length, engine.speaks_harmony, engine.root) == (CONTEXT_LENGTH, True, str(CHECKPOINT))
    assert [backend.grammar_fault for backend in engine._backends.all] == [None]


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
async def test_the_engine_says_what_was_recorded(folder: Path, engine: HttpEngine) -> None:
    """Greedy generation of a recorded prompt gives the recorded tokens."""
    prompts = list(read_frames(folder / "prompt.jsonl", Prompt))
    frames = [frame async for frame in Generate(engine)(replay(prompts))]
    recorded = list(read_frames(folder / "tokens.jsonl", TokenFrame))
    assert token_ids(frames) == token_ids(recorded)
    assert frames[0] == recorded[0]
    assert isinstance(frames[-1], GenerationFinished)
    assert isinstance(recorded[-1], GenerationFinished)
    assert frames[-1].reason == recorded[-1].reason


async def test_logprobs_are_those_of_the_tokens(engine: HttpEngine, encoding: HarmonyEncoding) -> None:
    """Greedy, each token is the likeliest itself."""
    frames = await ask(engine, sampled(prompt(encoding, "Say hello."), logprobs=3))
    told = logprobs(frames)
    assert len(told) == len(token_ids(frames))
    for token, logprob in zip(token_ids(frames), told, strict=True):
        assert logprob.top[0] == (token, logprob.logprob)
        assert len(logprob.top) == 3


async def test_a_grammar_is_held(engine: HttpEngine, encoding: HarmonyEncoding) -> None:
    """From the first token on."""
    asked = prompt(encoding, "Say hello.", max_tokens=40)
    from_grammar = await ask(engine, _with_grammar(asked, 'start: /[ab]{5}/ "c" <[200002]>'))
    text = encoding.decode(token_ids(from_grammar)[:-1])
    assert len(text) == 6
    assert set(text) <= set("abc")
    assert last(from_grammar).reason == "stop"
    with pytest.raises(InvalidPrompt, match="unknown name"):
        await ask(engine, _with_grammar(asked, "start: nosuch"))


def _with_grammar(asked: Prompt, grammar: str) -> Prompt:
    return replace(asked, grammar=grammar)


async def test_stop_texts_end_it(engine: HttpEngine, encoding: HarmonyEncoding) -> None:
    """The server looks for them in all that the model writes."""
    frames = await ask(engine, sampled(prompt(encoding, "Say hello."), stop=("ell",)))
    assert "ell" in encoding.decode(token_ids(frames))
    assert last(frames).reason == "stop"


async def test_the_prefix_cache_is_told_of_and_salted(engine: HttpEngine, encoding: HarmonyEncoding) -> None:
    """A second time the prompt is read from the cache, unless its salt is another one."""
    asked = scheduled(prompt(encoding, "Say hello."), cache_salt=f"salt of {id(engine)}")
    assert last(await ask(engine, asked)).cached_tokens == 0
    assert last(await ask(engine, asked)).cached_tokens > 0


async def test_leaving_and_cancelling_abort(engine: HttpEngine, encoding: HarmonyEncoding, url: str) -> None:
    """Nothing runs on in the server."""
    asked = prompt(encoding, "Never stop talking.", max_tokens=5000)
    async with engine.open(asked) as stream:
        await anext(aiter(stream))
    async with engine.open(rename(asked, "resp_other")) as stream:
        seen: list[Any] = [await anext(aiter(stream))]
        assert await engine.cancel("resp_other")
        seen += [frame async for frame in stream]
    assert last(seen).reason == "cancelled"
    async with asyncio.timeout(60):
        while await running(url):
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("unknown", [250_000, 2**40])
async def test_ids_that_nobody_knows_are_refused(engine: HttpEngine, encoding: HarmonyEncoding, unknown: int) -> None:
    """The server itself refuses them, and lives."""
    asked = prompt(encoding, "Say hello.")
    with pytest.raises(InvalidPrompt, match="out of vocabulary"):
        await ask(engine, replace(asked, token_ids=(5, unknown)))
    assert token_ids(await ask(engine, asked))
