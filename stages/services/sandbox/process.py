"""A running sandbox: its processes, its control channel, its output and its folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from penstock.stages.services.sandbox.channel import Channel, Output
from penstock.stages.services.sandbox.disk import MOST_FILES, exceeds
from penstock.stages.services.sandbox.plan import HOME, OWN, Plan, environment
from penstock.stages.services.sandbox.users import SandboxUser

_START_SECONDS: Final = 30.0
"""Seconds for a start, which takes 0.1 s of CPU: many times that on a machine whose cores are all in use."""
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.25
_LOOK_SHARE: Final = 0.05
"""The share of a core that looking at the files of one sandbox may take, however many it has."""
_ENDED: Final = "it ended itself, used up its processor time, or broke the channel to the server"

_log = logging.getLogger(__name__)


class SandboxDied(Exception):
    """The sandbox has ended; the message is the reason, as far as it is known."""


class SandboxLate(SandboxDied):
    """The sandbox did not start in time, as happens on a machine whose cores are all in use."""


class Process:
    """A running sandbox; create one with `start`."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._user = SandboxUser() if plan.drops_user else None
        self._folder = None if plan.isolates else _make_folder(self._user)
        self.excess: str | None = None
        """The limit that the sandbox exceeded, ``output`` or ``disk``; None if it did not."""
        self._reason = ""
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._places: list[int] = []
        self._look_cost = 0.0
        self._channel = Channel(self.kill)
        try:
            self._control, self._status, output, self._outer = _spawn(
                plan, self._folder, self._user.id if self._user else None
            )
        except OSError:
            if self._folder:
                self._folder.rmdir()
            if self._user:
                self._user.release()
            raise
        self._output = Output(output, plan.limits.output, plan.limits.flood, self._flooded)
        self._watched = [os.pidfd_open(self._outer.pid)]
        self._greeted = False

    @classmethod
    async def start(cls, plan: Plan) -> Process:
        """Start a sandbox, and return it when it is confined and ready; raises `SandboxDied`.

        A thread spawns it, because the system call waits until the child runs its program.
        """
        spawning = asyncio.create_task(asyncio.to_thread(cls, plan))
        try:
            process = await asyncio.shield(spawning)
        except asyncio.CancelledError:
            process = await spawning
            await process.end()
            raise
        try:
            await process.confine()
        except BaseException:
            await process.end()
            raise
        return process

    @property
    def alive(self) -> bool:
        """True if the sandbox can answer questions."""
        return self._channel.open

    @property
    def written(self) -> str:
        """Output since the latest question."""
        return self._output.text()

    async def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Send a question and wait for the answer, as `answer` does."""
        self._output.forget()
        self._channel.ask(question)
        return await self.answer(seconds)

    async def answer(self, seconds: float) -> dict[str, Any]:
        """Wait for the answer to the latest question.

        Raises `SandboxDied`, or `TimeoutError` after ``seconds``; the caller may then wait again.
        """
        answer = await self._channel.answer(seconds)
        self._output.read()
        if answer is not None:
            return answer
        if not self.alive:
            raise SandboxDied(self._reason or _ENDED)
        raise TimeoutError

    def interrupt(self) -> None:
        """Interrupt the running code, by SIGINT."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._watched[-1], signal.SIGINT)

    def kill(self) -> None:
        """End the sandbox without waiting for it; `end` releases its resources."""
        self._channel.shut()
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        if not self._sweeps_itself:
            self._kill_watched()

    async def end(self) -> None:
        """Kill the sandbox, wait for its processes to exit, and remove its folder."""
        self.kill()
        if self._ending is None:
            self._ending = asyncio.create_task(self._clean_up())
        await asyncio.shield(self._ending)

    @property
    def _sweeps_itself(self) -> bool:
        """True if the sandbox's first process ends the others when the channel closes.

        No process inside can signal the first one.
        """
        return self._greeted and not self._plan.isolates and self._plan.kind == "container"

    async def confine(self) -> None:
        """Wait until the sandbox is confined and ready; raises `SandboxDied`."""
        _prefer_for_oom_kill(self._outer.pid)
        self._output.watch()
        await asyncio.get_running_loop().create_unix_connection(lambda: self._channel, sock=self._control)
        try:
            await self.ask(self._plan.order(str(self._folder or HOME)), _START_SECONDS)
        except TimeoutError:
            raise SandboxLate("it did not start in time") from None
        except SandboxDied:
            raise SandboxDied(self._reason or _last_line(self.written)) from None
        if self._plan.isolates:
            inner = _inner(self._status)
            self._watched.append(os.pidfd_open(inner))
            _prefer_for_oom_kill(inner)
            self._places += (os.open(f"/proc/{inner}/root{place}", os.O_PATH) for place in OWN)
        # the niceness of its session, which counts if the kernel groups by these
        _set(self._outer.pid, "autogroup", "19")
        self._greeted = True
        self._watching = asyncio.create_task(self._watch())

    def _flooded(self) -> None:
        self.excess = "output"
        self._reason = f"it wrote more than {self._plan.limits.flood >> 20} MB of output"
        self.kill()

    async def _watch(self) -> None:
        """End the sandbox if its files exceed the limits.  Also checks between calls, because threads keep running."""
        while not await self._exceeds_disk_limit():
            await asyncio.sleep(max(_LOOK_SECONDS, self._look_cost / _LOOK_SHARE))
        self.excess = "disk"
        self._reason = f"it wrote more than {self._plan.limits.disk >> 20} MB of files, or {MOST_FILES} files"
        self.kill()

    async def _exceeds_disk_limit(self) -> bool:
        if self._folder is None:
            return any(map(_has_too_many_files, self._places))
        return await asyncio.to_thread(self._folder_exceeds, str(self._folder))

    def _folder_exceeds(self, folder: str) -> bool:
        started = time.thread_time()
        user = self._user.id if self._user else None
        result = exceeds(folder, self._outer.pid, user, self._plan.limits.disk)
        self._look_cost = time.thread_time() - started
        return result

    def _kill_watched(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._outer.pid, signal.SIGKILL)  # bubblewrap, and the child that it may have just made
        for process in self._watched:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)

    async def _clean_up(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        for process in self._watched:
            if not await _ended(process):
                self._kill_watched()
                await _ended(process)
        await asyncio.to_thread(self._outer.wait)
        while self._watched:
            os.close(self._watched.pop())
        while self._places:
            os.close(self._places.pop())
        self._output.close()
        os.close(self._status)
        self._control.close()
        if self._folder:
            await _remove(self._folder)
        if self._user:
            self._user.release()


def _spawn(
    plan: Plan, folder: Path | None, user: int | None
) -> tuple[socket.socket, int, int, subprocess.Popen[bytes]]:
    """Start the sandbox; return the control channel, bubblewrap's status pipe, the output pipe and the process.

    The process inherits the other ends of these three, the variables of `environment`, and nothing else.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        control, control_end = socket.socketpair()
        theirs.callback(control_end.close)
        ours.callback(control.close)
        ends = []
        for _ in range(2):
            end, other = os.pipe()
            theirs.callback(os.close, other)
            ours.callback(os.close, end)
            ends.append((end, other))
        (status, status_end), (output, output_end) = ends
        process = subprocess.Popen(  # noqa: S603 - this project's own command line
            plan.command(status_end),
            stdin=control_end.fileno(),
            stdout=output_end,
            stderr=output_end,
            env=environment(str(folder or HOME)),
            cwd=folder or "/",
            pass_fds=(status_end,) if plan.isolates else (),
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
        ours.pop_all()
    return control, status, output, process


def _prefer_for_oom_kill(pid: int) -> None:
    """Make the kernel kill this process before any server if memory runs out."""
    _set(pid, "oom_score_adj", "1000")


def _set(pid: int, name: str, value: str) -> None:
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/{name}").write_text(value, encoding="ascii")


def _inner(status: int) -> int:
    """Return the pid of the first process inside.

    bubblewrap writes it before that process continues, so after the first answer this read does not block.
    """
    first, _, _ = os.read(status, 65536).partition(b"\n")
    return int(json.loads(first)["child-pid"])


async def _ended(process: int) -> bool:
    """Wait for the end of a process; False if it takes longer than `_END_SECONDS`."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(process, ended.set)
    try:
        async with asyncio.timeout(_END_SECONDS):
            await ended.wait()
    except TimeoutError:
        return False
    finally:
        loop.remove_reader(process)
    return True


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it ended at once"])[-1]


def _make_folder(user: SandboxUser | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="penstock-sandbox-"))
    if user:
        os.chown(folder, user.id, user.id)
    return folder


def _has_too_many_files(place: int) -> bool:
    """True if a file system in memory has too many files; empty ones take memory too."""
    stats = os.statvfs(place)
    return stats.f_files - stats.f_ffree > MOST_FILES


async def _remove(folder: Path) -> None:
    """Remove a folder with ``rm``, because its tree may exceed Python's recursion limit."""
    process = await asyncio.create_subprocess_exec("rm", "-rf", "--", str(folder), stderr=subprocess.DEVNULL)
    if await process.wait():
        _log.warning("the folder of a sandbox cannot be removed: %s", folder)
