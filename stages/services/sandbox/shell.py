"""The program of a sandbox for commands: it runs one command at a time, and ends all that a command left behind.

It is sent to the sandbox as text, behind `confined` and `kept`.  In a pid namespace it is the first process.  Without
one, each command runs in a Landlock domain of its own inside this process's, so that no command can signal this process
and ``kill(-1)`` here reaches all of its processes, whatever sessions they went to, and nothing else of the machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import time
from typing import Any

from penstock.stages.services.sandbox.confined import LIBC, answer, landlock
from penstock.stages.services.sandbox.kept import Kept

PAUSE = 0.02
"""How long the end of a command may go unnoticed."""


class Gone(Exception):
    """The server does not listen any more."""


class Command:
    """One command that runs."""

    def __init__(self, request: dict[str, Any], order: dict[str, Any]) -> None:
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self._kept = {out: Kept(request["keep"]), err: Kept(request["keep"])}
        self._out, self._err = self._kept.values()
        self._open = {out, err}
        self._flood: int = order["flood"]
        self.pid = os.fork()
        if not self.pid:
            become(request, order, out_end, err_end)
        os.close(out_end)
        os.close(err_end)

    def read(self, control: int) -> None:
        """Take what it wrote; raises `Gone`."""
        ready, _, _ = select.select([*self._open, control], [], [], PAUSE)
        if control in ready:
            raise Gone
        for end in ready:
            self._take(end)

    def drain(self) -> None:
        """Read to the end, when nobody can write any more."""
        while self._open:
            for end in tuple(self._open):
                self._take(end)

    @property
    def floods(self) -> bool:
        """Whether it writes without end."""
        return self._out.total + self._err.total > self._flood

    def texts(self) -> dict[str, str]:
        """What it wrote."""
        return {"stdout": self._out.text(), "stderr": self._err.text()}

    def _take(self, end: int) -> None:
        data = os.read(end, 65536)
        if data:
            self._kept[end].add(data)
        else:
            self._open.remove(end)
            os.close(end)


def become(request: dict[str, Any], order: dict[str, Any], out: int, err: int) -> None:
    """Turn the new process into the command; never returns."""
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if order["scope"]:
            landlock(order["read"], order["write"])
        os.chdir(request["workdir"] or order["home"])
        words = request["words"]
        os.execvpe(words[0], words, {**os.environ, **request["env"]})  # noqa: S606 - what this program is for
    except BaseException as exc:  # noqa: BLE001 - whatever it is, this process must not go on as its parent
        os.write(2, f"{exc}\n".encode())
    finally:
        os._exit(127)


def end_all() -> dict[int, int]:
    """Kill every process but this one, and take back what is left of them: their statuses."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    return reap(0)


def reap(flags: int) -> dict[int, int]:
    """The statuses of processes that have ended."""
    found: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return found
        if not pid:
            return found
        found[pid] = status


def run(request: dict[str, Any], control: int, order: dict[str, Any]) -> dict[str, Any]:
    """Run one command to its end, or to that of its time."""
    command = Command(request, order)
    until = time.monotonic() + request["seconds"]
    statuses: dict[int, int] = {}
    while command.pid not in statuses and time.monotonic() < until and not command.floods:
        command.read(control)
        statuses |= reap(os.WNOHANG)
    ended = command.pid in statuses
    statuses |= end_all()
    command.drain()
    late = not ended and not command.floods
    code = os.waitstatus_to_exitcode(statuses.get(command.pid, signal.SIGKILL))
    return {**command.texts(), "flooded": command.floods, "code": None if late else code}


def serve(requests: io.BufferedReader, control: int, order: dict[str, Any]) -> None:
    """Run what comes until no more comes."""
    LIBC.prctl(36, 1, 0, 0, 0)  # orphans come to this process
    try:
        while line := requests.readline():
            answer(control, **run(json.loads(line), control, order))
    except Gone:
        pass
    finally:
        end_all()
