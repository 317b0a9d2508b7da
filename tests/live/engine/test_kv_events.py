"""Two stock `vllm serve` that publish KV events: the index agrees with what the engines themselves find cached."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from penstock.pipeline.frames import Prompt, with_facts
from penstock.services.engines.kv_events import KvEvents
from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from tests.support.api_clients import wait_until
from tests.support.engine_requests import ON_SHARED_ENGINE, prompt, scheduled
from tests.support.event_streams import generate, last
from tests.support.noisy import write_noisy
from tests.support.processes import free_port, running_process
from tests.support.stored_responses import response
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

pytestmark = ON_SHARED_ENGINE

BLOCK = 32
OPTIONS = (
    "--structured-outputs-config.backend=guidance",
    "--enable-prompt-tokens-details",
    "--enable-scale-out",
    f"--block-size={BLOCK}",
    "--kv-cache-memory-bytes=16777216",  # so that it forgets soon
)
Servers = dict[str, str]
"""The addresses of the KV events of servers, by their URLs."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Generator[Servers, None, None]:
    folder, vllm = tmp_path_factory.mktemp("vllm"), Path(sys.executable).with_name("vllm")
    addresses = {f"http://127.0.0.1:{free_port()}": f"ipc://{folder / name}" for name in ("one", "other")}
    with ExitStack() as closing:
        for url, address in addresses.items():
            events = f'{{"enable_kv_cache_events": true, "endpoint": "{address}"}}'
            command: list[str | Path] = [vllm, "serve", CHECKPOINT, *ARGUMENTS, *OPTIONS, "--kv-events-config", events]
            command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
            log = folder / f"{url.rpartition(':')[2]}.log"
            closing.enter_context(running_process(command, f"{url}/health", log, {"VLLM_SERVER_DEV_MODE": "1"}))
        yield addresses


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def elsewhere(servers: Servers) -> AsyncGenerator[VllmHttpEngine, None]:
    caches = KvEvents(servers)
    engine = await start_vllm_http(list(servers))
    engine.follow(caches)
    yield engine
    await engine.close()
    caches.close()


async def answered(elsewhere: VllmHttpEngine, wanted: Prompt) -> int:
    """Generate; return the tokens of the prompt that the engine has found in its cache."""
    async with elsewhere.open(wanted) as frames:
        return last([frame async for frame in frames]).cached_tokens


async def update(url: str, checkpoint: Path, version: str, clear_cache: str) -> None:
    """Change the weights of a server, as a trainer does."""
    orders: dict[str, Any] = {
        f"/pause?mode=keep&clear_cache={clear_cache}": None,
        "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint)}},
        "/update_weight_version": {"new_version": version},
        "/resume": None,
    }
    async with aiohttp.ClientSession(url) as session:
        for path, body in orders.items():
            async with session.post(path, json=body) as answer:
                assert answer.status == 200, await answer.text()


async def read_by(url: str, wanted: Prompt) -> None:
    """Have a server read a prompt of another client."""
    body = {"model": "tiny-gpt-oss", "prompt": wanted.token_ids, "max_tokens": 1}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as answer:
        assert answer.status == 200


def turn(text: str, name: str, **scheduling: Any) -> Prompt:
    """A turn of a conversation of its own."""
    wanted = with_facts(
        prompt(text, max_tokens=4), response=response(name, model="tiny-gpt-oss", prompt_cache_key=name)
    )
    return scheduled(wanted, **scheduling)


def known(elsewhere: VllmHttpEngine, wanted: Prompt) -> dict[str, int]:
    assert elsewhere.replicas.caches
    return dict(elsewhere.replicas.caches.cached(wanted, None) or {})


def whole_blocks(wanted: Prompt) -> int:
    """Return the tokens that can be cached: an engine reads the last one always."""
    return (len(wanted.token_ids) - 1) // BLOCK * BLOCK


