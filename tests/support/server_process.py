"""A real server in a process of its own, over a scripted engine: to be stopped, killed and started again.

    python -m tests.support.server_process SCRIPT [options of penstock]

The model's name is that of the script which the engine plays.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from pydantic_settings import CliApp

from api.settings import Settings
from pipeline.frames import Prompt
from server import Started, log_to_stderr, serve
from stages.generate.scripted import Script, ScriptedEngine
from stages.harmony import load_encoding
from tests.support.processes import free_port
from tests.support.server import COUNT, HELLO, ApiClient

SCRIPTS = {
    "quick": (HELLO, 0.0),
    "brisk": (HELLO, 0.002),
    "slow": (COUNT, 0.02),
    "long": (COUNT.replace("99<", " ".join(map(str, range(99, 2000))) + "<"), 0.02),
}
"""By name: what the engine says, and the seconds before each token."""

STARTING = 240.0
"""Seconds in which a server is up, on a machine that is busy."""


class ForgottenPrompts(list[Prompt]):
    """The prompts of an engine that nobody asks for them: it may get any number."""

    def append(self, prompt: Prompt) -> None:
        """Forget it."""


@dataclass
class ServerProcess(ApiClient):
    """A server that can be killed, and started again where it was."""

    script: str
    options: tuple[str, ...]
    log: Path
    _process: asyncio.subprocess.Process = field(init=False)

    async def start(self) -> None:
        """Start it, and wait until it answers."""
        command = (sys.executable, "-m", "tests.support.server_process", self.script, *self.options)
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*command, stderr=log, stdout=log)
        async with asyncio.timeout(STARTING):
            while not await self._answers():
                assert self._process.returncode is None, self.log.read_text()
                await asyncio.sleep(0.05)

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End it by a signal; what it returns to its parent."""
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        return await self._process.wait()

    async def _answers(self) -> bool:
        with suppress(aiohttp.ClientError):
            async with self.client.get(f"{self.url}/health") as answer:
                return answer.status == 200
        return False


@asynccontextmanager
async def running_process(
    store: str, folder: Path, script: str = "quick", *options: str
) -> AsyncGenerator[ServerProcess, None]:
    """A server over that store for the length of the block; its log is in the folder."""
    port = free_port()
    told = ("--store", store, "--port", str(port), "--heartbeat", "0.2", "--stale-after", "1", *options)
    async with aiohttp.ClientSession() as client:
        server = ServerProcess(f"http://127.0.0.1:{port}", client, script, told, folder / f"{port}.log")
        try:
            await server.start()
            yield server
        finally:
            await server.kill()


def main() -> None:
    """Serve a script."""
    settings = CliApp.run(Settings, cli_args=sys.argv[1:])
    log_to_stderr(settings.log_level)
    model = settings.model or ""
    text, latency = SCRIPTS[model]
    script = Script(load_encoding().encode_markup(text), latency=latency)
    engine = ScriptedEngine(script, models=(model,), prompts=ForgottenPrompts())
    uvloop.run(serve(settings, lambda _: nullcontext(Started(engine))))


if __name__ == "__main__":
    main()
