"""The process of a model: started by an operator's command, under a guardian that ends it with penstock."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import socket
import sys
import time
from asyncio.subprocess import PIPE, STDOUT, Process
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Literal

from penstock.extensions.models.guardian import KILL_SECONDS, LOOK_SECONDS
from penstock.services.engines.workers import MARK as END_WITH_PARENT
from penstock.services.engines.workers import NO_REPORTS

logger = logging.getLogger(__name__)

GRACE = 15.0
"""Seconds that a process has to end after SIGTERM."""

TREE = "_PENSTOCK_MODEL"
"""Environment variable that marks all processes of one start, so that those of a guardian that was killed are found."""

KEPT_LINES = 20
"""Lines of output that are kept, for the log of a process that has failed."""

_LONGEST_LINE = 2_000
"""Bytes of a line of output that are logged."""

_HOST = "127.0.0.1"
_PORTS = range(20_000, 32_000)
"""Ports for processes: below those that kernels give to outgoing connections."""

_GUARDIAN = "penstock.extensions.models.guardian"
_OWN = "PENSTOCK_"
"""The beginning of penstock's own variables, some of which are secrets."""


@dataclass(frozen=True)
class ChildSpec:
    """The settings of a process."""

    command: str
    idle: float | None = None
    """Seconds after the last lease after which it sleeps or ends; None for never."""
    sleep: Literal[0, 1, 2] = 0
    """The level of vLLM's sleep mode; 0 ends the process instead."""
    start_timeout: float = 600.0
    groups: tuple[str, ...] = ()
    priority: int = 0
    key: str | None = None
    """The API key that the process wants."""

    def words(self, port: int) -> list[str]:
        """Return the command, which listens on a port."""
        words = shlex.split(self.command)
        if any("{port}" in word for word in words):
            words = [word.replace("{port}", str(port)) for word in words]
        else:
            words += ["--host", _HOST, "--port", str(port)]
        if self.sleep and "serve" in words and _SLEEPS not in words:
            words.append(_SLEEPS)
        return words

    def environment(self, tree: str) -> dict[str, str]:
        """Return the variables of a process: those of penstock, without its own."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith(_OWN)}
        if variables.get(NO_REPORTS) != "0":
            variables[NO_REPORTS] = "1"
        if self.sleep:
            variables["VLLM_SERVER_DEV_MODE"] = "1"  # the routes of its sleep
        return variables | {END_WITH_PARENT: "1", TREE: tree}


_SLEEPS = "--enable-sleep-mode"


class Port:
    """A free port of this machine, kept for as long as this object is not closed.

    The port stays bound here, without listening, and the process binds it beside: on Linux both may, as both set
    SO_REUSEADDR, or SO_REUSEPORT as llama.cpp does.  No other program gets the port meanwhile.  Elsewhere it is only
    chosen.
    """

    def __init__(self) -> None:
        self._socket = socket.socket()
        while True:
            self.number = SystemRandom().choice(_PORTS)
            with suppress(OSError):
                self._socket.bind((_HOST, self.number))
                break
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 1)
        if sys.platform != "linux":
            self._socket.close()

    @property
    def url(self) -> str:
        """The address of a server on it."""
        return f"http://{_HOST}:{self.number}"

    def close(self) -> None:
        """Give the port back."""
        self._socket.close()


class Child:
    """A process, from its start until it and all that it has started have ended; `running_child` makes one."""

    def __init__(self, name: str, has_ended: Callable[[], None]) -> None:
        self.pid: int | None = None
        self.end_reason: str | None = None
        """Why it has ended, in words for clients; None while it runs."""
        self.is_up = False
        """True once it may run responses: it then has its grace to end."""
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._name = name
        self._has_ended = has_ended
        self._tree = SystemRandom().randbytes(8).hex()
        self._ours: socket.socket | None = None
        self._following: asyncio.Task[None] | None = None

    async def start(self, spec: ChildSpec, port: Port, grace: float) -> None:
        """Start the guardian, which starts the process."""
        self._ours, theirs = socket.socketpair()
        with theirs:
            guardian = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-m", _GUARDIAN, str(grace), *spec.words(port.number)),
                stdin=theirs.fileno(),
                stdout=PIPE,
                stderr=STDOUT,
                env=spec.environment(self._tree),
                start_new_session=True,
            )
        self._following = asyncio.create_task(self._follow(guardian))

    async def end(self) -> None:
        """End all of its processes, and wait until none is left, also if this is cancelled."""
        if self._ours is None:
            return
        with suppress(OSError):  # the guardian was killed, as some systems tell here
            if not self.is_up and self.end_reason is None:
                self._ours.send(b"!")
            self._ours.shutdown(socket.SHUT_WR)
        cancelled: asyncio.CancelledError | None = None
        while self._following and not self._following.done():
            try:
                await asyncio.shield(self._following)
            except asyncio.CancelledError as error:
                if self._following.cancelled():
                    break
                cancelled = error
        self._ours.close()
        self._ours = None
        if cancelled:
            raise cancelled

    async def _follow(self, guardian: Process) -> None:
        """Read what the guardian tells and what the process writes, until no process is left."""
        assert guardian.stdout is not None
        logging_output = asyncio.create_task(self._log(guardian.stdout))
        assert self._ours is not None
        told, writer = await asyncio.open_connection(sock=self._ours.dup())
        with suppress(ConnectionResetError):  # it ended before the hint to hurry
            async for line in told:
                word, _, number = line.decode().strip().partition(" ")
                match word:
                    case "pid":
                        self.pid = int(number)
                        logger.info("The process of model %s has started, with pid %d", self._name, self.pid)
                    case "error":
                        self._end(f"its command cannot be started ({os.strerror(int(number))})")
                    case _:
                        self._end(_ended_words(int(number)))
        writer.close()
        if self.end_reason is None:
            self._end("its guardian was killed")
            await asyncio.to_thread(_kill_tree, self._tree)
        await logging_output
        await guardian.wait()

    def _end(self, reason: str) -> None:
        self.end_reason = reason
        self._has_ended()

    async def _log(self, output: asyncio.StreamReader) -> None:
        """Log what the process writes."""
        rest = b""
        while piece := await output.read(2**16):
            *lines, rest = (rest + piece).replace(b"\r", b"\n").split(b"\n")
            rest = rest[:_LONGEST_LINE]
            for line in filter(None, lines):
                text = line[:_LONGEST_LINE].decode(errors="replace")
                self.lines.append(text)
                logger.debug("%s: %s", self._name, text)


@asynccontextmanager
async def running_child(
    name: str, spec: ChildSpec, port: Port, has_ended: Callable[[], None], grace: float = GRACE
) -> AsyncGenerator[Child, None]:
    """Run the process of a model for the length of a block; at its end no process of it is left.

    ``has_ended`` is called when the process ends, and `Child.end_reason` then says why.
    """
    child = Child(name, has_ended)
    try:
        await child.start(spec, port, grace)
        yield child
    finally:
        await child.end()


def _ended_words(status: int) -> str:
    if status >= 0:
        return f"it ended with status {status}"
    with suppress(ValueError):
        return f"it was killed by {signal.Signals(-status).name}"
    return f"it was killed by signal {-status}"


def _kill_tree(tree: str) -> None:
    """Kill all processes that have the mark of a tree, until none is left."""
    mark = f"{TREE}={tree}".encode()
    deadline = time.monotonic() + KILL_SECONDS
    while (left := [pid for pid in _processes() if mark in _variables(pid)]) and time.monotonic() < deadline:
        for pid in left:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_SECONDS)


def _processes() -> list[int]:
    return [int(each.name) for each in Path("/proc").glob("[0-9]*")]


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
