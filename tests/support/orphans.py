"""Ends what a program of the tests has started when the program is gone, also if it was killed.

A command: a process of its own that waits for the end of its standard input.  Nothing but Python is needed.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from random import SystemRandom

MARK = "PROCESS_ENDS_WITH"
"""The variable that the processes of a program have, and those that they start."""


@functools.cache
def ending_with_us() -> Mapping[str, str]:
    """Return the variable for what this program starts: such processes are killed once this one is gone."""
    mark = SystemRandom().randbytes(8).hex()
    ours, _until_our_end = os.pipe()
    watching = [sys.executable, "-I", __file__, mark]
    # not all: a test may mark its own processes
    needed = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    os.posix_spawn(sys.executable, watching, needed, file_actions=[(os.POSIX_SPAWN_DUP2, ours, 0)], setsid=True)
    os.close(ours)
    return {MARK: mark}


def main() -> None:
    """Kill the processes with a mark, until none is left, once the program is gone."""
    os.read(0, 1)
    while left := [*_marked(f"{MARK}={sys.argv[1]}".encode())]:
        for number in left:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: bytes) -> Iterator[int]:
    """Yield the processes that have a mark and have not ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                yield int(folder.name)


if __name__ == "__main__":
    main()
