"""A soak of servers that are killed: ``penstock usage`` agrees to the token with the sum of all responses.

Hours last a second here, so that rows become sums while servers write them, and die.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock.api.runs import housekeeping
from penstock.extensions.accounts import ledger
from penstock.extensions.accounts.command import main
from penstock.services.store.store import Store
from tests.support.server_process import ServerProcess, serve_script, serving_process
from tests.support.stored_responses import expire_heartbeat
from tests.support.stores import open_store

pytestmark = pytest.mark.io

ALICE = "sk-alice-0123456789"
CLIENTS = 6
UNENDED = "select count(*) from responses where ended_at is null"

TOKENS = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")


def serve_with_short_hours(*arguments: str) -> None:
    ledger.HOUR, housekeeping.PERIOD = 1, 0.3
    serve_script(*arguments)


@asynccontextmanager
async def two_servers(store_at: str, folder: Path) -> AsyncIterator[list[ServerProcess]]:
    (keys := folder / "keys").write_text(f"{ALICE} name=alice team=red\n")
    keys.chmod(0o600)
    quick = ("--heartbeat", "0.2", "--stale-after", "3600", "--no-sandbox", "--resume-interrupted")
    known = ("brisk", *quick, "--api-key-file", str(keys))
    async with AsyncExitStack() as stack:
        opened = (serving_process(serve_with_short_hours, known, store_at, folder) for _ in range(2))
        servers = [await stack.enter_async_context(each) for each in opened]
        for server in servers:
            server.client.headers["Authorization"] = f"Bearer {ALICE}"
        yield servers


async def ask_until(stopped: asyncio.Event, servers: list[ServerProcess], seed: int, known: dict[str, Any]) -> None:
    """Ask the servers for stored responses in all ways; remember those that were whole."""
    chance = random.Random(seed)
    while not stopped.is_set():
        server = chance.choice(servers)
        body = {"input": "Hi " * chance.randint(1, 40), "background": chance.random() < 0.4}
        try:
            _, answer = await server.post(body)
        except (aiohttp.ClientError, AssertionError):  # it is down, or starts
            await asyncio.sleep(0.05)
            continue
        if chance.random() < 0.2 and "id" in answer:
            with suppress(aiohttp.ClientError, AssertionError):
                _, answer = await server.cancel(answer["id"])
        if answer.get("status") == "completed":
            known[answer["id"]] = answer["usage"]


async def all_ended(store: Store) -> None:
    async with asyncio.timeout(240):
        while (await store.context.read(UNENDED))[0][0]:
            await asyncio.sleep(0.1)


def tokens_in(usage: Any) -> Counter[str]:
    """Return the tokens of the usage in a response, with one request."""
    if usage is None:
        return Counter(requests=1)
    read, written = usage["input_tokens_details"]["cached_tokens"], usage["output_tokens_details"]["reasoning_tokens"]
    counts = (usage["input_tokens"], read, usage["output_tokens"], written)
    return Counter(dict(zip(TOKENS, counts, strict=True)) | {"requests": 1})


@pytest.mark.parametrize("kills", [3, pytest.param(25, marks=pytest.mark.long)])
async def test_usage_is_the_sum_of_all_responses(
    store_at: str, tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ledger, "HOUR", 1)
    known, chance, stopped = dict[str, Any](), random.Random(kills), asyncio.Event()
    async with two_servers(store_at, tmp_path) as servers, open_store(store_at) as store:
        asking = [asyncio.create_task(ask_until(stopped, servers, seed, known)) for seed in range(CLIENTS)]
        for _ in range(kills):
            await asyncio.sleep(chance.uniform(0.3, 1.5))
            victim = chance.choice(servers)
            await victim.kill()
            await expire_heartbeat(store, victim.url)
            await victim.start()
        stopped.set()
        await asyncio.gather(*asking)
        await all_ended(store)
        rows = await store.context.read("select id, response from responses")
    usages = {name: json.loads(text)["usage"] for name, text in rows}
    assert known
    assert {name: usages[name] for name in known} == known
    expected = sum(map(tokens_in, usages.values()), Counter[str]())
    await asyncio.to_thread(main, ["--store", store_at, "--by", "key,team", "--since", "1d", "--json"])
    (used,) = json.loads(capsys.readouterr().out)
    assert (used["key"], used["team"]) == ("alice", "red")
    assert {name: used[name] for name in (*TOKENS, "requests")} == {
        name: expected[name] for name in (*TOKENS, "requests")
    }
    async with open_store(store_at) as store:
        ((added_up,),) = await store.context.read("select sum(requests) from ledger_hours")
        assert added_up > 0
