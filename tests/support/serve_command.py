"""``penstock serve`` in a process of its own, with the tiny model, and openai-python as its client."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.support.engine_requests import WEATHER_TOOL
from tests.support.processes import PATIENCE, free_port, running_process
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

WEATHER: Any = WEATHER_TOOL | {"strict": False}


@dataclass
class Command:
    """A server that runs."""

    url: str
    client: openai.OpenAI
    process: subprocess.Popen[bytes]
    store: Path

    @property
    def recorded(self) -> Path:
        """The folder of recordings, for those who start it with one."""
        return self.store.with_name("recorded")

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a word; its workers notice by themselves that it is gone."""
        workers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(workers, timeout=PATIENCE)
        assert not left


@contextmanager
def running(store: Path, *options: str, url: str = "", **environment: str) -> Generator[Command, None, None]:
    """The command until SIGTERM, upon which it must end cleanly; at any free port, or at the ``url`` of an earlier one.

    ``environment`` is beside what this process has.
    """
    url = url or f"http://127.0.0.1:{free_port()}"
    program = Path(sys.executable).with_name("penstock")
    command: list[str | Path] = [program, "serve", CHECKPOINT, "--port", url.rpartition(":")[2], "--store", store]
    command += [*ARGUMENTS, "--drain-timeout", "1", *options]
    with (
        running_process(command, f"{url}/health", store.parent / "serve.log", environment) as process,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Command(url, client, process, store)
    assert process.returncode in (0, -signal.SIGKILL)
