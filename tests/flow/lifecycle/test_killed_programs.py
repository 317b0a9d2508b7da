"""Servers that are killed under programs: a program that waits for its client goes on at any server of the store."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.extensions.tools.sandbox.folder import PREFIX
from tests.support.mcp_servers import HttpServers, http_servers
from tests.support.processes import open_files
from tests.support.program_clients import WAYS, ProgramClient, Way, found
from tests.support.programming_engine import serve_programming
from tests.support.sandboxes import available, lives
from tests.support.server_process import ServerProcess, serving_process
from tests.support.stores import both_if_thorough
from tests.support.tool_servers import CODE_TOOL, mcp_tool

ROUNDS = 3

SEARCHES = f"""
import asyncio, random

first = await counting.count(name="NAME, first")
found = []
for number in range({ROUNDS}):
    round = (look(number=10 * number + each, luck=random.random()) for each in range(3))
    found += await asyncio.gather(*round)
    print("round", number, found)
last = await counting.count(name="NAME, last")
print(sum(found), first, last)
"""
"""A program with calls of the client between two of a server."""

ASKS_ALL = """
drawn = await code_interpreter.python(code="import random; print(random.Random(7).random())")
first = await counting.count(name="NAME")
found = await look(number=first)
last = await counting.count(name="NAME")
print(drawn, first, found, last)
"""
"""A program with calls of all that may be called, those of a server with the client's approval."""

HANGS = "print(await look(number=1))\nawait counting.hang()\n"

HANGS_AT_ONCE = "await counting.hang()\n"


@pytest.fixture
async def sandbox() -> None:
    await available("program")


@pytest.fixture(scope="module")
def http() -> Iterator[HttpServers]:
    with http_servers() as servers:
        yield servers


@pytest.fixture
def counting(http: HttpServers) -> dict[str, Any]:
    """The tool that counts its calls, for programs alone."""
    return mcp_tool("counting", http.url("counting"), allowed_callers=["programmatic"])


def serving(store: str, folder: Path, *options: str) -> AbstractAsyncContextManager[ServerProcess]:
    known = ("--heartbeat", "0.2", "--stale-after", "3600", "--sandbox", "--allow-address", "127.0.0.1")
    return serving_process(serve_programming, known, store, folder, *options)


def processes_of(server: ServerProcess) -> list[psutil.Process]:
    """Return the processes of the sandboxes of a server."""
    children: list[psutil.Process] = psutil.Process(server.pid).children(recursive=True)
    return children


async def none_lives(processes: list[psutil.Process]) -> None:
    """Wait until none of some processes lives, for which none has to be read by its parent."""
    async with asyncio.timeout(120):
        while any(map(lives, processes)):
            await asyncio.sleep(0.02)


def folders_of(server: ServerProcess) -> list[Path]:
    """Return the folders of the sandboxes of a server, which has each of them open."""
    return [place for _, place in open_files(server.pid) if place.name.startswith(PREFIX)]


async def undisturbed(server: ServerProcess, way: Way, *tools: dict[str, Any]) -> ProgramClient:
    """Return a client whose program has come to its end at one server."""
    client = ProgramClient(way, tools)
    await client.begin(server, SEARCHES)
    await client.finish(server)
    assert (client.rounds, client.answer.splitlines()[-1]) == (ROUNDS, f"{7 * 99} 1 1")
    return client


@pytest.mark.usefixtures("sandbox")
@both_if_thorough
@pytest.mark.parametrize("way", WAYS)
async def test_program_goes_on_after_each_kill(
    store_at: str, tmp_path: Path, way: Way, counting: dict[str, Any]
) -> None:
    async with serving(store_at, tmp_path) as server:
        expected = await undisturbed(server, way, counting)
        client = ProgramClient(way, (counting,))
        await client.begin(server, SEARCHES)
        while client.waiting:
            await killed(server)
            await client.go_on(server)
        assert client.seen == expected.seen


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize("way", WAYS)
async def test_results_and_approvals_outlive_a_kill(tmp_path: Path, way: Way, counting: dict[str, Any]) -> None:
    tools = (counting | {"require_approval": "always"}, CODE_TOOL | {"allowed_callers": ["programmatic"]})
    async with serving(str(tmp_path / "store.sqlite3"), tmp_path) as server:
        client = ProgramClient(way, tools)
        await client.begin(server, ASKS_ALL)
        while client.waiting:
            await killed(server)
            await client.go_on(server)
        if way == "unstored":  # the item of the call that ran code does not have what it has returned
            assert "the result of its call 1 is no longer known" in client.answer
        else:
            assert (client.rounds, client.answer) == (3, f"{random.Random(7).random()} 1 7 2\n")


