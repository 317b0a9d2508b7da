"""Rolling upgrades: servers of the last release and of this one share a store, under load, and nothing is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterable
from pathlib import Path

import aiohttp
import pytest

from tests.support.api_clients import StreamReader
from tests.support.event_streams import final, read_sse
from tests.support.load import USERS, Fleet, Load, check, text_of, without_turns
from tests.support.releases import Program, last_release, running_release, this_release
from tests.support.server_process import ServerProcess
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


async def test_database_goes_to_this_release_and_back_and_here_again(store_at: str, tmp_path: Path) -> None:
    """Each release shows what either has stored, and what the last one does not know waits for this one."""
    async with running_release(last_release(), store_at, tmp_path) as server:
        shown = await talk(server, "old")
        await go_on_with(server, this_release)
        assert await again(server, shown) == shown
        shown |= await talk(server, "new")
        unknown_to_the_last = await store_chat_and_file(server)
        await go_on_with(server, last_release())
        assert await again(server, shown) == shown
        shown |= await talk(server, "old again")
        await go_on_with(server, this_release)
        assert await again(server, shown) == shown
        assert await again(server, unknown_to_the_last) == unknown_to_the_last
    assert " ERROR " not in server.log.read_text()


async def go_on_with(server: ServerProcess, program: Program) -> None:
    assert await server.kill(signal.SIGTERM) == 0
    server.program = program
    await server.start()


async def talk(server: ServerProcess, word: str) -> dict[str, bytes]:
    """Make responses in a chain and in a conversation; return what their routes show, by path."""
    conversation = await server.create_conversation({"role": "user", "content": f"{word} begins. "})
    inside = {"input": f"{word} goes on. ", "conversation": conversation.rpartition("/")[2]}
    status, second = await server.post(inside)
    assert (status, text_of(second)) == (200, f"{word} begins. {word} goes on. ")
    first = await server.wait_for_end(await server.start_background({"input": f"{word}. "}))
    status, last = await server.post({"input": "And on.", "previous_response_id": first["id"]})
    assert (status, text_of(last)) == (200, f"{word}. And on.")
    responses = [f"/v1/responses/{response['id']}" for response in (first, second, last)]
    paths = (*responses, *(f"{path}/input_items" for path in responses), conversation, f"{conversation}/items")
    return await again(server, paths)


async def store_chat_and_file(server: ServerProcess) -> dict[str, bytes]:
    """Make objects that the last release does not know, as `talk` does."""
    _, models = await server.get("/v1/models")
    chat = {"model": models["data"][0]["id"], "messages": [{"role": "user", "content": "Hi"}], "store": True}
    status, completion = await server.post(chat, "/v1/chat/completions")
    assert status == 200
    form = aiohttp.FormData({"purpose": "user_data"})
    form.add_field("file", b"of this release", filename="note.txt")
    async with server.client.post(f"{server.url}/v1/files", data=form) as answer:
        file = await answer.json()
    status, vector_store = await server.post({"name": "notes"}, "/v1/vector_stores")
    assert status == 200
    paths = {
        f"/v1/chat/completions/{completion['id']}",
        f"/v1/files/{file['id']}",
        f"/v1/vector_stores/{vector_store['id']}",
    }
    return await again(server, paths)


async def again(server: ServerProcess, paths: Iterable[str]) -> dict[str, bytes]:
    """Return what the paths show at this server, but for the numbers of turns."""
    shown = dict[str, bytes]()
    for path in paths:
        async with server.client.get(server.url + path) as answer:
            assert answer.status == 200, await answer.text()
            shown[path] = without_turns(await answer.read())
    return shown
