"""Programs that wait for their clients over random rounds, through two servers, one of which is killed again and again.

The server that lives may not grow: neither its memory nor the number of its processes.  The other one leaves nothing.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import TypeAlias

import aiohttp
import psutil

from tests.bench.soak.watch import TTL, faults, watching
from tests.support.api_clients import wait_until
from tests.support.program_clients import WAYS, ProgramClient, found
from tests.support.programming_engine import serve_programming
from tests.support.sandboxes import lives
from tests.support.server_process import ServerProcess, serving_process

KEPT_SECONDS = 3
"""Seconds for which a program keeps its process."""

KILL_SECONDS = 4.0
"""Seconds between two kills."""

AT_A_TIME = 8
"""Clients at once."""

STORED_SECONDS = 10 * TTL
"""Seconds for which a response is kept."""

OPTIONS = (
    *("--store-ttl", str(STORED_SECONDS), "--stream-ttl", "5", "--stale-after", "3600"),
    *("--log-level", "WARNING", "--slow-callback", "0s"),
)

CODE = """
import asyncio, random
draw, total = random.Random({seed}), 0
for _ in range({rounds}):
    round = (look(number=draw.randint(0, 99)) for _ in range(draw.randint(1, 4)))
    total += sum(await asyncio.gather(*round))
print(total)
"""

REFUSED = """
try:
    await look(number="none")
except ToolError:
    print(await look(number=1))
"""


@dataclass
class Servers:
    """The server that lives, and the one that is killed."""

    steady: ServerProcess
    killed: ServerProcess
    draw: random.Random
    made: int = 0
    kills: int = 0
    most_processes: int = 0
    left: list[psutil.Process] = field(default_factory=list)
    """The processes of servers that were killed."""

    def any(self) -> ServerProcess:
        return self.draw.choice((self.steady, self.killed))

    async def step(self, client: ProgramClient, code: str = "") -> None:
        """Have a client begin or go on at one of the servers, and try again at the one that lives."""
        server = self.steady if client.way == "conversation" else self.any()
        while True:
            try:
                await (client.begin(server, code) if code else client.go_on(server))
            except (aiohttp.ClientError, AssertionError):
                if server is self.steady:
                    raise
                server = self.steady
            else:
                break
        self.made += 1
        self.most_processes = max(self.most_processes, len(children_of(self.steady)))

    async def kill_often(self) -> None:
        """Kill the one server until cancelled, and start it again."""
        while True:
            await asyncio.sleep(KILL_SECONDS)
            self.left += children_of(self.killed)
            await self.killed.kill()
            self.kills += 1
            await self.killed.start()


Kind: TypeAlias = Callable[[Servers], Awaitable[None]]


def children_of(server: ServerProcess) -> list[psutil.Process]:
    """Return the processes of the sandboxes of a server."""
    children: list[psutil.Process] = psutil.Process(server.pid).children(recursive=True)
    return children


def program(servers: Servers) -> str:
    """Return a program of some rounds."""
    return CODE.format(seed=servers.draw.randrange(10**6), rounds=servers.draw.randint(1, 4))


async def finished(servers: Servers, client: ProgramClient) -> None:
    """Answer all rounds of a program that are left, and check what it prints."""
    while client.waiting:
        await servers.step(client)
    assert client.answer.strip() == str(client.total), (client.answer, client.history)


async def to_its_end(servers: Servers) -> None:
    """Answer a program."""
    client = ProgramClient(servers.draw.choice(WAYS))
    await servers.step(client, program(servers))
    await finished(servers, client)


async def by_two(servers: Servers) -> None:
    """Answer a program in two ways."""
    client = ProgramClient(servers.draw.choice(("previous", "unstored")))
    await servers.step(client, program(servers))
    other = client.branch(lambda call: str(1 + int(found(call))))
    await asyncio.gather(finished(servers, client), finished(servers, other))


async def left_asleep(servers: Servers) -> None:
    """Leave a program that waits."""
    await servers.step(ProgramClient("previous"), program(servers))


async def refused(servers: Servers) -> None:
    """Let a program call a function with what its schema refuses."""
    client = ProgramClient("unstored")
    await servers.step(client, REFUSED)
    await finished(servers, client)


async def called_off(servers: Servers) -> None:
    """Cancel a program that sleeps."""
    body = ProgramClient("previous").body([{"role": "user", "content": "await asyncio.sleep(60)"}])
    response_id = await servers.steady.start_background(body)
    await asyncio.sleep(servers.draw.uniform(0.0, 0.5))
    status, answer = await servers.steady.cancel(response_id)
    assert (status, answer["status"]) == (200, "cancelled"), answer
    servers.made += 1


KINDS: tuple[Kind, ...] = (to_its_end, by_two, to_its_end, left_asleep, refused, called_off)


async def run_programs(servers: Servers, count: int, tell: Callable[[int], None] = lambda made: None) -> None:
    """Make at least ``count`` responses with programs of all kinds in turn; call ``tell`` with the number made."""
    kinds = cycle(KINDS)

    async def work() -> None:
        while servers.made < count:
            await next(kinds)(servers)
            tell(servers.made)

    async with asyncio.TaskGroup() as workers:
        for _ in range(AT_A_TIME):
            workers.create_task(work())


def serving(store: str, folder: Path) -> AbstractAsyncContextManager[ServerProcess]:
    """Run a server whose models write programs."""
    known = ("--program-ttl", f"{KEPT_SECONDS}s", "--sandbox", "--heartbeat", "0.2", *OPTIONS)
    return serving_process(serve_programming, known, store, folder)


async def soaked_programs(store: str, count: int, folder: Path) -> list[str]:
    """Return what was wrong in a soak of ``count`` responses."""
    began = time.monotonic()
    async with serving(store, folder) as steady, serving(store, folder) as killed:
        servers = Servers(steady, killed, random.Random(count))
        killing = asyncio.create_task(servers.kill_often())
        await run_programs(servers, AT_A_TIME)  # the first ones warm the server up
        async with watching(steady, store, count) as watch:
            await run_programs(servers, count, watch.tell)
            killing.cancel()
        wrong = [*faults(watch.looks, STORED_SECONDS), *await _left(servers)]
        status = await steady.kill(signal.SIGTERM)
    if status:
        wrong.append(f"the server that lived returned {status}")
    complaints = [line for line in steady.log.read_text().splitlines() if "WARNING" in line or "ERROR" in line]
    seconds, most = time.monotonic() - began, servers.most_processes
    print(f"{servers.made:,} responses in {seconds:.0f} s, {servers.kills} kills, {most} processes at most")
    return wrong + complaints[:5]


async def _left(servers: Servers) -> Iterable[str]:
    """Return a message for each process that is left once no program keeps one."""
    with suppress(TimeoutError):
        await wait_until(lambda: not _living(servers))
        return []  # a server starts short-lived processes at any time
    return [f"a process is left: {each}" for each in _living(servers)]


def _living(servers: Servers) -> list[psutil.Process]:
    """Return the processes of programs at the server that lives, and those that killed servers have left."""
    return [*filter(lives, servers.left), *children_of(servers.steady)]
