"""Frontends: several processes of one server are killed, stopped and replaced under load, and nothing is lost."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from tests.support.api_clients import StreamReader, sse_frames, wait_until
from tests.support.event_streams import final, read_sse
from tests.support.frontends import SEEN, frontends_in, patient_penstock, states_of
from tests.support.load import USERS, Fleet, Load, check, frame_json, text_of
from tests.support.paths import FIXTURES
from tests.support.processes import descendants, free_port
from tests.support.releases import running_release, this_release
from tests.support.server_process import ServerProcess, exit_status, penstock
from tests.support.stores import both_if_thorough, database_at

LONG: dict[str, Any] = {"input": "and so on, " * 200}

few_if_not_thorough = pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.thorough)])
"""Marks a test that treats ``count`` frontends one after the other, in the same way."""

ENDED = re.compile(r"has ended with status -9 and (\d+) running response")


def frontends(server: ServerProcess) -> dict[int, int]:
    """Return the processes of the frontends by number: the latest of each that has served."""
    return frontends_in(server.log.read_text())


@asynccontextmanager
async def running_frontends(store: str, folder: Path, count: int, *options: str) -> AsyncGenerator[ServerProcess, None]:
    async with running_release(patient_penstock, store, folder, "--frontends", str(count), *options) as server:
        await wait_until(lambda: len(frontends(server)) == count)
        yield server


async def end(server: ServerProcess, number: int, how: signal.Signals) -> None:
    """End a frontend, and wait until another process serves in its place."""
    before = frontends(server)
    os.kill(before[number], how)
    await wait_until(lambda: frontends(server)[number] != before[number])


def connections(server: ServerProcess, pid: int) -> set[int]:
    """Return the connections of clients that a frontend has, as the ports of the clients."""
    port = int(server.url.rpartition(":")[2])
    every = psutil.Process(pid).net_connections("tcp")
    return {each.raddr.port for each in every if each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED}


def counts(server: ServerProcess) -> list[int]:
    """Return the number of connections of each frontend."""
    return [len(connections(server, pid)) for pid in frontends(server).values()]


def is_even(server: ServerProcess) -> bool:
    """Return True if the frontends have as many connections as each other, as far as possible."""
    return max(counts(server)) - min(counts(server)) <= 1


def new_client() -> aiohttp.ClientSession:
    """Return a client with a connection of its own for each request, so that any frontend may get it."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))


class Stream:
    """A long response that a client reads to its end."""

    def __init__(self, server: ServerProcess) -> None:
        self.port = 0
        """The port of the client, once the answer has begun."""
        self.completes = asyncio.create_task(self._read(server))
        """True if the whole response comes; if the stream breaks off, the end of its response can be read."""

    async def _read(self, server: ServerProcess) -> bool:
        seen = b""
        try:
            async with server.client.post(f"{server.url}/v1/responses", json={**LONG, "stream": True}) as answer:
                assert answer.connection
                assert answer.connection.transport
                self.port = answer.connection.transport.get_extra_info("sockname")[1]
                async for piece in answer.content.iter_any():
                    seen += piece
        except aiohttp.ClientError:
            if frames := sse_frames(seen):
                response = await server.wait_for_end(frame_json(frames[0])["response"]["id"])
                assert response["status"] in ("failed", "completed")
            return False
        return final(read_sse(seen)).status == "completed"


async def begun(server: ServerProcess, count: int) -> list[Stream]:
    """Return streams whose answers have begun."""
    streams = [Stream(server) for _ in range(count)]
    await wait_until(lambda: all(each.port for each in streams))
    return streams


async def wait_until_running(server: ServerProcess, seat: int) -> None:
    """Wait until one of three frontends has reported that responses run."""
    await wait_until(lambda: states_of(server.pid, 3)[seat - 1].running)


async def test_connections_are_spread_evenly(tmp_path: Path) -> None:
    async with running_frontends(str(tmp_path / "store.sqlite3"), tmp_path, 3) as server, AsyncExitStack() as closing:
        client = await closing.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        sockets = [await client.ws_connect(f"{server.url}/v1/responses") for _ in range(30)]
        assert is_even(server), counts(server)
        before = sum(counts(server))
        await asyncio.gather(*(socket.close() for socket in sockets[::3]))
        await wait_until(lambda: sum(counts(server)) <= before - 10)
        closed = time.monotonic()
        await wait_until(lambda: min(state.seen_at for state in states_of(server.pid, 3)) > closed)
        sockets += [await client.ws_connect(f"{server.url}/v1/responses") for _ in range(10)]
        assert is_even(server), counts(server)


@both_if_thorough
async def test_responses_of_one_frontend_are_found_by_the_others(store_at: str, tmp_path: Path) -> None:
    """Also those that are not stored."""
    async with running_frontends(store_at, tmp_path, 3) as server, new_client() as client:
        for body in (LONG, {**LONG, "store": False}):
            async with client.post(f"{server.url}/v1/responses", json={**body, "stream": True}) as answer:
                reader = StreamReader(answer)
                response_id = frame_json(sse_frames(await reader.upto(b"output_text.delta"))[0])["response"]["id"]
                for _ in range(6):
                    async with client.get(f"{server.url}/v1/responses/{response_id}") as found:
                        assert (await found.json())["status"] == "in_progress"
                async with client.post(f"{server.url}/v1/responses/{response_id}/cancel") as cancelled:
                    assert (cancelled.status, (await cancelled.json())["status"]) == (200, "cancelled")
        async with client.get(f"{server.url}/v1/responses/resp_none") as missing:
            assert missing.status == 404


