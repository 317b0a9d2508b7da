"""Diff: find the first difference between two recordings, or between a recording and its own replay.

That of a replay is followed back: to the operator's stage that made it, and to the recorded tokens that it comes from.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec.structs import replace

from penstock.api.cli.arguments import STAGES, Parser, chosen_stages
from penstock.api.cli.replayer import NoReplay, Replay, recorded_files, replay_of
from penstock.api.cli.stage_log import described, stage_log
from penstock.extensions.workbench.against import check_alone, compared, table
from penstock.extensions.workbench.causes import recorded_cause, stage_behind
from penstock.extensions.workbench.staged import staged
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.events import Event
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.recordings.comparison import Difference, Line, Place, first_difference, is_chunked_alike
from penstock.pipeline.recordings.format import FILES, Abandoned, End, Failure, line, read_recording
from penstock.pipeline.tap import Tap
from penstock.pipeline.trace import Crossed

Lines: TypeAlias = Mapping[str, list[Line]]
"""The frames of each junction, by the stage that emitted them, followed by an `End`."""

FIRST_LINE = 2
"""The number of the first line with a frame: the header stands before it."""

WIDTH = 200
"""Characters of a line that are shown around a difference."""

_MARK = "\uffff"
"""Put in the place of a value to find it in the JSON of its frame; no text has this character."""


def main(arguments: Sequence[str]) -> None:
    """Find the first difference between two recordings, or between a recording and its replay.

    It exits with status 1 if there is one.
    """
    chosen = _parser().parse_intermixed_args(arguments)
    if chosen.against:
        _send(chosen)
        return
    one = recorded_lines(chosen.one)
    replay = _replay(chosen) if chosen.other is None else None
    pairs = list(comparisons(one, replayed_lines(replay) if replay else _other(chosen)))
    for each in pairs:
        if difference := each.difference(exact=chosen.exact):
            notes = (
                []
                if replay is None
                else ["recorded != replayed", *_causes(replay, each, difference, exact=chosen.exact)]
            )
            sides = f" ({', '.join(notes)})" if notes else ""
            print(f"{each.file}:{difference.here.line}: {difference.problem}{sides}")
            for shown in context(each.one, each.other, difference, chosen.context):
                print(shown)
            sys.exit(1)
        if replay and replay.trace.fault and each.reaches_further and len(each.one) > len(each.other):
            problem = described(*replay.trace.fault)
            print(f"{each.file}:{each.other[-1].number}: the replay ends here, and the recording goes on: {problem}")
            sys.exit(1)
    print(f"the same: {', '.join(_sames(pairs))}")


def _parser() -> Parser:
    parser = Parser(prog="penstock diff", description=__doc__, parents=[STAGES])
    parser.add_argument("one", metavar="PATH", type=Path, help="a recording's folder, or one of its files")
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="another one (default: a replay of PATH)")
    parser.add_argument("--exact", action="store_true", help="compare ids, times and the sizes of chunks, too")
    parser.add_argument("--context", metavar="N", type=int, default=0, help="show N lines around the difference")
    parser.add_argument(
        "--against",
        metavar="URL",
        help="send the requests of penstock record's recordings to another server, and compare its answers",
    )
    parser.add_argument("--model", metavar="NAME", default="", help="the model to name in these requests")
    return parser


def _send(chosen: argparse.Namespace) -> None:
    others = {"a second recording": chosen.other, "--exact": chosen.exact, "--context": chosen.context}
    check_alone(others | {"--from": chosen.since, "--to": chosen.upto, "--with": chosen.plugins})
    rows = asyncio.run(compared(chosen.one, chosen.against, chosen.model))
    for shown in table(rows):
        print(shown)
    if not all(row.is_same for row in rows):
        sys.exit(1)


def _replay(chosen: argparse.Namespace) -> Replay:
    with stage_log() as errors, staged(chosen.one) as (shown, _):
        replay = asyncio.run(replay_of(shown, chosen.since, chosen.upto, chosen_stages(chosen.plugins)))
    for note in replay.notes:
        print(f"penstock: {chosen.one}: {note}", file=sys.stderr)
    if isinstance(replay.trace.error, Abandoned):
        print(f"penstock: {chosen.one}: {replay.trace.error}", file=sys.stderr)
    errors.report(chosen.one, replay.trace.fault, replay.recording.end)
    return replay


def _other(chosen: argparse.Namespace) -> Lines:
    if chosen.since or chosen.upto or chosen.plugins:
        raise NoReplay("--from, --to and --with are for a replay: leave the second recording out")
    lines = recorded_lines(chosen.other)
    return {**lines, "persist": _events(lines["emit"])} if "emit" in lines and "persist" not in lines else lines


@dataclass(frozen=True)
class Comparison:
    """The lines of a file, and the other lines that are compared with them: the output of a ``stage``."""

    file: str
    one: list[Line]
    other: list[Line]
    stage: str

    @property
    def reaches_further(self) -> bool:
        """True if a reader left the other lines before their end, and not these."""
        return _end(self.other).abandoned and not _end(self.one).abandoned

    def difference(self, *, exact: bool) -> Difference | None:
        """Return the first difference, up to the place at which a reader left the other lines."""
        one = [*self.one[: len(self.other) - 1], self.other[-1]] if self.reaches_further else self.one
        return first_difference(one, self.other, exact=exact)


def _end(lines: Sequence[Line]) -> End:
    end: End = lines[-1].frame
    return end


def comparisons(one: Lines, other: Lines) -> Iterator[Comparison]:
    """Yield what two recordings have in common, junction by junction, and then the events that came out last.

    If those were not recorded, they were the events of ``emit``.  Raise `NoReplay` if there is nothing in common.
    """
    common = [stage for stage in FILES if stage in one and stage in other]
    if not common:
        raise NoReplay(f"nothing to compare: one recording has {_names(one)}, the other {_names(other)}")
    yield from (Comparison(FILES[stage][0], one[stage], other[stage], stage) for stage in common if stage != "persist")
    last = list(other)[-1]
    if "persist" in one and "persist" in other:
        yield Comparison(FILES["persist"][0], one["persist"], other[last], last)
    elif "emit" in common and "persist" in other:
        yield Comparison(FILES["emit"][0], _events(one["emit"]), _events(other[last]), last)


def _causes(replay: Replay, compared: Comparison, difference: Difference, *, exact: bool) -> Iterator[str]:
    """Yield what a difference comes from: the operator's stage, and the recorded frame."""

    def is_recorded(crossed: Crossed) -> bool:
        given = _recorded(crossed)
        is_last = compared.stage not in FILES or compared.stage == "persist"
        again = dataclasses.replace(compared, other=_events(given) if is_last else given)
        return again.difference(exact=exact) is None

    if stage := asyncio.run(stage_behind(replay, compared.stage, is_recorded)):
        yield f"after {stage}"
    if cause := recorded_cause(replay, compared.stage, difference.there.line - FIRST_LINE):
        yield f"from {cause}"


