"""The guardian of a model's process: a small program between penstock and what the command of an operator starts.

It ends the process, and all that this one has started, when penstock asks for it or is gone, even by SIGKILL: both
close the guardian's standard input, a socket; a byte before that tells it to hurry.  It writes there what happens, one
line each:

* ``pid NUMBER``: the process has started, in a session of its own;
* ``error NUMBER``: it cannot start, with the number of the system's error;
* ``ended STATUS``: it has ended, with its status, or with the negative number of the signal that killed it.

The guardian closes the socket when no process is left.  On Linux it adopts orphans of the process, so that it finds
them, and the kernel kills the process if the guardian is killed.  Elsewhere it knows only the group of the process.

A command: ``python -m penstock.extensions.models.guardian SECONDS COMMAND...``, with the time from SIGTERM to SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_SET_PARENT_DEATH_SIGNAL = 1
"""The number of ``PR_SET_PDEATHSIG`` in prctl(2)."""

_SET_CHILD_SUBREAPER = 36
"""The number of ``PR_SET_CHILD_SUBREAPER``."""

_ON_LINUX = sys.platform == "linux"
_LIBC = ctypes.CDLL(None)

KILL_SECONDS = 30.0
"""Seconds that processes have to end after SIGKILL: the kernel may be busy with freeing their memory."""

_ORPHAN_SECONDS = 2.0
"""Seconds that processes have to end by themselves after the one that has started them."""

_HURRIED_SECONDS = 2.0
"""Seconds that a process has to end that does not run responses yet."""

LOOK_SECONDS = 0.02
"""Seconds between two looks at the processes that are left."""


class _Guarded:
    """A process that runs, with its descendants."""

    def __init__(self, command: list[str]) -> None:
        self._signals, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, self._note)
        self._asked = False
        self.hurries = False
        self._has_ended = False
        if _ON_LINUX:
            _LIBC.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        guardian = os.getpid()

        def end_with_guardian() -> None:
            if _ON_LINUX:
                _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != guardian:
                    os._exit(1)

        self._process = subprocess.Popen(  # noqa: S603 - the operator's command
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=end_with_guardian,  # noqa: PLW1509 - this program has one thread
        )
        _tell(f"pid {self._process.pid}")

    def _note(self, number: int, _: object) -> None:
        if number != signal.SIGCHLD:
            self._asked = True

    def wait(self) -> None:
        """Wait until the process has ended, or is to end."""
        while not (self._reap() or self._asked):
            ready, _, _ = select.select([0, self._signals], [], [])
            if self._signals in ready:
                os.read(self._signals, 4096)
            if 0 in ready:
                self.hurries = bool(os.read(0, 1))
                return

    def end(self, seconds: float) -> None:
        """End the process and all of its descendants; those of a process that has ended itself get no time."""
        if not self._has_ended:
            self._signal_group(signal.SIGTERM)
            self._wait(seconds, lambda: self._has_ended)
            self._wait(min(seconds, _ORPHAN_SECONDS), lambda: not self._left())
        self._signal_group(signal.SIGKILL)
        self._wait(KILL_SECONDS, self._kill_all)

    def _kill_all(self) -> bool:
        """Kill the processes that are left; return True if none was."""
        left = self._left()
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return self._has_ended and not left

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + seconds
        while not (self._reap() and is_over()) and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def _reap(self) -> bool:
        """Collect processes that have ended; return True if the first one has."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._process.pid:
                    self._has_ended = True
                    self._process.returncode = ended[1]  # so that Popen does not wait for it
                    _tell(f"ended {os.waitstatus_to_exitcode(ended[1])}")
        return self._has_ended

    def _signal_group(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _left(self) -> set[int]:
        """Return the processes of the tree, as far as this system tells."""
        return descendants(os.getpid()) if _ON_LINUX else set()


def descendants(root: int) -> set[int]:
    """Return the processes below ``root`` that have not ended, on Linux."""
    parents = dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def _tell(line: str) -> None:
    with suppress(OSError):  # penstock is gone
        os.write(0, f"{line}\n".encode())


def main() -> None:
    """Guard the process of the command."""
    try:
        guarded = _Guarded(sys.argv[2:])
    except OSError as error:
        _tell(f"error {error.errno}")
        return
    guarded.wait()
    guarded.end(_HURRIED_SECONDS if guarded.hurries else float(sys.argv[1]))


if __name__ == "__main__":
    main()
