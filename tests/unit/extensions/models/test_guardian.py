"""No process of a model is left, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.extensions.models.guardian import descendants
from tests.support.api_clients import wait_until
from tests.support.on_demand import Scene
from tests.support.processes import wait_for
from tests.support.scripted_model import MARK, MODEL, marked

pytestmark = [pytest.mark.io, pytest.mark.slow]

STUBBORN = "--ignore-sigterm --fork"
"""A process that ignores SIGTERM, as does one that it has started in a session of its own."""

PARENT = f"""
import asyncio
import sys
from contextlib import nullcontext
from penstock.extensions.models.child import ChildSpec
from penstock.extensions.models.life import OnDemand
from penstock.extensions.models.turns import Groups

async def main():
    model = OnDemand("model", ChildSpec("{MODEL} " + sys.argv[1]), Groups(), nullcontext, grace=0.1)
    running = asyncio.create_task(model.run())
    lease = await model.acquire(None)
    print("up", flush=True)
    await running

asyncio.run(main())
"""
"""A program with a model, in place of penstock."""


def ancestors(pid: int | None) -> list[int]:
    """Return the parent of a process, of a model its guardian, and the parent of that one."""
    parents = list[int]()
    while pid and len(parents) < 2:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        parents.append(pid)
    return parents


@contextmanager
def running_parent(options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program that stands for penstock, from the moment that its model is up."""
    command = [sys.executable, "-c", PARENT, options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"up\n"
        yield parent


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_processes_end_with_penstock(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with running_parent(STUBBORN) as parent:
        assert len(marked(mark)) == 4  # with the guardian, and the process that the model has started
        parent.send_signal(number)
    wait_for(lambda: not marked(mark))


def test_the_process_ends_also_if_penstock_and_the_guardian_are_killed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with running_parent("--ignore-sigterm") as parent:
        (model,) = (pid for pid in marked(mark) if parent.pid in ancestors(pid)[1:])
        for pid in ancestors(model)[:2]:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not marked(mark))


@pytest.mark.parametrize("grace", [0.0, 0.1])
async def test_stubborn_processes_are_killed_at_the_end(scene: Scene, grace: float) -> None:
    model = scene.model(options=STUBBORN, grace=grace)
    (await model.acquire(None)).release()
    assert len(scene.processes) == 3
    await model.close()
    assert not scene.processes


async def test_a_process_has_time_to_end_by_itself(scene: Scene) -> None:
    model = scene.model(options="--note-end", grace=600.0)
    (await model.acquire(None)).release()
    await model.close()
    assert scene.events == ["start", "end"]


async def test_a_killed_guardian_takes_all_processes_along(scene: Scene) -> None:
    model = scene.model(options=STUBBORN, grace=0.1)
    lease = await model.acquire(None)
    os.kill(ancestors(model.pid)[0], signal.SIGKILL)
    await wait_until(lambda: model.reason)
    assert model.reason == "its guardian was killed"
    await wait_until(lambda: not scene.processes)
    lease.release()
    (await model.acquire(None)).release()


async def test_a_killed_process_takes_those_along_that_it_has_started(scene: Scene) -> None:
    model = scene.model(options=STUBBORN, grace=0.1)
    lease = await model.acquire(None)
    assert model.pid
    os.kill(model.pid, signal.SIGKILL)
    await wait_until(lambda: model.reason)
    assert model.reason == "it was killed by SIGKILL"
    await wait_until(lambda: not scene.processes)
    lease.release()


async def test_a_stopped_process_ends_too(scene: Scene) -> None:
    model = scene.model(grace=0.1)
    (await model.acquire(None)).release()
    assert model.pid
    os.kill(model.pid, signal.SIGSTOP)
    await model.close()
    assert not scene.processes


async def test_interrupts_of_the_terminal_do_not_reach_the_model(scene: Scene) -> None:
    """Ctrl-C goes to the group of penstock, which ends its models when their responses have ended."""
    model = scene.model()
    lease = await model.acquire(None)
    assert {os.getpgid(pid) for pid in scene.processes}.isdisjoint({os.getpgrp()})
    lease.release()


async def test_descendants_are_found() -> None:
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=asyncio.subprocess.PIPE)
    assert process.pid in descendants(os.getpid())
    await process.communicate(b"\n")
    assert process.pid not in descendants(os.getpid())
