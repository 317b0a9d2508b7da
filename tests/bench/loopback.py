"""Whole servers over loopback, each in a process of its own: what a token costs them, and what a stream takes.

Both run all the time and are asked in turns, so that a busy machine slows both.  What counts is the CPU time of the
server's process, all of its threads included, within the measured window.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.core import Case, Command, End, Measured, Window
from tests.bench.figures import Comparison, Figure
from tests.bench.server import MARK, NAME, READY

STARTING = 600.0
"""Seconds in which a server is up, on a machine that is busy."""

STREAMS = (100, 500)
STEPS = (1, 8)
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
STORING = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""Lets the peer run responses in the background, and keep their events."""


@dataclass(frozen=True)
class Server:
    """One of the two, at ``port`` of this machine."""

    process: asyncio.subprocess.Process
    port: int
    log: Path
    stores: bool
    """Whether requests ask to be stored; what the peer keeps, it keeps for ever, in memory."""

    @asynccontextmanager
    async def running(self, case: Case, **body: Any) -> AsyncGenerator[Measured, None]:
        """A case for the length of a block, for which clients ask in a process of their own; what it took to begin."""
        self._say(case)
        await self._said(READY)
        asked = json.dumps({"model": NAME, "input": "Hi", "stream": True, "store": self.stores, **body})
        command = (sys.executable, "-m", "tests.bench.readers", str(self.port), str(case.streams), asked)
        readers = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        beginning, reading = asyncio.create_task(self._measured()), asyncio.create_task(readers.wait())
        await asyncio.wait((beginning, reading), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            beginning.cancel()
            raise RuntimeError(f"The server refused a client: see {self.log}")
        yield await beginning
        self._say(End())
        await self._measured()
        assert await reading == 0

    async def measured(self, window: Window) -> Measured:
        """What a window of the case took."""
        self._say(window)
        return await self._measured()

    def _say(self, command: Command) -> None:
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(command) + b"\n")

    async def _measured(self) -> Measured:
        return msgspec.json.decode(await self._said(MARK), type=Measured)

    async def _said(self, mark: bytes) -> bytes:
        """What comes behind ``mark`` in the next line that begins with it."""
        assert self.process.stdout
        async for line in self.process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError(f"The server is gone: see {self.log}")


@asynccontextmanager
async def serving(which: str, log: Path, *options: str) -> AsyncGenerator[Server, None]:
    """A server of penstock's (``ours``) or of vLLM (``peer``), with vLLM's options, for the length of a block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = (sys.executable, "-m", "tests.bench.server", which, str(port), *options)
    pipe, limit = asyncio.subprocess.PIPE, 2**26
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=errors, limit=limit, env=os.environ | QUIET | STORING
        )
    try:
        async with asyncio.timeout(STARTING):
            await _listening(process, port, log)
        yield Server(process, port, log, which == "ours")
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listening(process: asyncio.subprocess.Process, port: int, log: Path) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if process.returncode is not None:
                raise RuntimeError(f"The server did not start: see {log}") from None
            await asyncio.sleep(0.5)
        else:
            writer.close()
            return


@dataclass(frozen=True)
class Pair:
    """Ours and the peer, who are asked in turns."""

    ours: Server
    peer: Server


@asynccontextmanager
async def pair(folder: Path) -> AsyncGenerator[Pair, None]:
    """Both, for the length of a block."""
    async with AsyncExitStack() as closing:
        starting = [serving(name, folder / f"{name}.log") for name in ("ours", "peer")]
        yield Pair(*[await closing.enter_async_context(server) for server in starting])


def window(streams: int, step: int, tokens: int) -> Window:
    """About so many ``tokens`` of all streams together."""
    return Window(max(tokens // streams // step, 1) * step, step)


async def compared(both: Pair, asked: Case, rounds: int, tokens: int) -> list[Comparison]:
    """Microseconds of CPU per token, in short windows in turns; the first ones warm up."""
    found = []
    async with both.ours.running(asked), both.peer.running(asked):
        for step in STEPS:
            part = window(asked.streams, step, tokens)
            costs = [
                (await _cost(both.ours, asked, part), await _cost(both.peer, asked, part)) for _ in range(1 + rounds)
            ]
            mine, other = zip(*costs[1:], strict=True)
            load = {"streams": asked.streams, "step": step, "reasoning": asked.reasoning}
            found.append(Comparison(load, Figure(mine), Figure(other)))
    return found


async def _cost(server: Server, asked: Case, part: Window) -> float:
    return (await server.measured(part)).cpu * 1e6 / (asked.streams * part.tokens)


async def loopback(both: Pair, loads: Iterable[tuple[int, int]], rounds: int, tokens: int) -> list[Comparison]:
    """Every load, of so many streams behind so many tokens of reasoning."""
    return [found for load in loads for found in await compared(both, Case(*load), rounds, tokens)]
