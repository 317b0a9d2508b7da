"""Serving over HTTP until a signal: to stop, to read files again, or to switch the level of the log."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any, Generic, NoReturn, TypeVar

from penstock.api.http.api_key import ApiKey
from penstock.api.http.connections import Runner, serving
from penstock.api.metrics.scrape import serving_metrics
from penstock.api.runs.housekeeping import forget_generators, tune_gc
from penstock.api.runs.scheduler import Scheduler
from penstock.api.settings import Settings
from penstock.api.settings.sources import FILE
from penstock.api.start.assembly import check_keys, obstacles
from penstock.api.start.parts import Running
from penstock.pipeline.audit import decided
from penstock.pipeline.errors import CannotRun, CannotStart, Stopped
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
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, FileReader(settings, server).read_again)
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


@dataclass
class FileReader:
    """A reader of the files of a server, whose settings have the models that it has now."""

    settings: Settings
    server: Running

    def read_again(self) -> None:
        """Read files again.

        A wrong file leaves in effect what was read before.  So do keys that do not fit the limits or the models, in
        all these files.
        """
        settings, server = self.settings, self.server
        keys, admission, prompts = server.keys, server.scheduler.admission, server.prompts
        takes_models = server.take_models
        for read_again in server.at_sighup:
            read_again()
        if not (settings.api_key_file or settings.limits or settings.prompts or takes_models or server.at_sighup):
            logger.info("SIGHUP: there is no file of API keys, limits, prompts or models to read again")
        templates = _read("prompts", settings.prompts, prompts.read, prompts.templates)
        own = _read("API keys", settings.api_key_file, keys.read, keys.own, named=_by_digest)
        tables = _read("limits", settings.limits, admission.read, admission.tables)
        file = (settings.model_file or FILE) if takes_models else None
        models = _read(
            "models", file, partial(settings.with_models_of_files, settings.tool_labels), settings, _changes, _models
        )
        prompts.templates = templates.taken()
        try:
            check_keys(own.value, models.value, tables.value)
            if takes_models and models.line:
                takes_models(models.value)
        except CannotStart as error:
            all_of_them = "the API keys, the limits and the models" if takes_models else "the API keys and the limits"
            logger.error("SIGHUP: %s stay as they were: %s", all_of_them, error)  # noqa: TRY400 - the error says all
            decided("SIGHUP", "refused", all_of_them)
        else:
            admission.tables = tables.taken()
            self.settings = models.taken()
            keys.obstacle = obstacles(self.settings, admission)
            keys.take(own.taken())


@dataclass(frozen=True)
class _Read(Generic[Value]):
    """The value that a file has now, or had before if it is wrong."""

    value: Value
    line: str = ""
    """The line of the log once the value holds; empty for one that does not come from the file."""
    name: str = ""
    changes: Mapping[str, str] = field(default_factory=dict)
    """The names of what is new, has changed or is gone."""

    def taken(self) -> Value:
        """Log that the value holds from now on, and return it."""
        if self.line:
            logger.info("SIGHUP: %s", self.line)
        if self.changes:
            decided("SIGHUP", "changed", self.name, **self.changes)
        return self.value


def _no_changes(known: Value, value: Value) -> str:
    return ", and have not changed" if value == known else ""


def _by_digest(keys: Collection[ApiKey]) -> Mapping[str, object]:
    return {f"{key.title} ({key.digest[:8]})" if key.name else key.title: key for key in keys}


def _models(settings: Settings) -> Mapping[str, object]:
    return settings.models


def _changed_names(before: Mapping[str, object], after: Mapping[str, object]) -> Mapping[str, str]:
    """Return the names of what is new, has changed and is gone."""
    names = {
        "new": after.keys() - before.keys(),
        "changed": {name for name in after.keys() & before.keys() if after[name] != before[name]},
        "gone": before.keys() - after.keys(),
    }
    return {what: ", ".join(sorted(some)) for what, some in names.items() if some}


def _changes(known: Settings, value: Settings) -> str:
    """Return which models are new, have changed or are gone."""
    named = [f"{what}: {names}" for what, names in _changed_names(known.models, value.models).items()]
    return f"; {'; '.join(named)}" if named else _no_changes(known.model_groups, value.model_groups)


def _read(
    name: str,
    file: Path | None,
    read: Callable[[], Value],
    known: Value,
    changes: Callable[[Value, Value], str] = _no_changes,
    named: Callable[[Any], Mapping[str, object]] = dict,
) -> _Read[Value]:
    if file is None:
        return _Read(known)
    try:
        value = read()
    except (CannotStart, CannotRun) as error:
        logger.error("SIGHUP: the %s stay as they were: %s", name, error)  # noqa: TRY400 - the error says all
        decided("SIGHUP", "refused", f"the {name}")
        return _Read(known)
    line = f"the {name} were read again{changes(known, value)}"
    return _Read(value, line, f"the {name}", _changed_names(named(known), named(value)))


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
