"""The start of a sandbox on a busy machine: off the event loop, at the server's priority, and tried again if late."""

import asyncio
import logging
import os
import subprocess
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.extensions.tools.sandbox import plan, process
from penstock.extensions.tools.sandbox.folder import Folder
from penstock.extensions.tools.sandbox.plan import Mode
from penstock.extensions.tools.sandbox.probe import Sandbox, probe
from penstock.services.slots import Slots
from penstock.services.toolbox import open_toolbox
from penstock.services.tools import HostSettings
from tests.support.sandboxes import available, code_host
from tests.support.scripted_tools import NO_CONVERSATION

pytestmark = pytest.mark.io


AT_LOAD = "\nimport os; AT_LOAD = os.getpriority(os.PRIO_PROCESS, 0)\n"

PRIORITIES = """
import os, sys
sys.modules["penstock.extensions.tools.sandbox.repl"].AT_LOAD, os.getpriority(os.PRIO_PROCESS, 0)
"""


class Spawning:
    """Spawns sandboxes as the product does, when the test lets it; remembers the threads and the processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = threading.Event()
        self.begun = threading.Event()
        self.threads: list[threading.Thread] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._spawn = process._spawn
        monkeypatch.setattr(process, "_spawn", self)

    def __call__(self, *arguments: Any) -> Any:
        self.threads.append(threading.current_thread())
        self.begun.set()
        self.allowed.wait()
        spawned = self._spawn(*arguments)
        self.processes.append(spawned[-1])
        return spawned


@pytest.fixture
async def folder() -> AsyncIterator[Folder]:
    made = Folder(drops_user=os.geteuid() == 0)
    yield made
    await made.remove()


async def test_event_loop_does_not_spawn(
    python_sandbox: Sandbox, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawning = Spawning(monkeypatch)
    spawning.allowed.set()
    started = await process.Process.start(python_sandbox.plan, folder)
    await started.end()
    assert spawning.threads
    assert threading.current_thread() not in spawning.threads


async def test_cancelled_start_leaves_no_process(
    python_sandbox: Sandbox, folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawning = Spawning(monkeypatch)
    starting = asyncio.create_task(process.Process.start(python_sandbox.plan, folder))
    await asyncio.to_thread(spawning.begun.wait)
    starting.cancel()
    await asyncio.sleep(0)
    spawning.allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    [spawned] = spawning.processes
    assert spawned.poll() is not None


async def test_code_of_the_model_runs_at_the_lowest_priority(mode: Mode, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes before it does not: at the lowest priority, a start on a busy machine takes minutes."""
    source = plan.source
    monkeypatch.setattr(plan, "source", lambda name: source(name) + AT_LOAD * (name == "repl"))
    host = code_host(await available("python", (mode,)))
    try:
        result = (await host.session(NO_CONVERSATION).run("python", PRIORITIES, 60)).result
        assert result == f"({os.getpriority(os.PRIO_PROCESS, 0)}, 19)\n"
    finally:
        await host.close()


async def test_late_sandbox_is_offered_and_tried_again(
    mode: Mode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a server whose machine was busy at its start had no interpreter for its whole life."""
    await available("python", (mode,))
    with monkeypatch.context() as late:
        late.setattr(process, "_START_SECONDS", 0)
        found = await probe("python", modes=(mode,))
        assert isinstance(found, Sandbox)
        assert found.is_late
        with caplog.at_level(logging.INFO):
            tools = await open_toolbox(HostSettings(slots=Slots(1)))
        assert "python" in tools.namespaces
        await tools.close()
        host = code_host(found)
        failed = await host.session(NO_CONVERSATION).run("python", "1", 120)
        assert "did not start in time" in (failed.error or "")
        await host.close()
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("Python for the model" in line and "did not start in time" in line for line in warnings)
    host = code_host(found)
    assert (await host.session(NO_CONVERSATION).run("python", "1 + 1", 60)).result == "2\n"
    assert not found.is_late
    await host.close()
