"""Whole servers over loopback, each over a stand-in engine core: their cost per token, and the memory of a stream.

All servers run for the whole time and take turns, so that a busy machine slows each of them.  The figure is the CPU
time of the server's process, all threads included, within the measured window.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

import aiohttp
import msgspec
import psutil

from tests.bench.core import CONTEXT, MARKED, READY, SETTLING, Case, Command, Done, End, Window
from tests.bench.rust_frontend import program
from tests.bench.wire import RESPONSES
from tests.support.processes import free_port

STARTING = 400.0
"""Seconds that a server may take to start, on a busy machine."""

ANSWERING = 180.0
"""Seconds that a server may take to carry out a command."""

SECONDS = 1.5
"""Length of a window with a rate."""

CORES = sorted(os.sched_getaffinity(0))
"""The last one is for the clients and the engine cores, and the others for the servers; a single one is for all."""

QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
STORING = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
"""Lets vLLM's server run background responses and keep their events."""

MODEL = ".cache/tiny_gpt_oss"
"""It has the vocabulary and tokenizer of gpt-oss; its weights are not loaded."""

NAME = "gpt-oss"
OPTIONS = (
    "--served-model-name", NAME, "--max-model-len", str(CONTEXT), "--disable-log-stats",
    "--data-parallel-size", "1", "--data-parallel-size-local", "0", "--data-parallel-address", "127.0.0.1",
)  # fmt: skip
"""The options of every frontend: the engine core is elsewhere."""

PYTHON = (
    "--dtype", "bfloat16", "--max-num-seqs", "4096", "--max-num-batched-tokens", "8192",
    "--kv-cache-memory-bytes", "67108864",
)  # fmt: skip
"""The options of those in Python, which read the core's as well."""

SERVE = Path(sys.executable).parent

OURS, PEER, RUST, BARE = "penstock", "vllm", "vllm-rs", "bare"
"""The kinds of servers: penstock, vLLM's server in Python, its frontend in Rust, and one that only writes the bytes."""

Api: TypeAlias = tuple[str, Mapping[str, Any]]
"""The path of an API, and the parameters by which it is asked for an answer."""

ASKING_RESPONSES: Api = (RESPONSES, {"input": "Hi"})


class Measured(NamedTuple):
    """The CPU seconds of a command, when it began on the monotonic clock, and the memory before and after it."""

    cpu: float
    begun: float
    memory: tuple[int, int]


def command_of(which: str, port: int, handshake: int, folder: str) -> Sequence[str]:
    """Return the command of a kind of server; ``handshake`` is the port at which it waits for its engine core."""
    reached = (*OPTIONS, "--data-parallel-rpc-port", str(handshake))
    here = ("--host", "127.0.0.1", "--port", str(port))
    if which == OURS:
        own = ("--store", f"{folder}/store.sqlite3", "--no-sandbox", "--log-level", "WARNING")
        return (str(SERVE / "penstock"), "serve", MODEL, *PYTHON, *reached, *here, *own)
    if which == PEER:
        quiet = ("--disable-uvicorn-access-log", "--uvicorn-log-level", "error")
        return (str(SERVE / "vllm"), "serve", MODEL, *PYTHON, *reached, *here, *quiet)
    if which == RUST:
        return (str(program()), "serve", MODEL, *reached, *here)
    return (sys.executable, "-m", "tests.bench.bare", which, str(port), str(handshake), *PYTHON, *reached)