async def heard(elsewhere: VllmHttpEngine, wanted: Prompt, *urls: str) -> None:
    """Wait until all of a prompt is known to be at these engines, or at any."""
    await wait_until(
        lambda: (
            {url for url, tokens in known(elsewhere, wanted).items() if tokens >= whole_blocks(wanted)} >= {*urls}
            and known(elsewhere, wanted)
        )
    )


async def test_index_knows_what_the_engines_find_cached(elsewhere: VllmHttpEngine) -> None:
    for length in (1, 40, 300, 1000):
        for salt in (None, f"salt {length}"):
            wanted = turn("Pepper. " * length, f"{length} {salt}", cache_salt=salt)
            await answered(elsewhere, wanted)
            await heard(elsewhere, wanted)
            assert await answered(elsewhere, wanted) == whole_blocks(wanted)


async def test_turn_goes_to_the_engine_that_holds_it(elsewhere: VllmHttpEngine, servers: Servers) -> None:
    """Another client has had it read there, so that no conversation says where it is.

    To read so long a prompt is more work than one generation, which a load of a second ago may still count.
    """
    for number, url in enumerate(servers):
        for name in range(4):
            wanted = turn(f"Salt {number} {name}. " * 600, f"conversation {name}")
            await read_by(url, wanted)
            await heard(elsewhere, wanted, url)
            assert await answered(elsewhere, wanted) == whole_blocks(wanted)


async def test_index_forgets_what_an_engine_forgets(elsewhere: VllmHttpEngine, servers: Servers) -> None:
    first = turn("Sugar. " * 1000, "first")
    await answered(elsewhere, first)
    await heard(elsewhere, first)
    left, number = whole_blocks(first), 0
    while left > whole_blocks(first) // 2:
        number += 1
        for url in servers:  # either may hold the first, by what was known of their load
            await read_by(url, turn(f"Honey {number}. " * 1000, "other"))
        left = max(known(elsewhere, first).values(), default=0)
    assert await answered(elsewhere, first) <= left  # layers with sliding windows may have forgotten more


async def test_load_of_other_clients_is_known(elsewhere: VllmHttpEngine, servers: Servers) -> None:
    loaded = elsewhere.replicas.all[0]
    body = {"model": "tiny-gpt-oss", "prompt": [5], "max_tokens": 4000, "ignore_eos": True, "n": 3}
    async with aiohttp.ClientSession() as session:
        generating = asyncio.create_task(session.post(f"{loaded.url}/v1/completions", json=body))
        await wait_until(lambda: loaded.cores[0].load == 3)
        generating.cancel()
        await asyncio.gather(generating, return_exceptions=True)
    await wait_until(lambda: loaded.cores[0].load == 0)


async def test_cache_of_older_weights_counts_no_longer(
    elsewhere: VllmHttpEngine, servers: Servers, tmp_path: Path
) -> None:
    wanted, noisy = turn("Mint. " * 300, "mint"), write_noisy(tmp_path / "noisy", 0.15)
    await answered(elsewhere, wanted)
    await heard(elsewhere, wanted)
    for url in servers:
        await update(url, noisy, "noisy", clear_cache="true")
    end = last(await generate(elsewhere, wanted))
    assert end.cached_tokens == 0
    assert [span.version for span in end.weights] == ["noisy"]
    await heard(elsewhere, wanted)  # an event says that the cache was cleared, so what came after it stays known
    assert await answered(elsewhere, wanted) == whole_blocks(wanted)
    for url in servers:
        await update(url, CHECKPOINT, "back", clear_cache="false")
    for name in range(4):
        await answered(elsewhere, turn("Sage.", f"sage {name}"))
    versions = {replica.url: replica.weights.version for replica in elsewhere.replicas.all}
    assert "back" in versions.values()
    await wait_until(
        lambda: not any(versions[url] == "back" and tokens for url, tokens in known(elsewhere, wanted).items())
    )
