"""Serving over HTTP until a signal: to stop, to read files again, or to switch the level of the log."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import Generic, NoReturn, TypeVar

from penstock.api.http.connections import Runner, serving
from penstock.api.http.key_sources import UnusableKeys
from penstock.api.metrics.scrape import serving_metrics
from penstock.api.runs.housekeeping import forget_generators, tune_gc
from penstock.api.runs.scheduler import Scheduler
from penstock.api.settings import Settings
from penstock.api.start.assembly import check_keys
from penstock.api.start.parts import Running
from penstock.pipeline.errors import CannotStart, Stopped
from penstock.pipeline.logs import counted

Value = TypeVar("Value")

logger = logging.getLogger(__name__)

ENDED_WITH_ENGINE = "The engine has died, and the server ends with it (--exit-with-engine)."


@asynccontextmanager
async def serving_requests(
    settings: Settings, server: Running, listening: socket, port_of_metrics: socket | None
) -> AsyncGenerator[Runner, None]:
    """Serve requests and obey signals for the length of a block; yield the runner, which counts its connections."""
    app = server.api.app(settings.max_body_bytes)
    async with serving(app, listening) as runner, serving_metrics(server.api.sampler, port_of_metrics):
        forget_generators()
        tune_gc()
        _switch_level_at_sigusr1()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_again, settings, server)
        yield runner


async def drained(settings: Settings, scheduler: Scheduler, hurry: asyncio.Event) -> None:
    """Wait until the responses have ended, their time is over, or a second signal has come."""
    if running_now := scheduler.in_flight.count:
        number = counted(running_now, "running response")
        text = "Stopping: waiting up to %g s for %s; a second signal, such as Ctrl-C, ends the wait"
        logger.info(text, settings.drain_timeout, number)
    else:
        logger.info("Stopping: no response is running")
    await scheduler.drain(settings.drain_timeout, hurry.is_set)


def stop_signals() -> tuple[asyncio.Event, asyncio.Event]:
    """Return an event that the first SIGTERM or SIGINT sets, and one that the second sets."""
    first, second = asyncio.Event(), asyncio.Event()

    def stop() -> None:
        (second if first.is_set() else first).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return first, second


def _read_again(settings: Settings, server: Running) -> None:
    """Read files again.

    A wrong file leaves in effect what was read before.  So do keys that do not fit the limits, in both files.
    """
    keys, admission, prompts = server.keys, server.scheduler.admission, server.prompts
    if not (settings.api_key_file or settings.limits or settings.prompts):
        logger.info("SIGHUP: there is no file of API keys, limits or prompts to read again")
    templates = _read("prompts", settings.prompts, prompts.read, prompts.templates)
    own = _read("API keys", settings.api_key_file, keys.read, keys.own)
    tables = _read("limits", settings.limits, admission.read, admission.tables)
    prompts.templates = templates.taken()
    try:
        check_keys(own.value, settings, tables.value)
    except UnusableKeys as error:
        logger.error("SIGHUP: the API keys and the limits stay as they were: %s", error)  # noqa: TRY400
    else:
        admission.tables = tables.taken()
        keys.take(own.taken())


@dataclass(frozen=True)
class _Read(Generic[Value]):
    """The value that a file has now, or had before if it is wrong."""

    value: Value
    line: str = ""
    """The line of the log once the value holds; empty for one that does not come from the file."""

    def taken(self) -> Value:
        """Log that the value holds from now on, and return it."""
        if self.line:
            logger.info("SIGHUP: %s", self.line)
        return self.value


def _read(name: str, file: Path | None, read: Callable[[], Value], known: Value) -> _Read[Value]:
    if file is None:
        return _Read(known)
    try:
        value = read()
    except CannotStart as error:
        logger.error("SIGHUP: the %s stay as they were: %s", name, error)  # noqa: TRY400 - the error says all
        return _Read(known)
    return _Read(value, f"the {name} were read again{', and have not changed' if value == known else ''}")


def _switch_level_at_sigusr1() -> None:
    """Have SIGUSR1 switch the log of penstock to DEBUG, and back."""
    ours = logging.getLogger("penstock")

    def switch() -> None:
        ours.setLevel(logging.NOTSET if ours.level == logging.DEBUG else logging.DEBUG)
        logger.warning("SIGUSR1: the level of the log is %s", logging.getLevelName(ours.getEffectiveLevel()))

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, switch)


@contextmanager
def signals_raised() -> Iterator[None]:
    """Raise `Stopped` for a signal, which unwinds the start, until the server handles the signals itself."""
    handlers = {number: signal.signal(number, _exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _exit(_number: int, _frame: object) -> NoReturn:
    raise Stopped(0)
