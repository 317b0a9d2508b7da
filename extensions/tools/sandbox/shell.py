"""The program of a sandbox for commands: it runs one command at a time, and ends all processes left by a command.

It is sent to the sandbox as text, after `confined` and `head_tail`.  In a pid namespace it is the first process.
Without one, each command runs in its own Landlock domain, nested in the domain of this process.  So no command can
signal this process, and ``kill(-1)`` here reaches all processes of the command, in any session, and no others on the
machine.
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

from penstock.extensions.tools.sandbox.confined import LIBC, answer, landlock
from penstock.extensions.tools.sandbox.head_tail import HeadTailBuffer

PAUSE = 0.02
"""Maximum delay in seconds until the end of a command is noticed."""


class Gone(Exception):
    """The server has closed the control channel."""


class Command:
    """A running command."""

    def __init__(self, request: dict[str, Any], order: dict[str, Any]) -> None:
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        self._kept = {out: HeadTailBuffer(request["keep"]), err: HeadTailBuffer(request["keep"])}
        self._out, self._err = self._kept.values()
        self._open = {out, err}
        self._flood: int = order["flood"]
        self.pid = os.fork()
        if not self.pid:
            become(request, order, out_end, err_end)
        os.close(out_end)
        os.close(err_end)

    def read(self, control: int) -> None:
        """Read the available output, waiting at most `PAUSE` seconds for it; raises `Gone`."""
        ready, _, _ = select.select([*self._open, control], [], [], PAUSE)
        if control in ready:
            raise Gone
        for end in ready:
            self._take(end)

    def drain(self) -> None:
        """Read the rest of the output, after all its writers have ended."""
        while self._open:
            for end in tuple(self._open):
                self._take(end)

    @property
    def floods(self) -> bool:
        return self._out.total + self._err.total > self._flood

    def texts(self) -> dict[str, str]:
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
        os.setpgid(0, 0)  # not a new session, whose niceness would be that of a server
        os.dup2(out, 1)
        os.dup2(err, 2)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        if order["scope"]:
            landlock(order["read"], order["write"])
        os.chdir(request["workdir"] or order["home"])
        words = request["words"]
        os.execvpe(words[0], words, {**os.environ, **request["env"]})  # noqa: S606 - the purpose of this program
    except BaseException as exc:  # noqa: BLE001 - this process must never continue as its parent
        os.write(2, f"{exc}\n".encode())
    finally:
        os._exit(127)


def end_all() -> dict[int, int]:
    """Kill every process but this one, and return their statuses by pid."""
    with contextlib.suppress(ProcessLookupError):  # no other process is left
        os.kill(-1, signal.SIGKILL)
    return reap(0)


def reap(flags: int) -> dict[int, int]:
    """Collect the child processes that have ended, and return their statuses by pid."""
    statuses: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, flags)
        except ChildProcessError:
            return statuses
        if not pid:
            return statuses
        statuses[pid] = status


def run(request: dict[str, Any], control: int, order: dict[str, Any]) -> dict[str, Any]:
    """Run one command until it ends, its time is up, or it has written too much."""
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
    """Run commands until the control channel is closed."""
    LIBC.prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphaned processes become its children
    try:
        while line := requests.readline():
            request = json.loads(line)
            answer(control, number=request["number"], **run(request, control, order))
    except Gone:
        pass
    finally:
        end_all()
