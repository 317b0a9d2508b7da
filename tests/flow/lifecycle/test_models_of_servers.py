"""Servers of different models over one store: a response runs only where its model is served."""

from __future__ import annotations

import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.api_clients import wait_until
from tests.support.server_process import ServerProcess, running_process
from tests.support.stored_responses import execute_sql, expire_heartbeat
from tests.support.stores import both_if_thorough, open_store

BIG, SMALL = "long@big", "quick@small"
"""A server that is in the middle of its first response when it ends, and one of another model."""

ENDINGS = (signal.SIGTERM, signal.SIGKILL)


@dataclass
class Servers:
    """The servers of a store, in a folder."""

    store: str
    folder: Path
    closing: AsyncExitStack

    async def start(self, model: str, *options: str) -> ServerProcess:
        return await self.closing.enter_async_context(
            running_process(self.store, self.folder, model, "--drain-timeout", "0", "--max-background", "1", *options)
        )

    async def end(self, server: ServerProcess, number: signal.Signals = signal.SIGKILL) -> None:
        """End a server; the others know that it is dead."""
        await server.kill(number)
        async with open_store(self.store) as store:
            await expire_heartbeat(store, server.url)


@pytest.fixture
async def servers(store_at: str, tmp_path: Path) -> AsyncGenerator[Servers, None]:
    async with AsyncExitStack() as closing:
        yield Servers(store_at, tmp_path, closing)


async def start_two(server: ServerProcess, model: str) -> tuple[str, str]:
    """Start a response that runs, and one that waits for its end."""
    running = await server.start_background({"model": model})
    async with server.client.get(f"{server.url}/v1/responses/{running}?stream=true") as stream:
        async for line in stream.content:
            if b"output_text.delta" in line:
                break
    return running, await server.start_background({"model": model})


async def wait_for_line(server: ServerProcess, *words: str) -> None:
    await wait_until(lambda: any(all(word in line for word in words) for line in server.log.read_text().splitlines()))


def ran_at(server: ServerProcess, response_id: str) -> bool:
    return any("In the background" in line and response_id in line for line in server.log.read_text().splitlines())


@both_if_thorough
@pytest.mark.parametrize("ending", ENDINGS)
async def test_queued_response_waits_for_a_server_of_its_model(ending: signal.Signals, servers: Servers) -> None:
    big, small = await servers.start(BIG), await servers.start(SMALL)
    running, waiting = await start_two(big, "big")
    await servers.end(big, ending)
    await wait_for_line(small, "must wait for a server of 'big'")
    assert (await small.wait_for_end(running))["status"] == "failed"
    assert (await small.get_response(waiting))["status"] == "queued"
    async with small.client.get(f"{small.url}/metrics") as metrics:
        assert "penstock_responses_unserved 1.0" in await metrics.text()
    next_one = await servers.start("quick@big")
    ended = await small.wait_for_end(waiting)
    assert (ended["status"], ended["model"]) == ("completed", "big")
    await wait_until(lambda: ran_at(next_one, waiting))
    assert not ran_at(small, waiting)


@both_if_thorough
async def test_interrupted_response_starts_over_at_a_server_of_its_model(servers: Servers) -> None:
    resuming = "--resume-interrupted"
    big, small = await servers.start(BIG, resuming), await servers.start(SMALL, resuming)
    both = await start_two(big, "big")
    await servers.end(big)
    await wait_for_line(small, "2 background responses", "must wait for a server of 'big'")
    next_one = await servers.start("quick@big", resuming)
    assert [(await small.wait_for_end(each))["status"] for each in both] == ["completed", "completed"]
    await wait_until(lambda: all(ran_at(next_one, each) for each in both))


@both_if_thorough
@pytest.mark.parametrize("options", [(), ("--resume-interrupted",)])
async def test_response_of_a_model_that_is_gone_fails_and_says_so(options: tuple[str, ...], servers: Servers) -> None:
    big = await servers.start(BIG, *options)
    running, waiting = await start_two(big, "big")
    await servers.end(big)
    small = await servers.start(SMALL, "--unserved-after", "0.5s", *options)
    gone = {"code": "server_error", "message": "No server has served 'big' for 0.5 s, which this response waited for."}
    assert (await small.wait_for_end(waiting))["error"] == gone
    interrupted = (await small.wait_for_end(running))["error"]
    assert interrupted == gone if options else "ended while it ran" in interrupted["message"]
    assert b"event: response.failed" in await small.replay(waiting)
    assert (await small.wait_for_end(await small.start_background()))["status"] == "completed"


@both_if_thorough
async def test_client_ends_a_response_that_waits_for_a_server_of_its_model(servers: Servers) -> None:
    big = await servers.start(BIG)
    conversation = await big.create_conversation()
    _, cancelled = await start_two(big, "big")
    own = {"model": "big", "conversation": conversation.rpartition("/")[2]}
    deleted = await big.start_background(own)
    await servers.end(big)
    small = await servers.start(SMALL)
    await wait_for_line(small, "must wait")
    status, refusal = await small.get(f"/v1/responses/{cancelled}?stream=true")
    assert (status, refusal["error"]["message"]) == (
        503,
        "This response waits for a server that serves 'big'. Try again later.",
    )
    status, answer = await small.cancel(cancelled)
    assert (status, answer["status"]) == (200, "cancelled")
    assert (await small.delete(f"/v1/responses/{deleted}"))[0] == 200
    assert (await small.get(f"/v1/responses/{deleted}"))[0] == 404
    assert (await small.post({**own, "model": "small", "input": "Hi"}))[1]["status"] == "completed"


async def test_responses_of_an_older_release_wait_behind_no_other(servers: Servers) -> None:
    """Rows without a model are looked at one by one, and named, so that they stand in the way of no others."""
    big = await servers.start(BIG)
    _, waiting = await start_two(big, "big")
    await servers.end(big)
    async with open_store(servers.store) as store:
        await execute_sql(store, "update responses set model = null")
        small = await servers.start(SMALL)
        await wait_for_line(small, "must wait for a server of 'big'")
        assert await store.orphaned_models(restarts=False) == {"big": 1}
        assert await store.orphans(["big"]) == ()
    assert (await small.get_response(waiting))["status"] == "queued"
