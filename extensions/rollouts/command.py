"""Rollouts: turn recordings into what trainers read: tokens, masks, log probabilities and rewards, a row for each path.

A path is a chain of turns that extend one another token by token.  RECORDINGS also have the rewards that clients sent.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import isnan
from pathlib import Path

import msgspec

from penstock.api.cli.arguments import Parser
from penstock.api.settings import Settings
from penstock.api.start.serving import signals_raised
from penstock.extensions.rollouts.forms import FORMS, TRIED, reward_of, rows
from penstock.extensions.rollouts.paths import TokenPath
from penstock.extensions.rollouts.proving import add_options, is_exact, read_settings
from penstock.extensions.rollouts.sessions import Session, rollouts
from penstock.extensions.rollouts.writing import STANDARD, Write, check_out, written
from penstock.pipeline.errors import CannotRun, Stopped
from penstock.pipeline.logs import counted

STOPPED = 130
"""The exit status if a signal has ended the command."""


def main(arguments: Sequence[str]) -> None:
    """Turn recordings into rollouts: tokens, masks, log probabilities and rewards, as trainers read them.

    It exits with status 2 if nothing could be exported, and with 130 if a signal ended it.  With ``--prove``, it exits
    with 2 if nothing could be proved, and with 1 if the engine finds a token less or more likely than it was.
    """
    parser = _parser()
    chosen, others = parser.parse_known_args(arguments)
    settings = read_settings(chosen, others, parser)
    if chosen.out:
        check_out(chosen.out)
    elif settings is None:
        parser.error("the following arguments are required: -o/--out, or --prove")
    summary = Summary()
    try:
        with signals_raised():
            is_off = _export(chosen, summary, settings, arguments)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CannotRun(str(error)) from error
    except Stopped:
        sys.exit(STOPPED)
    print("\n".join(summary.lines(_place(chosen))), file=sys.stderr)
    if is_off:
        sys.exit(1)


def _export(chosen: argparse.Namespace, summary: Summary, settings: Settings | None, arguments: Sequence[str]) -> bool:
    """Write all paths, and prove them if there are settings of an engine; return True if a token is off."""
    is_off = False
    with written(chosen.out, chosen.form) if chosen.out else nullcontext(_unwritten) as write:
        paths = _exported(chosen, summary, write)
        first = next(paths, None)  # before an engine is loaded
        if first is None:
            reason = f": there is no session {chosen.session}" if chosen.session else ""
            raise CannotRun("\n".join((f"nothing could be exported{reason}", *summary.reasons())))
        if settings:
            is_off = not is_exact(chain([first], paths), settings, chosen.tolerance, arguments, say=_say(chosen.out))
        deque(paths, maxlen=0)
    return is_off


def _exported(chosen: argparse.Namespace, summary: Summary, write: Write) -> Iterator[TokenPath]:
    """Write the rows of all paths, session by session, and yield the paths."""
    for session in rollouts(chosen.recordings, session=chosen.session):
        summary.add(session)
        for row in rows(chosen.form, session.paths):
            write(row)
            summary.rows += 1
        yield from (path for path in session.paths if 1 in path.mask)


def _unwritten(_: msgspec.Struct) -> None:
    """Write nothing."""


def _say(out: str) -> Callable[[str], None]:
    return partial(print, file=sys.stderr if out == STANDARD else sys.stdout, flush=True)


def _place(chosen: argparse.Namespace) -> str:
    if not chosen.out:
        return "written nowhere"
    return f"{'stdout' if chosen.out == STANDARD else chosen.out}, as {_name(chosen.form)} reads them"


def _parser() -> Parser:
    parser = Parser(prog="penstock rollouts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "recordings", metavar="RECORDINGS", type=Path, nargs="+", help="a recording's folder, or one with such folders"
    )
    parser.add_argument(
        "-o", "--out", metavar="OUT", default="", help="the file: .jsonl or .parquet; - for JSON lines on stdout"
    )
    trainers = ", ".join(_name(form) for form in TRIED)
    parser.add_argument(
        "--form",
        choices=FORMS,
        default="penstock",
        help=f"the names of the fields: penstock has all; tried: {trainers}",
    )
    parser.add_argument("--session", metavar="ID", default="", help="only the sessions with this id")
    add_options(parser)
    return parser


def _name(form: str) -> str:
    return f"{form} {TRIED[form]}" if form in TRIED else form


@dataclass
class Summary:
    """The numbers of what was exported, and of what was not."""

    sessions: int = 0
    paths: int = 0
    rows: int = 0
    """Paths that were written: a trainer gets none of which the model wrote nothing."""
    tokens: int = 0
    trained: int = 0
    """Tokens that the model wrote."""
    unknown: int = 0
    """Tokens that the model wrote whose log probability is not known."""
    unrewarded: int = 0
    """Sessions without a reward."""
    cuts: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """Recordings by the reason for which they are in no path."""

    def add(self, session: Session) -> None:
        """Count a session."""
        self.skipped.update(each.reason.removeprefix(f"{each.folder}/") for each in session.skipped)
        if not session.paths:
            return
        self.sessions += 1
        self.unrewarded += all(reward_of(path) is None for path in session.paths)
        for path in session.paths:
            self._add(path)

    def _add(self, path: TokenPath) -> None:
        self.paths += 1
        self.tokens += len(path.token_ids)
        self.trained += path.mask.count(1)
        self.unknown += sum(map(isnan, path.logprobs)) - path.mask.count(0)
        if path.cut:
            self.cuts[path.cut.reason] += 1

    def lines(self, place: str) -> Iterator[str]:
        """Yield what was exported to a place, in words, and what is missing."""
        words = (counted(self.sessions, "session", ","), counted(self.rows, "path", ","))
        yield f"{', '.join(words)}, {counted(self.tokens, 'token', ',')}, {self.trained:,} of them trained: {place}"
        if self.cuts:
            yield f"cuts: {', '.join(f'{number:,} {reason}' for reason, number in self.cuts.most_common())}"
        if empty := self.paths - self.rows:
            yield f"left out: {counted(empty, 'path', ',')} of which the model wrote nothing"
        if self.unknown:
            yield f"without a log probability: {counted(self.unknown, 'trained token', ',')}"
        if self.unrewarded:
            yield f"without a reward: {counted(self.unrewarded, 'session', ',')}"
        yield from self.reasons()

    def reasons(self) -> Iterator[str]:
        """Yield why recordings were skipped."""
        for reason, number in self.skipped.most_common():
            yield f"skipped: {counted(number, 'recording', ',')}: {reason}"