@dataclass(frozen=True)
class Server:
    """A running server at ``port`` of this machine, and the engine core below it."""

    which: str
    process: psutil.Process
    core: asyncio.subprocess.Process
    port: int
    log: Path

    @property
    def arrivals(self) -> Path:
        """The file to which the clients of a ``timed`` case write their arrivals."""
        return self.log.with_suffix(".arrivals")

    @asynccontextmanager
    async def running(
        self, case: Case, *, api: Api = ASKING_RESPONSES, timed: bool = False, **body: Any
    ) -> AsyncGenerator[Measured, None]:
        """Run a case for the length of a block, with clients in another process; yield the cost of its beginning.

        Only penstock stores responses: vLLM's server would keep them in memory for ever.
        """
        path, asking = api
        stored = {"store": self.which == OURS} if path == RESPONSES else {}
        request = json.dumps({"model": NAME, "stream": True, **stored, **asking, **body})
        noting = ("--arrivals", str(self.arrivals)) if timed else ()
        options = (
            str(self.port),
            str(case.streams),
            request,
            "--path",
            path,
            "--read",
            str(read_by(self.log)),
            *noting,
        )
        before = self._send(case)
        await self._line(READY)
        command = (sys.executable, "-m", "tests.bench.readers", *options)
        readers = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        os.sched_setaffinity(readers.pid, CORES[-1:])
        try:
            beginning, reading = asyncio.create_task(self._measured(before)), asyncio.create_task(readers.wait())
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

    async def measured(self, command: Window | End) -> Measured:
        return await self._measured(self._send(command))

    async def used(self) -> float:
        """Return the CPU seconds of the server's process so far, once it has settled."""
        await asyncio.sleep(SETTLING)
        return cpu_of(self.process.pid)

    def _send(self, command: Command) -> tuple[float, int]:
        """Send a command to the core; return what the server has used before it."""
        assert self.core.stdin
        before = cpu_of(self.process.pid), self.process.memory_info().rss
        self.core.stdin.write(msgspec.json.encode(command) + b"\n")
        return before

    async def _measured(self, before: tuple[float, int]) -> Measured:
        done = msgspec.json.decode(await self._line(MARKED), type=Done)
        used, memory = before
        return Measured(await self.used() - used, done.begun, (memory, self.process.memory_info().rss))

    async def _line(self, mark: bytes) -> bytes:
        """Wait for a line of the core that begins with ``mark`` and return the rest of it."""
        assert self.core.stdout
        try:
            async with asyncio.timeout(ANSWERING):
                async for line in self.core.stdout:
                    if line.startswith(mark):
                        return line.removeprefix(mark)
        except TimeoutError:
            raise RuntimeError(f"The core has not answered for {ANSWERING:g} seconds: see {self.log}") from None
        raise RuntimeError(f"The core is gone: see {self.log}")


def cpu_of(process: int) -> float:
    """Return the CPU seconds of a process and its threads, by its clock (``clock_getcpuclockid`` of Linux)."""
    return time.clock_gettime(~process << 3 | 2)


def read_by(log: Path) -> Path:
    """Return the file in which the clients of a server count the tokens that they have read."""
    return log.with_suffix(".read")


@asynccontextmanager
async def serving(which: str, log: Path) -> AsyncGenerator[Server, None]:
    """Run a kind of server over an engine core of its own for the length of a block."""
    port, handshake, pipe = free_port(), free_port(), asyncio.subprocess.PIPE
    async with AsyncExitStack() as closing:
        folder = closing.enter_context(TemporaryDirectory())
        errors = closing.enter_context(log.open("wb"))
        process = await asyncio.create_subprocess_exec(
            *command_of(which, port, handshake, folder),
            stdout=errors,
            stderr=errors,
            env=os.environ | QUIET | (STORING if which == PEER else {}),
        )
        closing.push_async_callback(_ended, process)
        os.sched_setaffinity(process.pid, CORES[:-1] or CORES)
        core = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.bench.core", f"tcp://127.0.0.1:{handshake}", str(read_by(log))),
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
        )
        closing.push_async_callback(_ended, core)
        os.sched_setaffinity(core.pid, CORES[-1:])
        async with asyncio.timeout(STARTING):
            await _up(process, port, log)
        yield Server(which, psutil.Process(process.pid), core, port, log)


async def _ended(process: asyncio.subprocess.Process) -> None:
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


Servers: TypeAlias = Mapping[str, Server]
"""The running servers, by their kinds."""


@asynccontextmanager
async def servers(folder: Path, kinds: Sequence[str]) -> AsyncGenerator[Servers, None]:
    """Run a server of each kind for the length of a block."""
    async with AsyncExitStack() as closing:
        async with asyncio.TaskGroup() as starting:
            started = {
                which: starting.create_task(closing.enter_async_context(serving(which, folder / f"{which}.log")))
                for which in kinds
            }
        yield {which: task.result() for which, task in started.items()}


async def cost(server: Server, case: Case, window: Window) -> float:
    """Return the microseconds of CPU per token of a window in the running case."""
    return (await server.measured(window)).cpu * 1e6 / (case.streams * window.tokens)


async def open_stream(server: Server, streams: int, api: Api = ASKING_RESPONSES) -> float:
    """Return the bytes of memory of a stream that has begun; a first stream warms up what all of them share."""
    async with server.running(Case(1), api=api):
        pass
    async with server.running(Case(streams), api=api) as begun:
        before, after = begun.memory
        return (after - before) / streams


async def retained_token(server: Server, tokens: int, streams: int = 20) -> float:
    """Return the bytes per token of background responses, whose events can all be replayed."""
    async with server.running(Case(streams), background=True, store=True):
        await server.measured(Window(256, 1))
        before, after = (await server.measured(Window(tokens, 1))).memory
    return (after - before) / streams / tokens
