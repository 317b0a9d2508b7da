"""A stock `vllm serve` in a process of its own, over HTTP: the same tokens as from the engine in this process."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from msgspec.structs import replace

from penstock.pipeline.core import source_of
from penstock.pipeline.errors import InvalidPrompt
from penstock.pipeline.frames import GenerationFinished, Prompt, TokenFrame
from penstock.pipeline.recordings.format import read_frames
from penstock.services.engines.http_endpoints import ENDPOINTS
from penstock.services.engines.vllm import VllmEngine
from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from penstock.stages.generate import Generate
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.engine_requests import ON_SHARED_ENGINE, prompt, rename, sampled, scheduled
from tests.support.event_streams import generate, last, logprobs, token_ids
from tests.support.fixture_cases import HARMONY_CASES
from tests.support.processes import PATIENCE, free_port, running_process
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT, CONTEXT_LENGTH

pytestmark = ON_SHARED_ENGINE

GAUGES = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
RECORDED = [case for case in HARMONY_CASES if not (case / "completion.txt").exists()][:8]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """A ``vllm serve``."""
    url = f"http://127.0.0.1:{free_port()}"
    options = ("--structured-outputs-config.backend=guidance", "--enable-prompt-tokens-details", "--enable-scale-out")
    command: list[str | Path] = [Path(sys.executable).with_name("vllm"), "serve", CHECKPOINT, *ARGUMENTS, *options]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    with running_process(command, f"{url}/health", tmp_path_factory.mktemp("vllm") / "serve.log"):
        yield url


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=ENDPOINTS, ids=lambda endpoint: endpoint.path)
async def elsewhere(url: str, request: pytest.FixtureRequest) -> AsyncGenerator[VllmHttpEngine, None]:
    engine = await start_vllm_http([url], endpoints=(request.param,))
    yield engine
    await engine.close()


async def ask(elsewhere: VllmHttpEngine, wanted: Prompt) -> list[Any]:
    async with elsewhere.open(wanted) as frames:
        return [frame async for frame in frames]


async def running(url: str) -> float:
    """Count the running and waiting requests in the server's metrics."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    counted = [float(line.split()[-1]) for line in lines if line.startswith(GAUGES)]
    assert len(counted) == len(GAUGES)
    return sum(counted)


async def test_server_is_described(elsewhere: VllmHttpEngine) -> None:
    assert elsewhere.models == ("tiny-gpt-oss",)
    described = (elsewhere.context_length, elsewhere.speaks_harmony, elsewhere.root)
    assert described == (CONTEXT_LENGTH, True, str(CHECKPOINT))
    assert [replica.grammar_fault for replica in elsewhere.replicas.all] == [None]


@pytest.mark.parametrize("folder", RECORDED, ids=lambda folder: folder.name)
async def test_greedy_tokens_equal_the_recording(folder: Path, elsewhere: VllmHttpEngine) -> None:
    prompts = list(read_frames(folder / "prompt.jsonl", Prompt))
    frames = [frame async for frame in Generate(elsewhere)(source_of(prompts))]
    recorded = list(read_frames(folder / "tokens.jsonl", TokenFrame))
    assert token_ids(frames) == token_ids(recorded)
    assert frames[0] == recorded[0]
    assert isinstance(frames[-1], GenerationFinished)
    assert isinstance(recorded[-1], GenerationFinished)
    assert frames[-1].reason == recorded[-1].reason


async def test_http_engine_equals_the_engine_in_process(elsewhere: VllmHttpEngine, engine: VllmEngine) -> None:
    for text in ("Say hello.", "What is the weather in Paris?", "Count from 1 to 100."):
        wanted = sampled(prompt(text, max_tokens=60), logprobs=2)
        there, here = await ask(elsewhere, wanted), await generate(engine, wanted)
        assert token_ids(there) == token_ids(here)
        assert last(there).reason == last(here).reason
        for one, other in zip(logprobs(there), logprobs(here), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=0.05)
            assert one.top[0][0] == other.top[0][0]


async def test_chosen_tokens_are_those_of_the_engine_in_process(elsewhere: VllmHttpEngine, engine: VllmEngine) -> None:
    chosen = tuple(range(1000, 1128))
    wanted = sampled(prompt("Choose.", max_tokens=1), logprobs=0, logprob_token_ids=chosen)
    [there], [here] = logprobs(await ask(elsewhere, wanted)), logprobs(await generate(engine, wanted))
    assert set(chosen) <= dict(there.top).keys() == dict(here.top).keys()
    assert dict(there.top) == pytest.approx(dict(here.top), abs=0.05)


async def test_grammar_is_enforced_from_the_first_token(elsewhere: VllmHttpEngine) -> None:
    wanted = prompt("Say hello.", max_tokens=40)
    from_grammar = await ask(elsewhere, _with_grammar(wanted, 'start: /[ab]{5}/ "c" <[200002]>'))
    text = load_encoding().decode(token_ids(from_grammar)[:-1])
    assert len(text) == 6
    assert set(text) <= set("abc")
    assert last(from_grammar).reason == "stop"
    with pytest.raises(InvalidPrompt, match="unknown name"):
        await ask(elsewhere, _with_grammar(wanted, "start: nosuch"))


def _with_grammar(wanted: Prompt, grammar: str) -> Prompt:
    return replace(wanted, grammar=grammar)


async def test_prefix_cache_is_reported_and_salted(elsewhere: VllmHttpEngine) -> None:
    wanted, salt = prompt("Pepper. " * 300, max_tokens=1), f"salt of {id(elsewhere)}"
    salted = [scheduled(wanted, cache_salt=one) for one in (salt, salt, f"another {salt}")]
    cached = [last(await ask(elsewhere, each)).cached_tokens for each in salted]
    assert [bool(tokens) for tokens in cached] == [False, True, False]


async def test_leaving_and_cancelling_abort_the_request(elsewhere: VllmHttpEngine, url: str) -> None:
    wanted = prompt("Never stop talking.", max_tokens=None)
    async with elsewhere.open(wanted) as stream:
        await anext(aiter(stream))
    async with elsewhere.open(rename(wanted, "resp_other")) as stream:
        seen: list[Any] = [await anext(aiter(stream))]
        assert await elsewhere.cancel("resp_other")
        seen += [frame async for frame in stream]
    assert last(seen).reason == "cancelled"
    async with asyncio.timeout(PATIENCE):
        while await running(url):
            await asyncio.sleep(0.2)


@pytest.mark.parametrize("unknown", [250_000, 2**40])
async def test_unknown_token_ids_are_refused(elsewhere: VllmHttpEngine, unknown: int) -> None:
    wanted = prompt("Say hello.")
    with pytest.raises(InvalidPrompt, match="out of vocabulary"):
        await ask(elsewhere, replace(wanted, token_ids=(5, unknown)))
    assert token_ids(await ask(elsewhere, wanted))