@pytest.mark.usefixtures("sandbox")
@both_if_thorough
@pytest.mark.parametrize("way", WAYS)
async def test_another_server_goes_on_with_a_program(
    store_at: str, tmp_path: Path, way: Way, counting: dict[str, Any]
) -> None:
    """The first server is killed, or lives and keeps the process of the program, which ends after its time."""
    async with serving(store_at, tmp_path, "--program-ttl", "1s") as one, serving(store_at, tmp_path) as other:
        expected = await undisturbed(one, way, counting)
        moving, staying = ProgramClient(way, (counting,)), ProgramClient(way, (counting,))
        await asyncio.gather(*(client.begin(one, SEARCHES) for client in (moving, staying)))
        kept = processes_of(one)
        for at in (other, one):  # the process of the first round is of no use in the third
            await moving.go_on(at)
        await moving.go_on(other)
        await none_lives(kept)
        await one.kill()
        await staying.finish(other)
        assert moving.seen == staying.seen == expected.seen


@pytest.mark.usefixtures("sandbox")
@both_if_thorough
async def test_program_that_is_killed_in_a_call_makes_it_once(
    store_at: str, tmp_path: Path, http: HttpServers, counting: dict[str, Any]
) -> None:
    """Its response has failed, as any other response; only its client makes the call again."""
    began = http.state().get("hang", 0)
    client = ProgramClient("previous", (counting,))
    async with serving(store_at, tmp_path) as server:
        hanging = await server.start_background(client.body([{"role": "user", "content": HANGS_AT_ONCE}]))
        await until_it_hangs(http, began + 1)
        await killed(server)
        assert (await server.wait_for_end(hanging))["error"]["code"] == "server_error"
        await client.begin(server, HANGS)
        for attempt in (2, 3):
            again = await server.start_background(client.body(client.outputs()))
            await until_it_hangs(http, began + attempt)
            await killed(server)
            response = await server.wait_for_end(again)
            assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
            assert "program_output" not in [item["type"] for item in response["output"]]
        assert http.state()["hang"] == began + 3


async def killed(server: ServerProcess) -> None:
    """Kill a server, and start it again once nothing of its sandboxes is left."""
    processes, folders = processes_of(server), folders_of(server)
    assert processes
    assert folders
    await server.kill()
    await none_lives(processes)
    await server.start()
    assert not [folder for folder in folders if folder.exists()]


async def until_it_hangs(http: HttpServers, times: int) -> None:
    async with asyncio.timeout(120):
        while http.state().get("hang", 0) < times:
            await asyncio.sleep(0.02)


BRANCHES = """
found = []
for number in range(4):
    found.append(await look(number=number + sum(found)))
    print("found", found)
print(sum(found))
"""
"""A program whose calls depend on the results of those before."""


def printed(client: ProgramClient) -> list[str]:
    """Return what `BRANCHES` prints for a client."""
    results, lines = list[int](), list[str]()
    for number in range(4):
        results.append(int(client.finds({"arguments": json.dumps({"number": number + sum(results)})})))
        lines.append(f"found {results}")
    return [*lines, str(sum(results))]


@pytest.mark.usefixtures("sandbox")
async def test_two_clients_answer_one_program(tmp_path: Path) -> None:
    """Each goes on with its own answers: one has the process, and the other one is run again."""
    async with serving(str(tmp_path / "store.sqlite3"), tmp_path) as server:
        for at_once in (True, False):
            one = ProgramClient("previous")
            await one.begin(server, BRANCHES)
            other = one.branch(lambda call: str(1 + int(found(call))))
            while one.waiting:
                if at_once:
                    await asyncio.gather(one.go_on(server), other.go_on(server))
                else:
                    await one.go_on(server)
                    await other.go_on(server)
            for client in (one, other):
                assert client.answer.splitlines() == printed(client)
