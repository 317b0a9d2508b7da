"""Ports, process trees, and commands.  Nothing of the product is imported here."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom

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


def descendants(root: int) -> set[int]:
    """All processes below one, by their parents."""
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


@dataclass(frozen=True)
class CommandResult:
    """The exit status and the output of a command."""

    status: int
    out: bytes
    err: str


RunCommand = Callable[..., CommandResult]
