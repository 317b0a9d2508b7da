"""Batch: answer the requests of a file on one machine, without a server."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Final

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from penstock.api.cli.arguments import Parser
from penstock.api.cli.command_line import parsed_settings, refuse_unknown
from penstock.api.cli.mistakes import explained
from penstock.api.resources.resources import ServerParts
from penstock.api.runs.housekeeping import forget_generators, tune_gc
from penstock.api.runs.store_settings import NO_STORE
from penstock.api.settings import Settings
from penstock.api.settings.sources import option_name
from penstock.api.start.backends import EngineStarter, start_shown
from penstock.api.start.parts import UNSTARTABLE, Running
from penstock.api.start.serving import signals_raised, stop_signals
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.batch import LineAnswer
from penstock.extensions.batches.line_files import (
    STANDARD,
    Line,
    Results,
    lines_of,
    refusal,
    requests_file,
    results_file,
)
from penstock.extensions.batches.runner import LineRequest
from penstock.pipeline.errors import CannotRun, Stopped
from penstock.pipeline.logs import counted, log_to_stderr
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.server import running
from penstock.services.engines.engine import Backend, Bounded
from penstock.services.tools import Toolbox

logger = logging.getLogger(__name__)

AT_ONCE: Final = 256
"""Lines that are answered at once by an engine that does not know its places."""

MANY: Final = 1_000_000
"""Places of the engine by the settings: lines wait in the engine, not before it."""

AHEAD: Final = 2
"""Lines at once for each place of the engine: when one ends, another one runs from the next step on."""

WINDOW: Final = 16
"""Times the lines at once that may be read, with --in-order, before the result of the first of them is written."""

PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 60.0)
"""Seconds before a line runs again whose error may be over; after the last one, the command ends."""

SILENCE: Final = 10.0
"""Seconds between two lines about the progress if stderr is no terminal."""

STOPPED: Final = 130
"""The exit status of a run that a signal has ended."""


def main(arguments: Sequence[str]) -> None:
    """Answer the requests of a file without a server, into a file of results.

    It exits with status 1 if a result is an error, and with 130 if a signal ended it before all lines had a result.
    """
    chosen, rest = _chosen(arguments)
    settings = parsed_settings(rest, _parser().flags)
    refuse_unknown(settings, rest)
    log_to_stderr(settings.log_level, as_json=settings.log_format == "json")
    settings = alone(settings, keeps_store="--store" in map(option_name, rest))
    try:
        with (
            signals_raised(),
            requests_file(chosen.requests) as file,
            results_file(chosen.results) as results,
        ):
            job = Job(file, results, settings.max_body_bytes, is_ordered=chosen.in_order)
            job.count(chosen.results)
            if job.left:
                uvloop.run(answered(job, settings))
    except UNSTARTABLE as error:
        raise CannotRun(explained(error, rest)) from error
    except Stopped:
        sys.exit(STOPPED)
    print(f"penstock: {job.summary(chosen.results)}", file=sys.stderr)
    if job.left or results.failed:
        sys.exit(STOPPED if job.left else 1)


def _chosen(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options of this command, and the other arguments."""
    has_file = bool(arguments) and (arguments[0] == STANDARD or not arguments[0].startswith("-"))
    chosen, rest = _parser().parse_known_args(arguments[has_file:])
    if (chosen.requests is None) != has_file:
        raise CannotRun("name FILE, the file of requests, as the first argument, or by -i")
    if has_file:
        chosen.requests = arguments[0]
    return chosen, rest


def alone(settings: Settings, *, keeps_store: bool) -> Settings:
    """Return the settings for one process without clients, which has no store unless the command line names one."""
    store = {} if keeps_store else {"store": NO_STORE, "webhook": None, "webhook_secret": None}
    patient = {"limits": None, "engine_wait": None, "engine_places": MANY, "slow_callback": 0.0}
    return settings.model_copy(update={"frontends": 1, **patient, **store})


def _parser() -> Parser:
    parser = Parser(
        prog="penstock batch",
        usage="penstock batch FILE -o OUT [MODEL] [--in-order] [options of penstock serve] [options of vLLM]",
        description="Answer the requests of FILE, which has one in each line as vLLM's run-batch reads them, without a "
        "server. The same command goes on with the lines that have no result in OUT.",
        epilog="penstock serve --help all shows the options of penstock, such as --engine URL.",
    )
    parser.add_argument("-i", "--input-file", dest="requests", metavar="FILE", help="another way to write FILE")
    parser.add_argument(
        "-o", "--output-file", dest="results", metavar="OUT", required=True, help="the file for results (- for stdout)"
    )
    parser.add_argument("--in-order", action="store_true", help="write the results in the order of the lines")
    return parser


