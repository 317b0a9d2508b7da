"""Diff: find the first difference between two recordings, or between a recording and its own replay."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from penstock.api.cli.arguments import STAGES
from penstock.api.cli.replayer import NoReplay, Replay, recorded_files, replay_of
from penstock.pipeline.plugins import load
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.recordings.comparison import Difference, Line, first_difference, is_chunked_alike
from penstock.pipeline.recordings.format import FILES, Abandoned, End, Failure, line, read_recording

Lines: TypeAlias = Mapping[str, list[Line]]
"""The frames of each junction, by the stage that emitted them, followed by an `End`."""

WIDTH = 200
"""Characters of a line that are shown around a difference."""


def main(arguments: Sequence[str]) -> None:
    """Print the first difference between two recordings.  Exit with status 1 if there is one."""
    chosen = _parser().parse_args(arguments)
    one, other = recorded_lines(chosen.one), _other(chosen)
    stages = _common(one, other)
    for stage in stages:
        if difference := first_difference(one[stage], other[stage], exact=chosen.exact):
            print(f"{FILES[stage][0]}:{difference.line}: {difference.problem}")
            for shown in _context(one[stage], other[stage], difference, chosen.context):
                print(shown)
            sys.exit(1)
    if others := [FILES[stage][0] for stage in stages if not is_chunked_alike(one[stage], other[stage])]:
        print(f"the same, in other pieces: {', '.join(others)}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="penstock diff", description=__doc__, parents=[STAGES])
    parser.add_argument("one", metavar="PATH", type=Path, help="a recording's folder, or one of its files")
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="another one (default: a replay of PATH)")
    parser.add_argument("--exact", action="store_true", help="compare ids, times and the sizes of chunks, too")
    parser.add_argument("--context", metavar="N", type=int, default=0, help="show N lines around the difference")
    return parser


def _other(chosen: argparse.Namespace) -> Lines:
    if chosen.other is None:
        replay = asyncio.run(replay_of(chosen.one, chosen.since, chosen.upto, load(chosen.plugins)))
        for note in replay.notes:
            print(f"penstock: {chosen.one}: {note}", file=sys.stderr)
        return replayed_lines(replay)
    if chosen.since or chosen.upto or chosen.plugins:
        raise NoReplay("--from, --to and --with are for a replay: leave the second recording out")
    return recorded_lines(chosen.other)


def _common(one: Lines, other: Lines) -> list[str]:
    stages = [stage for stage in FILES if stage in one and stage in other]
    if not stages:
        raise NoReplay(f"the recordings have no file in common: {_names(one)}, and {_names(other)}")
    return stages


def _names(lines: Lines) -> str:
    return ", ".join(FILES[stage][0] if stage in FILES else f"the output of {stage}" for stage in lines) or "no frames"


def recorded_lines(path: Path) -> Lines:
    """Read the recording at ``path``, a folder or one file.  Raise `UnreadableRecording` if it is broken."""
    lines: dict[str, list[Line]] = {}
    for stage, file in recorded_files(path).items():
        recording = read_recording(file, FILES[stage][1])
        frames = [Line(timed.frame, timed.line) for timed in recording.timed]
        lines[stage] = [*frames, Line(recording.end, len(frames) + 2)]
    return lines


def replayed_lines(replay: Replay) -> Lines:
    """Return the output of each stage of a replay, with the line numbers that a recording of it would have."""
    abandoned = isinstance(replay.trace.error, Abandoned)
    lines = {
        each.stage: _recorded(each.frames, each.raised, abandoned=abandoned) for each in replay.trace.junctions[1:]
    }
    inner = {stage: _recorded(frames, None, abandoned=abandoned) for stage, frames in replay.turns.items()}
    return inner | lines


def _recorded(frames: Sequence[Any], raised: Exception | None, *, abandoned: bool) -> list[Line]:
    end = End(len(frames), Failure.of(raised) if raised else None, abandoned)
    return [Line(frame, number) for number, frame in enumerate([*frames, end], start=2)]


def _context(one: Sequence[Line], other: Sequence[Line], difference: Difference, size: int) -> Iterator[str]:
    if not size:
        return
    for mark, lines, start, stop in (
        (" ", one, difference.line - size, difference.line),
        ("-", one, difference.line, difference.line + size),
        ("+", other, difference.other_line, difference.other_line + size),
    ):
        for each in lines:
            if start <= each.number < stop:
                yield f"{mark} {each.number:4d}  {shortened(line(each.frame).decode().rstrip(), WIDTH)}"
