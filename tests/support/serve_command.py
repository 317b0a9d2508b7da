"""``penstock serve`` in a process of its own, with the tiny model, and openai-python as its client."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.support.processes import free_port
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@dataclass
class Command:
    """A server that runs."""

    url: str
    client: openai.OpenAI
    process: subprocess.Popen[bytes]

    def terminate(self) -> None:
        """Ask it to end."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it without a word; its workers notice by themselves that it is gone."""
        workers = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        _, left = psutil.wait_procs(workers, timeout=60)
        assert not left


@contextmanager
def running(store: Path, *options: str, port: int | None = None) -> Generator[Command, None, None]:
    """The command until SIGTERM, upon which it must end cleanly; a ``port`` that nobody names is any free one."""
    port = port or free_port()
    command = [Path(sys.executable).with_name("penstock"), "serve", CHECKPOINT, "--port", port, "--store", store]
    command += ["--drain-timeout", "1", *options]
    with (store.parent / "serve.log").open("ab") as log:
        process = subprocess.Popen(
            [*map(str, command), *ARGUMENTS], stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1"}
        )
    url = f"http://127.0.0.1:{port}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        server = Command(url, client, process)
        try:
            _wait_for(f"{url}/health", process)
            yield server
        finally:
            if process.poll() is None:
                server.terminate()
                assert process.wait(60) == 0


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    for _ in range(1500):
        assert server.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(url, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)
