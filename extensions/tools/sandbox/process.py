"""A running sandbox: its processes, its control channel and its output, in the folder of its container."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from penstock.extensions.tools.sandbox.channel import Channel, Output
from penstock.extensions.tools.sandbox.disk import MOST_FILES, exceeds
from penstock.extensions.tools.sandbox.folder import Folder
from penstock.extensions.tools.sandbox.plan import OWN, Plan, environment, link_home
from penstock.services.containers import HOME

_START_SECONDS: Final = 30.0
"""Seconds for a start, which takes 0.1 s of CPU: many times that on a machine whose cores are all in use."""
_END_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.25
_LOOK_SHARE: Final = 0.05
"""The share of a core that looking at the files of one sandbox may take, however many it has."""
_ENDED: Final = "it ended itself, used up its processor time, or broke the channel to the server"


class SandboxDied(Exception):
    """The sandbox has ended; the message is the reason, as far as it is known."""


class SandboxLate(SandboxDied):
    """The sandbox did not start in time, as happens on a machine whose cores are all in use."""


class Process:
    """A running sandbox; create one with `start`."""

    def __init__(self, plan: Plan, folder: Folder) -> None:
        self._plan = plan
        self._folder = folder
        self.home = plan.home(folder.path)
        """The path of the folder inside."""
        self.excess: str | None = None
        """The limit that the sandbox exceeded, ``output`` or ``disk``; None if it did not."""
        self._reason = ""
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._places: list[int] = []
        self._look_cost = 0.0
        self._channel = Channel(self.kill)
        self._control, self._status, output, self._outer = _spawn(plan, folder)
        self._output = Output(output, plan.limits.output, plan.limits.flood, self._flooded)
        self._watched = [os.pidfd_open(self._outer.pid)]
        self._greeted = False

    @classmethod
    async def start(cls, plan: Plan, folder: Folder) -> Process:
        """Start a sandbox in a folder, and return it when it is confined and ready; raises `SandboxDied`.

        A thread spawns it, because the system call waits until the child runs its program.
        """
        spawning = asyncio.create_task(asyncio.to_thread(cls, plan, folder))
        try:
            process = await asyncio.shield(spawning)
        except asyncio.CancelledError:  # the thread spawns it all the same
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
        """Output since the latest question after which the code did not go on."""
        return self.shown(self._output.text())

    def shown(self, text: str) -> str:
        """Return output with the path of the folder that the sandbox was given, where the kernel's own name stands."""
        return text.replace(str(self._folder.path), self.home) if self._plan.uses_link else text

    async def ask(self, question: dict[str, Any], seconds: float, *, goes_on: bool = False) -> dict[str, Any]:
        """Send a question and wait for the answer, as `answer` does.

        The output of the questions before is forgotten, unless the code ``goes_on``.
        """
        if not goes_on:
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
        self._signal(signal.SIGINT)

    def pause(self) -> None:
        """Stop what runs between questions, such as threads that code has left, until `resume`; a shell leaves none."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the sandbox go on after `pause`."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the sandbox without waiting for it; `end` releases its resources."""
        self._channel.shut()
        with contextlib.suppress(OSError):  # the process has ended, or `end` has closed the socket
            self._control.shutdown(socket.SHUT_RDWR)
        if not self._sweeps_itself:
            self._kill_watched()

    async def end(self) -> None:
        """Kill the sandbox, and wait for its processes to exit."""
        self.kill()
        if self._ending is None:
            self._ending = asyncio.create_task(self._clean_up())
        await asyncio.shield(self._ending)  # other callers wait for the same end

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            if self._plan.kind != "container" and self._watched:
                signal.pidfd_send_signal(self._watched[-1], number)

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
            await self.ask(self._plan.order(self._folder.path), _START_SECONDS)
        except TimeoutError:
            raise SandboxLate("it did not start in time") from None
        except SandboxDied:
            raise SandboxDied(self._reason or _last_line(self.written)) from None
        if self._plan.isolates:
            inner = _inner(self._status)
            self._watched.append(os.pidfd_open(inner))
            _prefer_for_oom_kill(inner)
            self._places += (os.open(f"/proc/{inner}/root{place}", os.O_PATH) for place in OWN if place != HOME)
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
        if any(map(_has_too_many_files, self._places)):
            return True
        return await asyncio.to_thread(self._folder_exceeds, str(self._folder.path))

    def _folder_exceeds(self, folder: str) -> bool:
        started = time.thread_time()
        result = exceeds(folder, self.home, self._outer.pid, self._folder.user_id, self._plan.limits.disk)
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


def _spawn(plan: Plan, folder: Folder) -> tuple[socket.socket, int, int, subprocess.Popen[bytes]]:
    """Start the sandbox; return the control channel, bubblewrap's status pipe, the output pipe and the process.

    The process inherits the other ends of these three, the variables of `environment`, and nothing else.
    """
    if plan.uses_link:
        link_home()
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
            plan.command(status_end, folder.path),
            stdin=control_end.fileno(),
            stdout=output_end,
            stderr=output_end,
            env=environment(plan.home(folder.path), plan.seed),
            cwd="/" if plan.isolates else folder.path,
            pass_fds=(status_end,) if plan.isolates else (),
            start_new_session=True,
            user=folder.user_id,
            group=folder.user_id,
            extra_groups=None if folder.user_id is None else [],
        )
        ours.pop_all()
    return control, status, output, process


def _prefer_for_oom_kill(pid: int) -> None:
    """Make the kernel kill this process before any server if memory runs out."""
    _set(pid, "oom_score_adj", "1000")


def _set(pid: int, name: str, value: str) -> None:
    with contextlib.suppress(OSError):  # the process may have ended already
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


def _has_too_many_files(place: int) -> bool:
    """True if a file system in memory has too many files; empty ones take memory too."""
    stats = os.statvfs(place)
    return stats.f_files - stats.f_ffree > MOST_FILES