@dataclass
class Job:
    """The lines of a file, of which each gets one result."""

    file: IO[bytes]
    results: Results
    most: int
    """The most bytes of a line."""
    is_ordered: bool = False
    total: int = 0
    left: int = 0
    """The lines without a result."""
    seconds: float = 0.0
    """The time in which this run has answered lines."""
    _first: int = field(default=0, init=False)

    def count(self, name: str) -> None:
        """Count the lines; raise `CannotRun` if the file of results, by its name, has those of other requests alone."""
        done = 0
        for line in lines_of(self.file, self.most):
            self.total += 1
            done += line.id in self.results.done
        if self.results.done and not done:
            raise CannotRun(f"{name} has the results of other requests: name another file as OUT")
        self._first = self.left = self.total - done

    def waiting(self) -> Iterator[Line]:
        """Yield the lines without a result."""
        return (line for line in lines_of(self.file, self.most) if line.id not in self.results.done)

    def end(self, line: Line, answer: LineAnswer) -> None:
        """Write the result of a line."""
        self.results.add(line, answer)
        self.left -= 1

    def summary(self, name: str) -> str:
        """Return what was done, in words."""
        done = self.total - self.left
        words = [f"{counted(done, 'result', ',')} in {name}", f"{self.results.failed:,} of them an error"]
        if self.seconds:
            words.append(f"{(self._first - self.left) / self.seconds:.1f} lines/s in this run")
        if self.left:
            words.append(f"{counted(self.left, 'line', ',')} left: the same command goes on")
        return "; ".join(words)


async def answered(job: Job, settings: Settings, start_engine: EngineStarter = start_shown) -> None:
    """Answer the lines of a job, until all have results or a signal comes."""
    async with running(settings, start_engine) as server:
        forget_generators()
        tune_gc()
        engine = server.scheduler.engine
        places = engine.places if isinstance(engine, Bounded) else AT_ONCE
        work = Work(job, Answering(_parts(server, settings), None), engine, at_once=AHEAD * places)
        stop, _ = stop_signals()
        began = time.monotonic()
        with _shown(job) as work.advanced:
            tasks = [asyncio.create_task(work.run()), asyncio.create_task(stop.wait())]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        job.seconds = time.monotonic() - began
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()


def _parts(server: Running, settings: Settings) -> ServerParts:
    return ServerParts(
        settings,
        scheduler=server.scheduler,
        tools=Toolbox(),
        peers=server.api.peers,
        prompts=server.prompts,
        keys=server.keys,
        dialects=server.api.dialects,
        routes=list(server.api.resources),
    )


@dataclass
class Work:
    """The lines of a job that are being answered, ``at_once`` of them."""

    job: Job
    answering: Answering
    engine: Backend
    at_once: int
    advanced: Callable[[], None] = lambda: None
    """Called for each result."""
    _last: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set when the result of the line that was taken last has been written."""

    async def run(self) -> None:
        """Answer all lines; raise `CannotRun` if the engine cannot go on."""
        self._last.set()
        waiting, places = self.job.waiting(), asyncio.Semaphore(self.at_once)
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self.at_once * (WINDOW if self.job.is_ordered else 1)):
                    workers.create_task(self._answer(waiting, places))
        except* (CannotRun, OSError) as several:
            raise several.exceptions[0] from None

    async def _answer(self, waiting: Iterator[Line], places: asyncio.Semaphore) -> None:
        """Answer one line after the other."""
        for line in waiting:
            before, self._last = self._last, asyncio.Event()
            written = self._last
            async with places:
                answer = await self._answer_to(line)
            if self.job.is_ordered:
                await before.wait()
            self.job.end(line, answer)
            written.set()
            self.advanced()

    async def _answer_to(self, line: Line) -> LineAnswer:
        """Return the answer to a line; raise `CannotRun` for an error that stays, though it is not the line's."""
        problem = line.problem or self._misplaced(line)
        if problem:
            await asyncio.sleep(0)  # a signal may end a long file of wrong lines
            return LineAnswer(400, body=refusal(problem), request_id="")
        request = LineRequest(id=line.id, owner="", key_name="", team="", path=line.path, body=line.body)
        answer = await self.answering.answer(request)
        for pause in PAUSES:
            if not (answer.may_pass and self.engine.is_alive):
                break
            await asyncio.sleep(pause)
            answer = await self.answering.answer(request)
        if answer.may_pass or (answer.status >= 500 and not self.engine.is_alive):
            raise CannotRun(f"the engine cannot go on: {shortened(answer.body.decode(), 500)}")
        return answer

    def _misplaced(self, line: Line) -> str:
        """Return what is wrong with the URL of a line; empty if nothing is."""
        if line.path in self.answering.paths:
            return ""
        return f"The url {shortened(line.path)!r} is none of {', '.join(sorted(self.answering.paths))}."


@contextmanager
def _shown(job: Job) -> Iterator[Callable[[], None]]:
    """Show the progress of a job for the length of a block, on stderr; yield what is called for each result."""
    console = Console(stderr=True)
    if not console.is_terminal:
        logging_it = asyncio.create_task(_log(job))
        yield lambda: None
        logging_it.cancel()
        return
    columns = (
        TextColumn("{task.percentage:3.0f}%"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        began, first = time.monotonic(), job.left
        task = progress.add_task("", total=job.total, completed=job.total - job.left, rate="")

        def advance() -> None:
            rate = (first - job.left) / max(time.monotonic() - began, 0.001)
            progress.update(task, completed=job.total - job.left, rate=f"{rate:.1f} lines/s")

        yield advance


async def _log(job: Job) -> None:
    """Log the progress of a job every few seconds."""
    while True:
        left = job.left
        await asyncio.sleep(SILENCE)
        rate = (left - job.left) / SILENCE
        logger.info("%s of %s, %.1f lines/s", f"{job.total - job.left:,}", counted(job.total, "line", ","), rate)
