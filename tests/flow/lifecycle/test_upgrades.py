"""Rolling upgrades: servers of the last release and of this one share a store, under load, and nothing is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.support.api_clients import StreamReader
from tests.support.event_streams import final, read_sse
from tests.support.load import USERS, Fleet, Load, check, text_of
from tests.support.releases import last_release, running_release, this_release
from tests.support.stores import both_if_thorough, wait_until_stored


@both_if_thorough
async def test_rolling_upgrade_and_return_lose_no_response(store_at: str, tmp_path: Path) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True)) as client:
        fleet = Fleet(store_at, tmp_path, client)
        load = Load(fleet)
        try:
            one, other = await asyncio.gather(fleet.add(last_release()), fleet.add(last_release()))
            async with asyncio.TaskGroup() as users:
                for number in range(USERS):
                    users.create_task(load.user(number))
                await load.more()
                await fleet.restart(one, this_release)
                await load.more()
                other = await fleet.replace(other, this_release)
                await load.more()
                await fleet.restart(other, last_release())
                await load.more()
                load.is_over = True
            await check(load, store_at)
        finally:
            await fleet.close()


@pytest.mark.parametrize("upgrade", [True, False], ids=["upgrade", "return"])
async def test_responses_of_a_killed_server_end_at_the_other_release(
    store_at: str, tmp_path: Path, upgrade: bool
) -> None:
    """The second server takes the place of the first, and runs what was queued there."""
    first, second = (last_release(), this_release) if upgrade else (this_release, last_release())
    async with running_release(first, store_at, tmp_path, "--max-background", "1") as server:
        running = await server.start_background({"input": "and so on, " * 2000})
        waiting = await server.start_background({"input": "Wait."})
        async with server.client.get(f"{server.url}/v1/responses/{running}?stream=true") as answer:
            await StreamReader(answer).upto(b"output_text.delta")
        await wait_until_stored(store_at, running, 10)
        await server.kill()
        server.program = second
        await server.start()
        assert text_of(await server.wait_for_end(waiting)) == "Wait."
        assert (await server.get_response(running))["error"]["code"] == "server_error"
        assert final(read_sse(await server.replay(running))).status == "failed"
        follower = {"input": "Go on.", "previous_response_id": waiting}
        status, response = await server.post(follower)
        assert (status, text_of(response)) == (200, "Wait.Go on.")
