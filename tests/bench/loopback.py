"""Whole servers over loopback, each in a process of its own: their cost per token, and the memory of a stream.

All servers run for the whole time and take turns, so that a busy machine slows each of them.  The figure is the CPU
time of the server's process, all threads included, within the measured window.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import aiohttp
import msgspec

from tests.bench.core import Case, Command, End, Look, Measured, Window
from tests.bench.figures import BARE, VLLM, Comparison, Figure
from tests.bench.server import MARK, NAME, READY
from tests.bench.wire import RESPONSES
from tests.support.processes import free_port

STARTING = 240.0
"""Seconds that a server may take to start, on a busy machine."""

ANSWERING = 180.0
"""Seconds that a server may take to carry out a command."""

SECONDS = 3.0
"""Length of a window with a rate."""

CORES = sorted(os.sched_getaffinity(0))
"""The last one is for the clients, and the others for the servers; a single one is for all."""

STEPS = (1, 8)
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
STORING = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""Lets the peer run background responses and keep their events."""


Api: TypeAlias = tuple[str, Mapping[str, Any]]
"""The path of an API, and the parameters by which it is asked for an answer."""

ASKING_RESPONSES: Api = (RESPONSES, {"input": "Hi"})


@dataclass(frozen=True)
class Server:
    """A running server at ``port`` of this machine."""

    process: asyncio.subprocess.Process
    port: int
    log: Path
    stores: bool
    """True if requests set ``store``; the peer would keep stored responses in memory for ever."""

    @property
    def arrivals(self) -> Path:
        """The file to which the clients of a ``timed`` case write their arrivals."""
        return self.log.with_suffix(".arrivals")

    @asynccontextmanager
    async def running(
        self, case: Case, *, api: Api = ASKING_RESPONSES, timed: bool = False, **body: Any
    ) -> AsyncGenerator[Measured, None]:
        """Run a case for the length of a block, with clients in another process; yield the cost of its beginning."""
        self._send(case)
        await self._line(READY)
        path, asking = api
        stored = {"store": self.stores} if path == RESPONSES else {}
        request = json.dumps({"model": NAME, "stream": True, **stored, **asking, **body})
        noting = ("--arrivals", str(self.arrivals)) if timed else ()
        options = (str(self.port), str(case.streams), request, "--path", path, *noting)
        command = (sys.executable, "-m", "tests.bench.readers", *options)
        readers = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        os.sched_setaffinity(readers.pid, CORES[-1:])
        try:
            beginning, reading = asyncio.create_task(self._measured()), asyncio.create_task(readers.wait())
            await asyncio.wait((beginning, reading), return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                beginning.cancel()
                raise RuntimeError(f"A client was refused, or its stream broke off: see {self.log}")
            yield await beginning
            await self.measured(End())
            async with asyncio.timeout(ANSWERING):
                if await reading:
                    raise RuntimeError(f"A stream broke off: see {self.log}")
        finally:
            if readers.returncode is None:
                readers.kill()

    async def measured(self, command: Window | End | Look) -> Measured:
        self._send(command)
        return await self._measured()

    def _send(self, command: Command) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")

    async def _measured(self) -> Measured:
        return msgspec.json.decode(await self._line(MARK), type=Measured)

    async def _line(self, mark: bytes) -> bytes:
        """Wait for a line that begins with ``mark`` and return the rest of it."""
        assert self.process.stdout
        try:
            async with asyncio.timeout(ANSWERING):
                async for line in self.process.stdout:
                    if line.startswith(mark):
                        return line.removeprefix(mark)
        except TimeoutError:
            raise RuntimeError(f"The server has not answered for {ANSWERING:g} seconds: see {self.log}") from None
        raise RuntimeError(f"The server is gone: see {self.log}")


@asynccontextmanager
async def serving(which: str, log: Path, *options: str) -> AsyncGenerator[Server, None]:
    """Run penstock (``ours``), vLLM's server (``peer``) or a bare one for the length of a block, with its options."""
    port = free_port()
    command = (sys.executable, "-m", "tests.bench.server", which, str(port), *options)
    pipe, limit = asyncio.subprocess.PIPE, 2**26
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=errors, limit=limit, env=os.environ | QUIET | STORING
        )
        os.sched_setaffinity(process.pid, CORES[:-1] or CORES)
    try:
        async with asyncio.timeout(STARTING):
            await _up(process, port, log)
        yield Server(process, port, log, which == "ours")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _up(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    async with aiohttp.ClientSession() as client:
        while process.returncode is None:
            with suppress(aiohttp.ClientConnectionError):
                async with client.get(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.5)
    raise RuntimeError(f"The server did not start: see {log}")


@dataclass(frozen=True)
class Servers:
    ours: Server
    bare: Server
    """A server of `tests.bench.bare` that only writes the bytes."""

    peer: Server

    @property
    def every(self) -> tuple[Server, ...]:
        return (self.ours, self.bare, self.peer)


@asynccontextmanager
async def servers(folder: Path) -> AsyncGenerator[Servers, None]:
    kinds = {which: (which,) for which in ("ours", "bare", "peer")}
    async with all_serving(kinds, folder) as started:
        yield Servers(*started)


@asynccontextmanager
async def all_serving(kinds: Mapping[str, tuple[str, ...]], folder: Path) -> AsyncGenerator[list[Server], None]:
    """Run servers for the length of a block; each has a name, a kind and options."""
    async with AsyncExitStack() as closing:
        async with asyncio.TaskGroup() as starting:
            started = [
                starting.create_task(closing.enter_async_context(serving(which, folder / f"{name}.log", *more)))
                for name, (which, *more) in kinds.items()
            ]
        yield [task.result() for task in started]


class Costs(msgspec.Struct, frozen=True):
    """The costs of penstock beside vLLM's server, and beside the bare one."""

    over_peer: Comparison
    over_bare: Comparison


async def costs(servers: Servers, case: Case, window: Window, rounds: int) -> Costs:
    """Measure a window of the running case in turns; a first round warms up."""
    found = [[await cost(server, case, window) for server in servers.every] for _ in range(1 + rounds)]
    ours, bare, peer = (Figure(tuple(figures)) for figures in zip(*found[1:], strict=True))
    load: dict[str, float] = {"streams": case.streams, "step": window.step, "reasoning": case.reasoning}
    beside = ((peer, VLLM), (bare, BARE))
    return Costs(*(Comparison(load, ours, other, "", name) for other, name in beside))


async def cost(server: Server, case: Case, window: Window) -> float:
    return (await server.measured(window)).cpu * 1e6 / (case.streams * window.tokens)


@asynccontextmanager
async def running(servers: Servers, case: Case) -> AsyncGenerator[None, None]:
    async with AsyncExitStack() as closing:
        for server in servers.every:
            await closing.enter_async_context(server.running(case))
        yield


async def loopback(servers: Servers, loads: Iterable[tuple[int, int]], rounds: int, tokens: int) -> list[Costs]:
    """Measure each load of (streams, reasoning tokens); a window has ``tokens`` tokens over all its streams."""
    found = []
    for load in loads:
        case = Case(*load)
        async with running(servers, case):
            for step in STEPS:
                window = Window(max(tokens // case.streams // step, 1) * step, step)
                found.append(await costs(servers, case, window, rounds))
    return found


async def at_a_rate(servers: Servers, case: Case, rate: float, rounds: int) -> Costs:
    """Measure steps of one token at a rate: a server with idle time handles each token by itself."""
    async with running(servers, case):
        return await costs(servers, case, Window(round(SECONDS * rate), 1, rate), rounds)


async def open_stream(server: Server, streams: int) -> float:
    """Return the bytes of memory of a stream that has begun; a first stream warms up what all of them share."""
    async with server.running(Case(1, 0)):
        pass
    async with server.running(Case(streams, 0)) as begun:
        return (begun.memory[1] - begun.memory[0]) / streams


async def retained_token(server: Server, tokens: int, streams: int = 20) -> float:
    """Return the bytes per token of background responses, whose events can all be replayed."""
    async with server.running(Case(streams, 0), background=True, store=True):
        await server.measured(Window(256, 1))
        measured = await server.measured(Window(tokens, 1))
    return (measured.memory[1] - measured.memory[0]) / streams / tokens
