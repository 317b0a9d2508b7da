"""Real servers in processes of their own, to be stopped, killed and started again.

Each is forked from a process that has imported the product before, so a start does not cost seconds of computing.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import aiohttp
import uvloop
from pydantic_settings import CliApp

from penstock.api.cli.__main__ import main
from penstock.api.cli.serve import serve
from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.extensions.rollouts import live
from penstock.extensions.tools.search import ingestion
from penstock.pipeline.frames import Prompt
from penstock.pipeline.logs import log_to_stderr
from penstock.services import webhooks
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.support.api_clients import ApiClient
from tests.support.processes import free_port
from tests.support.server import COUNT, HELLO
from tests.support.stores import patient_postgres

_forks = get_context("forkserver")
_forks.set_forkserver_preload(["tests.support.preloaded"])

SLEEPING_CODE = "<|channel|>analysis to=python code<|message|>import time; time.sleep(600)<|call|>"

SCRIPTS = {
    "quick": (HELLO, 0.0),
    "brisk": (HELLO, 0.002),
    "slow": (COUNT, 0.02),
    "code": (SLEEPING_CODE, 0.0),
    "long": (COUNT.replace("99<", " ".join(map(str, range(99, 2000))) + "<"), 0.02),
}
"""Text of the engine and seconds before each token, by name."""

SCRIPTED = "scripted"
"""The model of a server whose model has no other name."""

FEW_DESCRIPTORS = 200

STARTING = 240.0
"""Seconds after which a start has failed."""


class ForgottenPrompts(list[Prompt]):
    """A list that stays empty, for an engine that runs without end."""

    def append(self, prompt: Prompt) -> None:
        """Drop the prompt."""


async def scripted(*arguments: str, turns: Sequence[str] = ()) -> None:
    """Serve a scripted engine in the running event loop: ``script`` or ``script@model,model``."""
    settings = CliApp.run(Settings, cli_args=list(arguments))
    log_to_stderr(settings.log_level)
    name, _, models = (settings.model or "").partition("@")
    text, latency = SCRIPTS[name]
    script = Script(load_encoding().encode_markup(text), latency=latency)
    engine = ScriptedEngine(
        script, models=tuple(models.split(",")) if models else (SCRIPTED,), prompts=ForgottenPrompts()
    )
    if turns:  # those of a response are found by the prompts before
        engine.prompts = []
        engine.turns = [Script(load_encoding().encode_markup(turn)) for turn in turns]
    await serve(settings, lambda _: nullcontext(RunningEngine(engine, harmony_stages(load_encoding()))))


def serve_script(*arguments: str) -> None:
    uvloop.run(scripted(*arguments))


WEBHOOK_SECRET = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0cw=="


def serve_with_webhooks(*arguments: str) -> None:
    """Serve a scripted engine, and deliver webhooks without long pauses."""
    os.environ["PENSTOCK_WEBHOOK_SECRET"] = WEBHOOK_SECRET
    webhooks.PAUSES, webhooks.CLAIM, webhooks.POLL = (0.1, 0.5), 1.0, 0.1
    serve_script(*arguments)


OPERATOR_KEY = "the-key-of-the-operator"


def serve_with_rollouts(*arguments: str) -> None:
    """Serve a scripted engine, and export rollouts without long pauses."""
    os.environ["PENSTOCK_OPERATOR_KEY"] = OPERATOR_KEY
    live.POLL, live.SETTLES, live.CLAIM, live.RETRY, live.LEAST_SILENCE = 0.1, 0.5, 1.0, 0.1, 3.0
    serve_with_webhooks(*arguments)


SECRETS = {
    "PENSTOCK_EMBEDDINGS_KEY": "canary-embeddings",
    "PENSTOCK_WEB_SEARCH_KEY": "canary-search",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=canary-otlp",
}
"""Settings whose values are sent to other servers."""


def serve_with_secrets(url: str, *arguments: str) -> None:
    """Serve a model that searches the web, with a secret for each other server, all of which are at ``url``."""
    os.environ |= SECRETS | {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": url}
    os.environ |= {"OTEL_BSP_SCHEDULE_DELAY": "1000", "PENSTOCK_WEBHOOK_SECRET": WEBHOOK_SECRET}
    webhooks.PAUSES, webhooks.CLAIM, webhooks.POLL = (0.1, 0.5), 1.0, 0.1
    ingestion.RETRY_SECONDS = 0.01
    search = '<|channel|>analysis to=browser.search code<|message|>{"query": "moon"}<|call|>'
    uvloop.run(scripted(*arguments, turns=[search, HELLO]))


def serve_with_few_descriptors(*arguments: str) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FEW_DESCRIPTORS, FEW_DESCRIPTORS))
    serve_script(*arguments)


def penstock(*arguments: str) -> None:
    """Run the ``penstock`` command on a machine without vLLM."""
    assert sys.modules["vllm"] is None
    sys.argv = ["penstock", *arguments]
    main()


@dataclass(frozen=True)
class EndedCommand:
    status: int | None
    out: str
    err: str
    process: int | None


def run_penstock(folder: Path, environment: Mapping[str, str], *arguments: str) -> EndedCommand:
    """Run the ``penstock`` command with no other variables than these; its output passes through files in a folder."""
    out, err = folder / "out", folder / "err"
    process = _forks.Process(target=_penstock_with, args=(out, err, dict(environment), *arguments))
    process.start()
    process.join(STARTING)
    return EndedCommand(process.exitcode, out.read_text(), err.read_text(), process.pid)


def _penstock_with(out: Path, err: Path, environment: Mapping[str, str], *arguments: str) -> None:
    for descriptor, path in ((1, out), (2, err)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    penstock(*arguments)


def _logged(log: Path, program: Callable[..., None], *arguments: str) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    with patient_postgres():
        program(*arguments)


def _forked(log: Path, program: Callable[..., None], *arguments: str) -> ForkServerProcess:
    process = _forks.Process(target=_logged, args=(log, program, *arguments))
    process.start()
    return process


async def exit_status(log: Path, program: Callable[..., None], *arguments: str) -> int | None:
    process = _forked(log, program, *arguments)
    await _end_of(process)
    return process.exitcode


async def _end_of(process: ForkServerProcess) -> None:
    """Wait in this thread: the status of a process is lost if two threads read it, and each start reads all of them."""
    while process.is_alive():
        await asyncio.sleep(0.01)


@dataclass
class ServerProcess(ApiClient):
    """A server that can be killed, then started again with the same arguments."""

    program: Callable[..., None]
    arguments: tuple[str, ...]
    log: Path
    _process: ForkServerProcess = field(init=False)

    async def start(self) -> None:
        self._process = _forked(self.log, self.program, *self.arguments)
        async with asyncio.timeout(STARTING):
            while not await self._answers():
                assert self._process.is_alive(), self.log.read_text()
                await asyncio.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._process.pid
        return self._process.pid

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Send it a signal, wait until it ends, and return its exit status."""
        if self._process.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)
        await _end_of(self._process)
        return self._process.exitcode

    async def _answers(self) -> bool:
        with suppress(aiohttp.ClientError):
            async with self.client.get(f"{self.url}/health") as answer:
                return answer.status == 200
        return False


@asynccontextmanager
async def running_process(
    store: str, folder: Path, script: str = "quick", *options: str
) -> AsyncGenerator[ServerProcess, None]:
    known = ("--heartbeat", "0.2", "--stale-after", "3600", "--no-sandbox")
    async with serving_process(serve_script, (script, *known), store, folder, *options) as server:
        yield server


@asynccontextmanager
async def serving_process(
    program: Callable[..., None], arguments: tuple[str, ...], store: str, folder: Path, *options: str
) -> AsyncGenerator[ServerProcess, None]:
    """Run a server over that store for the length of the block; its log is in the folder."""
    port = free_port()
    arguments = (*arguments, "--store", store, "--port", str(port), *options)
    async with aiohttp.ClientSession() as client:
        server = ServerProcess(f"http://127.0.0.1:{port}", client, program, arguments, folder / f"{port}.log")
        try:
            await server.start()
            yield server
        finally:
            await server.kill()
