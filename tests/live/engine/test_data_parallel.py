"""A stock `vllm serve` with two engine cores behind one address, over HTTP."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import AsyncExitStack, closing
from pathlib import Path

import aiohttp
import msgspec
import pytest

from penstock.pipeline.frames import Prompt
from penstock.services.engines.affinity import Ranking
from penstock.services.engines.kv_events import KvEvents
from penstock.services.engines.vllm_http import start_vllm_http
from tests.support.api_clients import wait_until
from tests.support.event_streams import generate, last, token_ids
from tests.support.fake_vllm import prompt_for_fakes
from tests.support.paths import TINY_QWEN
from tests.support.processes import PATIENCE, free_port, running_process
from tests.support.tiny_engine import ARGUMENTS

BLOCK = 32
OPTIONS = (
    *("--served-model-name=tiny-qwen", "--data-parallel-size=2", "--enable-scale-out"),
    *("--enable-prompt-tokens-details", f"--block-size={BLOCK}"),
)
METRIC = r'^vllm:{name}\{{.*engine="(\d)".*\}} (\S+)$'
TOKENS = 5000
LENGTHS = 4000, 5500, 7000
"""Tokens of a conversation's turns: more work than a generation, which a load of a second ago may still count."""


@pytest.fixture(scope="module")
def events() -> str:
    """The address of the KV events of the first rank."""
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, events: str) -> Generator[str, None, None]:
    """A ``vllm serve`` of a dense model: on a CPU, vLLM cannot run mixtures of experts data parallel."""
    url = f"http://127.0.0.1:{free_port()}"
    config = {
        "enable_kv_cache_events": True,
        "endpoint": events.replace("127.0.0.1", "*"),
        "replay_endpoint": f"tcp://127.0.0.1:{free_port()}",
    }
    command: list[str | Path] = [Path(sys.executable).with_name("vllm"), "serve", TINY_QWEN, *ARGUMENTS, *OPTIONS]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], "--kv-events-config", json.dumps(config)]
    with running_process(command, f"{url}/health", tmp_path_factory.mktemp("vllm") / "serve.log"):
        yield url


def long_prompt(number: int, tokens: int = TOKENS) -> Prompt:
    """Make a prompt whose answer has exactly this number of tokens."""
    sampling = {"max_tokens": tokens, "min_tokens": tokens}
    prompt = prompt_for_fakes(id=f"resp_{number}", model="tiny-qwen", token_ids=(5, 6, 7, 8 + number), **sampling)
    return msgspec.structs.replace(prompt, stop_token_ids=())


async def metric(url: str, name: str) -> dict[str, float]:
    """Read the value of a metric in each core."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as answer:
        found = re.findall(METRIC.format(name=name), await answer.text(), re.MULTILINE)
        return {core: float(value) for core, value in found}


async def test_generations_spread_over_the_cores_and_end_when_they_are_left(url: str) -> None:
    engine = await start_vllm_http([url])
    try:
        frames = await generate(engine, long_prompt(9, 20))
        assert (len(token_ids(frames)), last(frames).reason) == (20, "length")
        async with AsyncExitStack() as streams:
            for number in range(4):
                stream = await streams.enter_async_context(engine.open(long_prompt(number)))
                await anext(aiter(stream))
            async with asyncio.timeout(PATIENCE):
                while await metric(url, "num_requests_running") != {"0": 2.0, "1": 2.0}:
                    await asyncio.sleep(0.1)
            assert await engine.cancel("resp_0")
        async with asyncio.timeout(PATIENCE):
            while await metric(url, "num_requests_running") != {"0": 0.0, "1": 0.0}:
                # A core reports its numbers when it ends a step, so an idle one may show those before the last abort.
                await asyncio.gather(*(generate(engine, long_prompt(number, 2)) for number in (10, 11)))
        assert sum((await metric(url, "generation_tokens_total")).values()) < 4 * TOKENS
    finally:
        await engine.close()


async def test_turns_find_their_conversation_in_the_cache_of_its_rank(url: str, events: str) -> None:
    """Penstock starts twice: then it knows by events what the ranks have read before."""
    names, ranking = range(8), Ranking((url, f"{url}#1"))
    for start in range(2):
        engine = await start_vllm_http([url])
        with closing(KvEvents({url: events})) as caches:
            if start:
                engine.follow(caches)
                held = [await heard(caches, turn(name, LENGTHS[0])) for name in names]
                homes = {next(ranking.of(turn(name, 1).facts)) for name in names}
                assert {core for known in held for core in known} == homes
            for name in names:
                begun, more = LENGTHS[start : start + 2]
                first = last(await generate(engine, turn(name, begun)))
                second = last(await generate(engine, turn(name, more)))
                assert first.cached_tokens == (begun - 1) // BLOCK * BLOCK * start
                assert second.cached_tokens == begun // BLOCK * BLOCK
        await engine.close()


async def heard(caches: KvEvents, wanted: Prompt) -> Mapping[str, int]:
    """Wait until it is known where a prompt is cached."""
    await wait_until(lambda: caches.cached(wanted, None))
    return caches.cached(wanted, None) or {}


def turn(name: int, tokens: int) -> Prompt:
    """A turn of a conversation, whose earlier turns are its beginning."""
    token_ids = tuple((name * 131 + place * 7) % 400 + 20 for place in range(tokens))
    prompt = prompt_for_fakes(id=f"resp_talk_{name}", model="tiny-qwen", token_ids=token_ids, max_tokens=1)
    return msgspec.structs.replace(prompt, stop_token_ids=())
