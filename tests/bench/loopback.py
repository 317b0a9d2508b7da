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

from tests.bench.core import Case, Outcome, Window
from tests.bench.figures import Comparison, Figure
from tests.bench.server import MARK, NAME, READY

STARTING = 180.0
"""Seconds in which a server is up, on a machine that is busy."""

STREAMS = (100, 500)
STEPS = (1, 8)
QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


@dataclass(frozen=True)
class Server:
    """One of the two, at ``port`` of this machine."""

    process: asyncio.subprocess.Process
    port: int
    log: Path

    async def measured(self, case: Case, **body: Any) -> Outcome:
        """The outcome of a case, for which clients ask in a process of their own."""
        assert self.process.stdin
        self.process.stdin.write(msgspec.json.encode(case) + b"\n")
        await self._said(READY)
        asked = json.dumps({"model": NAME, "input": "Hi", "stream": True, **body})
        command = (sys.executable, "-m", "tests.bench.readers", str(self.port), str(case.streams), asked)
        readers = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        outcome = msgspec.json.decode(await self._said(MARK), type=Outcome)
        assert await readers.wait() == 0
        return outcome

    async def _said(self, mark: bytes) -> bytes:
        """What comes behind ``mark`` in the next line that begins with it."""
        assert self.process.stdout
        async for line in self.process.stdout:
            if line.startswith(mark):
                return line.removeprefix(mark)
        raise RuntimeError(f"The server is gone: see {self.log}")


@asynccontextmanager
async def serving(which: str, log: Path, *options: str, **environment: str) -> AsyncGenerator[Server, None]:
    """A server of penstock's (``ours``) or of vLLM (``peer``), with vLLM's options, for the length of a block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = (sys.executable, "-m", "tests.bench.server", which, str(port), *options)
    pipe, limit = asyncio.subprocess.PIPE, 2**26
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=errors, limit=limit, env=os.environ | QUIET | environment
        )
    try:
        async with asyncio.timeout(STARTING):
            await _listening(process, port, log)
        yield Server(process, port, log)
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
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as closing:
        starting = [serving(name, folder / f"{name}.log") for name in ("ours", "peer")]
        yield Pair(*[await closing.enter_async_context(server) for server in starting])


def case(streams: int, reasoning: int, tokens: int) -> Case:
    """A window for each size of step, of about so many ``tokens`` of all streams together."""
    steps = max(tokens // streams // STEPS[-1], 1) * STEPS[-1]
    windows = (Window(steps * (1 if step == 1 else 2), step) for step in STEPS)
    return Case(streams, reasoning, tuple(windows))


async def compared(both: Pair, asked: Case, rounds: int) -> list[Comparison]:
    """Microseconds of CPU per token in each window; a first round, of few tokens, warms up."""
    outcomes = [(await both.ours.measured(asked), await both.peer.measured(asked)) for _ in range(rounds)]
    comparisons = []
    for number, window in enumerate(asked.windows):
        tokens = asked.streams * window.tokens
        mine = tuple(ours.windows[number].cpu * 1e6 / tokens for ours, _ in outcomes)
        other = tuple(peer.windows[number].cpu * 1e6 / tokens for _, peer in outcomes)
        load = {"streams": asked.streams, "step": window.step, "reasoning": asked.reasoning}
        comparisons.append(Comparison(load, Figure(mine), Figure(other)))
    return comparisons


async def loopback(both: Pair, loads: Iterable[tuple[int, int]], rounds: int, tokens: int) -> list[Comparison]:
    """Every load, of so many streams behind so many tokens of reasoning."""
    for server in (both.ours, both.peer):
        await server.measured(Case(8, 0, (Window(64, 1),)))
    return [found for load in loads for found in await compared(both, case(*load, tokens), rounds)]