@few_if_not_thorough
@both_if_thorough
async def test_frontends_are_replaced_under_load_without_a_failed_request(
    store_at: str, count: int, tmp_path: Path
) -> None:
    async with new_client() as client:
        fleet = Fleet(store_at, tmp_path, client)
        load = Load(fleet)
        try:
            server = await fleet.add(this_release, "--frontends", "3", "--max-background", "6")
            await wait_until(lambda: len(frontends(server)) == 3)
            async with asyncio.TaskGroup() as users:
                for number in range(USERS):
                    users.create_task(load.user(number))
                for number in range(1, count + 1):
                    await load.more()
                    await end(server, number, signal.SIGTERM)
                await load.more()
                load.is_over = True
            assert not fleet.refusals
            await check(load, store_at)
        finally:
            await fleet.close()


@few_if_not_thorough
@both_if_thorough
async def test_killed_frontend_loses_nothing_that_was_accepted(store_at: str, count: int, tmp_path: Path) -> None:
    """Its running responses end as failed, its queued ones run elsewhere, and the others go on."""
    async with running_frontends(store_at, tmp_path, 3, "--max-background", "6") as server, new_client() as client:
        server.client = client
        for seat in range(count, 0, -1):
            accepted = [await server.start_background(LONG) for _ in range(9)]
            streams = await begun(server, 6)
            killed = connections(server, frontends(server)[seat])
            await wait_until_running(server, seat)
            ended = len(ENDED.findall(server.log.read_text()))
            await end(server, seat, signal.SIGKILL)
            assert 0 < int(ENDED.findall(server.log.read_text())[ended]) <= len(accepted) + len(streams)
            ends = [await server.wait_for_end(each) for each in accepted]
            assert {response["status"] for response in ends} <= {"completed", "failed"}
            assert any(response["status"] == "completed" for response in ends)
            assert {each.port for each in streams if not await each.completes} <= killed
            assert sorted(frontends(server)) == [1, 2, 3]


async def test_others_go_on_while_one_frontend_stands_still(tmp_path: Path) -> None:
    async with running_frontends(str(tmp_path / "store.sqlite3"), tmp_path, 2) as server, new_client() as client:
        server.client = client
        streams = await begun(server, 4)
        stopped = frontends(server)[1]
        os.kill(stopped, signal.SIGSTOP)
        try:
            await wait_until(lambda: time.monotonic() - states_of(server.pid, 2)[0].seen_at > SEEN)
            for _ in range(40):
                status, response = await server.post({"input": "Go on."})
                assert (status, text_of(response)) == (200, "Go on.")
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert all([await each.completes for each in streams])


async def test_bounds_hold_for_all_frontends_together(tmp_path: Path) -> None:
    """Without a store, too: the frontends then count in a database of their own."""
    limits = tmp_path / "limits.toml"
    limits.write_text("[default]\nrequests_per_minute = 7\n")
    options = ("--limits", str(limits), "--metrics-port", str(port := free_port()))
    async with running_frontends("none", tmp_path, 2, *options) as server, new_client() as client:
        server.client = client
        begun = time.monotonic()
        answers = Counter([(await server.post({"input": "Go on."}))[0] for _ in range(30)])
        assert answers.keys() == {200, 429}
        refilled = 7 / 60 * (time.monotonic() - begun)
        assert 6 <= answers[200] <= 8 + refilled
        async with client.get(f"http://127.0.0.1:{port}/metrics") as scraped:
            text = await scraped.text()
        found = re.search(r'penstock_http_requests_total{.*route="/v1/responses",status="200"} (.*)', text)
        assert found
        assert float(found[1]) == answers[200]
        limits.write_text("[default]\nrequests_per_minute = 100000\n")
        os.kill(server.pid, signal.SIGHUP)
        await wait_until(lambda: server.log.read_text().count("SIGHUP: the limits were read again") == 2)
        assert {(await server.post({"input": "Go on."}))[0] for _ in range(10)} == {200}


async def test_background_responses_of_all_frontends_are_bounded(tmp_path: Path) -> None:
    store = str(tmp_path / "store.sqlite3")
    async with running_frontends(store, tmp_path, 2, "--max-background", "2") as server, new_client() as client:
        server.client = client
        started = [await server.start_background(LONG) for _ in range(8)]
        database = database_at(store)
        await database.open()
        seen = set()
        for each in started:
            while (await server.get_response(each))["status"] == "queued":
                await asyncio.sleep(0.01)
            ((running,),) = await database.read("select count(*) from responses where status = 'in_progress'")
            seen.add(running)
            await server.ask("POST", f"/v1/responses/{each}/cancel")
        await database.close()
        assert max(seen) in (1, 2)


async def test_server_stops_with_all_its_frontends(tmp_path: Path) -> None:
    async with running_frontends(str(tmp_path / "store.sqlite3"), tmp_path, 2) as server:
        (stream,) = await begun(server, 1)
        processes = descendants(server.pid)
        assert await server.kill(signal.SIGTERM) == 0
        assert await stream.completes  # it had the time to end
        await wait_until(lambda: not processes & set(psutil.pids()))


async def test_frontends_end_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    async with running_frontends(str(tmp_path / "store.sqlite3"), tmp_path, 2) as server:
        processes = set(frontends(server).values())
        await server.kill(signal.SIGKILL)
        await wait_until(lambda: not processes & set(psutil.pids()))


async def test_start_that_fails_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("--engine", f"replay:{FIXTURES / 'harmony'}", "--port", str(free_port()), "--store", "/dev/null/store")
    assert await exit_status(log, penstock, "serve", *options, "--frontends", "2", "--no-sandbox") == 1
    assert "/dev/null/store" in log.read_text().splitlines()[-1]
