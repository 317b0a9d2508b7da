"""Replay: run recorded frames through the remaining stages, without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.api.cli.arguments import STAGES
from penstock.api.cli.replayer import NoReplay
from penstock.api.cli.timeline.timeline import Timeline, timeline_of
from penstock.pipeline.errors import StageFault
from penstock.pipeline.faults import name_stage
from penstock.pipeline.plugins import Install, load
from penstock.pipeline.protocol.events import DONE, Event, to_sse
from penstock.pipeline.recordings.format import Abandoned, End, Failure, line

Shown = TypeVar("Shown")


def main(arguments: Sequence[str]) -> None:
    """Replay recordings and show the result.  Exit with status 1 if a stage raised an error."""
    parser = _parser()
    chosen = parser.parse_intermixed_args(arguments)
    bugs = _Bugs()
    logging.getLogger("penstock.stages").addHandler(bugs)  # other messages only repeat the output
    try:
        install = load(chosen.plugins)
        faults = [_replay(path, chosen, install, bugs) for path in chosen.paths]
    except KeyboardInterrupt:
        sys.exit(130)
    if any(faults):
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock replay", description=__doc__, parents=[STAGES])
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="+", help="a recording's folder, or one of its files")
    parser.add_argument(
        "--speed", type=_speed, help="1x: in the recorded time; 2x: twice as fast; max: without waiting"
    )
    parser.add_argument("--full", action="store_true", help="do not shorten prompts and results of tools")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="write the output of the last stage as a recording")
    output.add_argument("--sse", action="store_true", help="write the events as a client receives them")
    return parser


def _speed(text: str) -> float | None:
    if text == "max":
        return None
    try:
        speed = float(text.removesuffix("x"))
    except ValueError:
        speed = 0.0
    if not 0 < speed < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is neither max nor a factor such as 1x or 0.5x")
    return speed


class _Bugs(logging.Handler):
    """Collects errors that a stage logs and turns into an event, as `emit` does if a stage before it loses a frame."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.met: list[Exception] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], Exception):
            self.met.append(record.exc_info[1])


def _replay(path: Path, chosen: argparse.Namespace, install: Install, bugs: _Bugs) -> bool:
    bugs.met.clear()
    timeline = asyncio.run(timeline_of(path, chosen.since, chosen.upto, install))
    for note in timeline.notes:
        print(f"penstock: {timeline.path}: {note}", file=sys.stderr)
    if chosen.json or chosen.sse:
        for written in paced(json_lines(timeline) if chosen.json else sse(timeline), chosen.speed):
            sys.stdout.buffer.write(written)
            sys.stdout.buffer.flush()
    else:
        from penstock.api.cli.terminal import show  # noqa: PLC0415 - import rich only if it is used

        show(paced, timeline, chosen.speed, full=chosen.full)
    if timeline.fault or (bugs.met and not (timeline.end and timeline.end.failure)):
        stage, error = timeline.fault or (name_stage(bugs.met[0]), bugs.met[0])
        print(f"penstock: {timeline.path}: {_described(stage, error)}", file=sys.stderr)
        return True
    return False


def _described(stage: str, error: Exception) -> str:
    if isinstance(error, StageFault):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"stage {stage} raised {type(error).__name__}: {error} ({last.filename}:{last.lineno})"


def paced(timed: Iterable[tuple[float | None, Shown]], speed: float | None) -> Iterator[Shown]:
    """Yield each item at its time, relative to the first one, ``speed`` times as fast; None means without waiting."""
    began: tuple[float, float] | None = None
    for at, shown in timed:
        if speed is not None and at is not None:
            began = began or (time.monotonic(), at)
            time.sleep(max(0.0, began[0] + (at - began[1]) / speed - time.monotonic()))
        yield shown


def json_lines(timeline: Timeline) -> Iterator[tuple[float | None, bytes]]:
    """Yield the output of the last stage as the lines of a recording, with their times."""
    crossings = timeline.junctions[-1].crossings
    yield None, line(timeline.header)
    for crossing in crossings:
        yield crossing.at, line(crossing.frame, crossing.at)
    failure = Failure.of(timeline.error) if isinstance(timeline.error, Exception) else None
    yield None, line(End(len(crossings), failure, isinstance(timeline.error, Abandoned)))


def sse(timeline: Timeline) -> Iterator[tuple[float | None, bytes]]:
    """Yield the events in SSE format, with ``[DONE]`` unless the replay failed.  Raise `NoReplay` if there are none."""
    crossings = timeline.junctions[-1].crossings
    are_others = bool(crossings) or timeline.error is None
    if are_others and not any(isinstance(crossing.frame, Event) for crossing in crossings):
        raise NoReplay(f"the output of {timeline.junctions[-1].stage} is not events: show it with --json")
    yield from ((each.at, to_sse(each.frame)) for each in crossings if isinstance(each.frame, Event))
    if timeline.error is None:
        yield None, DONE
