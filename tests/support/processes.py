"""Ports, process trees, and commands.  Nothing of the product is imported here."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom


def free_port() -> int:
    """A port that nobody listens on, and that no connection is given by chance before somebody does."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)  # Hypothesis seeds all other numbers
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
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
    """How a command ended."""

    status: int
    out: bytes
    err: str


RunCommand = Callable[..., CommandResult]