def _sames(compared: Sequence[Comparison]) -> Iterator[str]:
    """Yield each file that was compared, with the number of its frames."""
    for file in dict.fromkeys(each.file for each in compared):
        pairs = [(each.one, each.other) for each in compared if each.file == file]
        pieces = "" if all(is_chunked_alike(*pair) for pair in pairs) else ", in other pieces"
        yield f"{file} ({counted(len(pairs[0][0]) - 1, 'frame')}{pieces})"


def _events(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of events, and the end."""
    *frames, last = lines
    events = [each for each in frames if isinstance(each.frame, Event)]
    return [*events, Line(replace(last.frame, frames=len(events)), last.number)]


def _names(lines: Lines) -> str:
    return ", ".join(FILES[stage][0] if stage in FILES else f"the output of {stage}" for stage in lines) or "no frames"


def recorded_lines(path: Path) -> Lines:
    """Read the recording at ``path``, a folder or one file.  Raise `UnreadableRecording` if it is broken."""
    lines: dict[str, list[Line]] = {}
    with staged(path) as (shown, _):
        for stage, file in recorded_files(shown).items():
            recording = read_recording(file, FILES[stage][1])
            frames = [Line(timed.frame, timed.line) for timed in recording.timed]
            lines[stage] = [*frames, Line(replace(recording.end, cause=""), len(frames) + FIRST_LINE)]
    return lines


def replayed_lines(replay: Replay) -> Lines:
    """Return the output of each stage of a replay, with the line numbers that a recording of it would have."""
    lines = {each.stage: _recorded(each) for each in replay.trace.junctions[1:]}
    return {stage: _recorded(tap) for stage, tap in replay.turns.items()} | lines


def _recorded(passed: Crossed | Tap) -> list[Line]:
    end = End(len(passed.frames), Failure.of(passed.raised) if passed.raised else None, passed.abandoned)
    return [Line(frame, number) for number, frame in enumerate([*passed.frames, end], start=FIRST_LINE)]


def context(one: Sequence[Line], other: Sequence[Line], difference: Difference, size: int) -> Iterator[str]:
    """Yield ``size`` lines around a difference, with a mark below each place that differs."""
    if not size:
        return
    here, there = difference.here, difference.there
    for mark, lines, start, place in (
        (" ", one, here.line - size, here),
        ("-", one, here.line, here),
        ("+", other, there.line, there),
    ):
        for each in lines:
            if not start <= each.number < start + size:
                continue
            head, text = f"{mark} {each.number:4d}  ", line(each.frame).decode().rstrip()
            if each.number == place.line:
                text, column = _around(text, _column(text, place))
                yield head + text
                yield " " * (len(head) + column) + "^"
            else:
                yield head + shortened(text, WIDTH)


def _column(text: str, place: Place) -> int:
    """Return the position of a place in the JSON of its frame; that of the next larger value if it is absent there."""
    frame = owner = value = msgspec.json.decode(text)
    key: str | int = "type"
    for step in place.path:
        try:
            owner, key, value = value, step, value[step]
        except (LookupError, TypeError):
            break
    owner[key] = _MARK
    before = msgspec.json.encode(frame).decode().index(f'"{_MARK}"')
    return before + (len(msgspec.json.encode(value[: place.offset]).decode()) - 1 if isinstance(value, str) else 0)


def _around(text: str, column: int) -> tuple[str, int]:
    """Return the part of a line around a column, and the place of the column in that part."""
    start = max(0, min(column - WIDTH // 2, len(text) - WIDTH))
    before = "…" if start else ""
    return f"{before}{shortened(text[start:], WIDTH)}", column - start + len(before)
