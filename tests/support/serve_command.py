"""``penstock serve`` in a process of its own, with the tiny model, and openai-python as its client."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Generator, Mapping
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
    url: str
    client: openai.OpenAI
    process: subprocess.Popen[bytes]
    store: Path

    @property
    def recorded(self) -> Path:
        """The folder for recordings, if the server is started with ``--record``."""
        return self.store.with_name("recorded")

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL; its workers must notice that it is gone, and end."""
        workers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(workers, timeout=PATIENCE)
        assert not left


@contextmanager
def running(
    store: Path, *options: str, url: str = "", model: str = str(CHECKPOINT), **environment: str
) -> Generator[Command, None, None]:
    """Run the command until SIGTERM, after which it must exit cleanly.

    It listens at a free port, or at the ``url`` of an earlier server.  ``environment`` is added to this process's
    variables.
    """
    with _serving(store, model, *ARGUMENTS, *options, url=url, environment=environment) as server:
        yield server


@contextmanager
def running_models(folder: Path, settings: str, **environment: str) -> Generator[Command, None, None]:
    """Run the command in a folder with a ``penstock.toml`` of several models until SIGTERM."""
    (folder / "penstock.toml").write_text(settings)
    with _serving(folder / "responses.sqlite3", folder=folder, environment=environment) as server:
        yield server


@contextmanager
def _serving(
    store: Path, *options: str, environment: Mapping[str, str], url: str = "", folder: Path | None = None
) -> Generator[Command, None, None]:
    url = url or f"http://127.0.0.1:{free_port()}"
    program = Path(sys.executable).with_name("penstock")
    command: list[str | Path] = [program, "serve", *options, "--port", url.rpartition(":")[2], "--store", store]
    command += ["--drain-timeout", "1"]
    with (
        running_process(command, f"{url}/health", store.parent / "serve.log", environment, folder) as process,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client,
    ):
        yield Command(url, client, process, store)
    assert process.returncode in (0, -signal.SIGKILL)
