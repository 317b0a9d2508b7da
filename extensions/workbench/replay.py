"""Replay: run recorded frames through the remaining stages, without a GPU."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from penstock.api.cli.arguments import STAGES, Parser, chosen_stages
from penstock.api.cli.replayer import NoReplay
from penstock.api.cli.stage_log import LEVELS, StageErrors, stage_log
from penstock.api.dialects.named import named
from penstock.api.dialects.responses.dialect import RESPONSES
from penstock.api.http.wire import Wire
from penstock.extensions.workbench.staged import staged
from penstock.extensions.workbench.timeline.timeline import Timeline, timeline_of
from penstock.pipeline.plugins import Install, blamed
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.recordings.format import Abandoned, End, Failure, line

Shown = TypeVar("Shown")

AS = "--as"
"""The option that names the dialect of a stream."""


def main(arguments: Sequence[str]) -> None:
    """Run recorded frames through the stages, without a GPU.

    It exits with status 1 if a stage raised an error.
    """
    parser = _parser()
    chosen = parser.parse_intermixed_args(arguments)
    chosen.wire = named(chosen.dialect, AS).wire if chosen.dialect else None
    try:
        with stage_log(chosen.log_level) as errors:
            install = chosen_stages(chosen.plugins)
            faults = [_replay(path, chosen, install, errors) for path in chosen.paths]
    except KeyboardInterrupt:
        sys.exit(130)
    if any(faults):
        sys.exit(1)


def _parser() -> Parser:
    parser = Parser(prog="penstock replay", description=__doc__, parents=[STAGES])
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
    output.add_argument(
        AS,
        dest="dialect",
        metavar="DIALECT",
        help="write the stream as a client of a dialect receives it, as `messages`",
    )
    output.add_argument(
        "--sse", dest="dialect", action="store_const", const=RESPONSES.name, help=f"the same as {AS} {RESPONSES.name}"
    )
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
    with staged(path) as (shown, note):
        timeline = replace(asyncio.run(timeline_of(shown, chosen.since, chosen.upto, install)), path=path)
    for each in filter(None, (note, *timeline.notes)):
        print(f"penstock: {path}: {each}", file=sys.stderr)
    if chosen.json or chosen.wire:
        with blamed(chosen.dialect, AS):
            frames = json_lines(timeline) if chosen.json else asyncio.run(streamed(timeline, chosen.wire))
        for written in paced(frames, chosen.speed):
            sys.stdout.buffer.write(written)
            sys.stdout.buffer.flush()
    else:
        from penstock.extensions.workbench.terminal import show  # noqa: PLC0415 - import rich only if it is used

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
    left = timeline.error if isinstance(timeline.error, Abandoned) else None
    yield None, line(End(len(crossings), failure, left is not None, left.cause if left else ""))


async def streamed(timeline: Timeline, wire: Wire) -> list[tuple[float | None, bytes]]:
    """Return the frames of the stream in a form, with their times; it has no end if the replay failed.

    Raise `NoReplay` if there are no events.
    """
    crossings = timeline.junctions[-1].crossings
    are_others = bool(crossings) or timeline.error is None
    if are_others and not any(isinstance(crossing.frame, ResponseEvent) for crossing in crossings):
        raise NoReplay(f"the output of {timeline.junctions[-1].stage} is not events: show it with --json")
    at: float | None = None

    async def events() -> AsyncGenerator[ResponseEvent, None]:
        nonlocal at
        for crossing in crossings:
            if isinstance(crossing.frame, ResponseEvent):
                at = crossing.at
                yield crossing.frame
        if timeline.error is not None:
            raise timeline.error

    frames = list[tuple[float | None, bytes]]()
    try:
        async with wire.translated(events()) as translated:
            async for event in translated:
                frames.append((at, wire.encode(event)))
    except BaseException as error:
        if error is not timeline.error:
            raise
    else:
        frames.append((None, wire.end))
    return frames
