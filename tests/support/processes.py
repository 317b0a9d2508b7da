"""Ports, process trees, and commands.  Nothing of the product is imported here."""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

from tests.support.orphans import ending_with_us

PATIENCE, TO_STOP = 600, 120
"""Seconds after which an engine, or a process with one, has hung; both together are less than a test may take."""

DAY = 86_400
"""Seconds."""

RESERVED = 100
"""Ports that one process holds at most; the oldest go first."""


_reserved: deque[socket.socket] = deque()


def free_port() -> int:
    """Reserve a port for a server of this process or of its children.

    The port stays bound here, without listening, so no other test process gets it.  Servers set SO_REUSEADDR, and may
    bind it beside us.  It lies below the ports that the kernel gives to connections.
    """
    reserved = socket.socket()
    while True:
        port = SystemRandom().randrange(20_000, 32_000)  # Hypothesis seeds all other numbers
        with suppress(OSError):
            reserved.bind(("127.0.0.1", port))
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _reserved.append(reserved)
            if len(_reserved) > RESERVED:
                _reserved.popleft().close()
            return port


@atexit.register
def _release() -> None:
    while _reserved:
        _reserved.pop().close()


def descendants(root: int) -> set[int]:
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def open_files(process: int) -> Iterator[tuple[Path, Path]]:
    """Yield the descriptors that a process has open, and what each refers to; it may close others meanwhile."""
    for descriptor in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):
            yield descriptor, descriptor.readlink()


@dataclass(frozen=True)
class CommandResult:
    status: int
    out: bytes
    err: str


RunCommand = Callable[..., CommandResult]


@contextmanager
def running_process(
    command: Sequence[str | Path],
    health: str,
    log: Path,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server from its first answer at ``health`` until SIGTERM; its output is appended to ``log``.

    It ends with this process, also if this one is killed.
    """
    variables = {**os.environ, **ending_with_us(), **(environment or {})}
    with log.open("ab") as output:
        process = subprocess.Popen(list(map(str, command)), stdout=output, stderr=output, env=variables, cwd=folder)
    try:
        _wait_until_healthy(health, process, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(TO_STOP)
        finally:
            process.kill()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until a condition holds, in a test without an event loop."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def wait_for_midnight(within: float) -> None:
    """Wait for the end of the day if fewer than ``within`` seconds are left, for a test of one day."""
    left = DAY - time.time() % DAY
    if left < within:
        time.sleep(left)


def _wait_until_healthy(health: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(health, timeout=10):
            return
        time.sleep(0.2)
    raise RuntimeError(f"no answer from {health}:\n" + log.read_text(errors="replace")[-4000:])
