"""Compare: find the recorded answers that another engine would have changed, and the token at which.

No answer is generated again: the recorded tokens pass through the engine, which says for each how likely it is.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path

import uvloop

from penstock.api.cli.arguments import Parser
from penstock.api.settings import Settings
from penstock.extensions.workbench.forced.as_json import answer_line, summary_line
from penstock.extensions.workbench.forced.comparison import AT_ONCE, Compared, Comparison, Figures
from penstock.extensions.workbench.forced.engines import (
    check_model,
    engine_failures,
    engine_settings,
    reading_engine,
)
from penstock.extensions.workbench.forced.page import layout_of, page_of
from penstock.extensions.workbench.forced.recorded import read_answer, recordings_in
from penstock.extensions.workbench.forced.scores import SAMPLED, reason_left_out
from penstock.extensions.workbench.forced.table import Table
from penstock.extensions.workbench.inspect import write_page
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import counted, log_to_stderr
from penstock.pipeline.recordings.format import UnreadableRecording

ADVICE = " Record requests with top_logprobs: 1, or with temperature 0."
"""The cure of recordings that were sampled: what else the engine could have chosen is not in them."""


def main(arguments: Sequence[str]) -> None:
    """Find the recorded answers that another engine would have changed, and the token at which.

    It exits with status 1 if a limit is exceeded, and with 2 if nothing could be compared.
    """
    chosen, settings = read_arguments(arguments)
    recordings = recordings_in(chosen.recordings)
    log_to_stderr(settings.log_level, as_json=settings.log_format == "json")
    if reasons := left_out_before(recordings):
        described = "; ".join(f"{counted(number, 'recording')}: {reason}" for reason, number in reasons.most_common())
        raise CannotRun(f"nothing can be compared: {described}.{ADVICE if SAMPLED in reasons else ''}")
    with engine_failures(arguments):
        check_model(settings)
        exceeded = uvloop.run(_compare(chosen, settings, recordings))
    if exceeded:
        sys.exit(1)


def left_out_before(recordings: Mapping[str, Path]) -> Counter[str]:
    """Count why none of the recordings can be compared with any engine; empty if one can."""
    reasons = Counter[str]()
    for name, folder in recordings.items():
        try:
            turns = [turn for turn in read_answer(name, folder).turns if turn.tokens]
        except UnreadableRecording as error:
            reasons[str(error).removeprefix(f"{folder}: ")] += 1
            continue
        why = [reason_left_out(turn) for turn in turns]
        if not all(why):
            return Counter()
        reasons[why[0]] += 1
    return reasons


def read_arguments(arguments: Sequence[str]) -> tuple[argparse.Namespace, Settings]:
    """Return the options of this command, and the settings of a server with the engine; raise `CannotRun`."""
    parser = _parser()
    chosen, others = parser.parse_known_args(arguments)
    if chosen.most_calls_changed is not None and not chosen.run_on:
        raise CannotRun("--most-calls-changed needs --run-on")
    return chosen, engine_settings(chosen.engine, others, parser, "a comparison")


def _parser() -> Parser:
    parser = Parser(
        prog="penstock compare",
        description=__doc__,
        epilog="Options that are not listed here are those of penstock serve for its engine: vLLM's own, such as "
        "--max-model-len, and --reasoning-parser and the like. Write RECORDINGS before them.",
    )
    parser.add_argument(
        "recordings", metavar="RECORDINGS", type=Path, nargs="+", help="a recording's folder, or one with such folders"
    )
    parser.add_argument(
        "--engine",
        metavar="NEW",
        action="append",
        required=True,
        help="the engine to compare with: a model, as a Hugging Face id or a folder, which vLLM runs in this process; "
        "or the URL of a vLLM server; or file.py:function, for an engine of your own",
    )
    parser.add_argument("--json", action="store_true", help="write JSON lines, with all tokens, instead of the table")
    parser.add_argument(
        "--run-on",
        action="store_true",
        help="let the engine write each answer on from its first change, and compare the items: text, thoughts, calls",
    )
    parser.add_argument(
        "--html", metavar="PAGE", type=Path, help="write a page, too, with the tokens by their surprise"
    )
    parser.add_argument("--worst", metavar="N", type=int, default=10, help="list the N most surprising tokens (10)")
    parser.add_argument(
        "--tie",
        metavar="NATS",
        type=_number,
        default=0.0,
        help="count choices as the same if their log probabilities differ by at most this (0)",
    )
    parser.add_argument(
        "--at-once", metavar="N", type=_positive, default=AT_ONCE, help=f"answers that are read at once ({AT_ONCE})"
    )
    _add_limits(parser.add_argument_group("limits", "If one is exceeded, the exit status is 1."))
    return parser


def _add_limits(limits: argparse._ArgumentGroup) -> None:
    limits.add_argument(
        "--most-changed", metavar="SHARE", type=_number, help="the share of tokens that may change, such as 0.01"
    )
    limits.add_argument("--worst-surprise", metavar="NATS", type=_number, help="the largest surprise of a token")
    limits.add_argument(
        "--worst-shift", metavar="NATS", type=_number, help="the largest change of a recorded log probability"
    )
    limits.add_argument(
        "--most-calls-changed",
        metavar="SHARE",
        type=_number,
        help="the share of answers in which a call of a tool may change; with --run-on",
    )


def _number(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 on")
    return number


async def _compare(chosen: argparse.Namespace, settings: Settings, recordings: Mapping[str, Path]) -> list[str]:
    """Print the comparison; return the limits that are exceeded."""
    async with reading_engine(settings) as reading:
        vocabulary, parse = reading.vocabulary, reading.parse if chosen.run_on else None
        comparison = Comparison(
            reading.engine, vocabulary=vocabulary, tie=chosen.tie, at_once=chosen.at_once, parse=parse
        )
        table, kept = Table(vocabulary, list(recordings), chosen.worst), list[Compared]()
        if not chosen.json:
            print(table.head, flush=True)
        async with aclosing(comparison.compared(recordings)) as answers:
            async for answer in answers:
                line = table.line(answer)
                if chosen.html:
                    kept.append(answer)
                print(answer_line(answer, vocabulary) if chosen.json else line, flush=True)
    if chosen.html:
        write_page(chosen.html, page_of(layout_of(kept, table.figures, vocabulary, _title(chosen))))
    exceeded = list(limits_exceeded(table.figures, chosen))
    if chosen.json:
        print(summary_line(table.figures, exceeded))
    else:
        print("\n".join((*table.end(), *(["", *exceeded] if exceeded else []))))
    if not table.figures.compared and not table.figures.shifted:
        raise CannotRun("nothing could be compared")
    return exceeded


def _title(chosen: argparse.Namespace) -> str:
    engines = [Path(engine).name if Path(engine).exists() else engine for engine in chosen.engine]
    return f"{', '.join(path.resolve().name for path in chosen.recordings)} → {', '.join(engines)}"


def limits_exceeded(figures: Figures, limits: argparse.Namespace) -> Iterator[str]:
    """Yield a line for each limit that is exceeded."""
    for option, found, limit in (
        ("--most-changed", figures.share, limits.most_changed),
        ("--worst-surprise", figures.worst_surprise, limits.worst_surprise),
        ("--worst-shift", figures.worst_shift, limits.worst_shift),
        ("--most-calls-changed", figures.calls_share, limits.most_calls_changed),
    ):
        if limit is not None and found is not None and found > limit:
            yield f"{option} {limit:g} is exceeded: {found:.4g}"
