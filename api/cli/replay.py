"""Replay: run recorded frames through the remaining stages, without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from penstock.api.cli.arguments import STAGES
from penstock.api.cli.replayer import NoReplay
from penstock.api.cli.stage_log import LEVELS, StageErrors, stage_log
from penstock.api.cli.timeline.timeline import Timeline, timeline_of
from penstock.api.dialects.responses.form import PLAIN
from penstock.pipeline.plugins import Install, load
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.recordings.format import Abandoned, End, Failure, line

Shown = TypeVar("Shown")


def main(arguments: Sequence[str]) -> None:
    """Replay recordings and show the result.  Exit with status 1 if a stage raised an error."""
    parser = _parser()
    chosen = parser.parse_intermixed_args(arguments)
    try:
        with stage_log(chosen.log_level) as errors:
            install = load(chosen.plugins)
            faults = [_replay(path, chosen, install, errors) for path in chosen.paths]
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
    parser.add_argument(
        "--log-level",
        type=str.upper,
        choices=LEVELS,
        default="INFO",
        help="least level of log lines of your stages, on stderr (INFO)",
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


def _replay(path: Path, chosen: argparse.Namespace, install: Install, errors: StageErrors) -> bool:
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
    return errors.report(timeline.path, timeline.fault, timeline.end)


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
    yield from ((each.at, PLAIN.encode(each.frame)) for each in crossings if isinstance(each.frame, Event))
    if timeline.error is None:
        yield None, PLAIN.end
