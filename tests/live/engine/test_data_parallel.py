"""A stock `vllm serve` with two engine cores behind one address, over HTTP."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Generator
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest

from penstock.pipeline.frames import Prompt
from penstock.services.engines.vllm_http import start_vllm_http
from tests.support.event_streams import generate, last, token_ids
from tests.support.fake_vllm import prompt_for_fakes
from tests.support.paths import TINY_QWEN
from tests.support.processes import PATIENCE, free_port, running_process
from tests.support.tiny_engine import ARGUMENTS

OPTIONS = ("--served-model-name=tiny-qwen", "--data-parallel-size=2", "--enable-scale-out")
METRIC = r'^vllm:{name}\{{.*engine="(\d)".*\}} (\S+)$'
TOKENS = 5000


@pytest.fixture
def url(tmp_path: Path) -> Generator[str, None, None]:
    """A ``vllm serve`` of a dense model: on a CPU, vLLM cannot run mixtures of experts data parallel."""
    url = f"http://127.0.0.1:{free_port()}"
    command: list[str | Path] = [Path(sys.executable).with_name("vllm"), "serve", TINY_QWEN, *ARGUMENTS, *OPTIONS]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
    with running_process(command, f"{url}/health", tmp_path / "serve.log"):
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
