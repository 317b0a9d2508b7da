"""The option ``--prove`` of ``penstock rollouts``: its engine, and what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from math import inf

import uvloop

from penstock.api.cli.arguments import Parser
from penstock.api.settings import Settings
from penstock.extensions.rollouts.paths import TokenPath
from penstock.extensions.rollouts.proof import TOLERANCE, Proof
from penstock.extensions.rollouts.proof_table import ProofTable
from penstock.extensions.workbench.forced.comparison import AT_ONCE
from penstock.extensions.workbench.forced.engines import check_model, engine_failures, engine_settings, reading_engine
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import log_to_stderr


def add_options(parser: Parser) -> None:
    """Add the options of a proof."""
    options = parser.add_argument_group(
        "proof",
        "The exit status is 1 if a token is off, and 2 if nothing can be proved. Options that are not listed here are "
        "those of penstock serve for its engine; write RECORDINGS before them.",
    )
    options.add_argument(
        "--prove",
        action="store_true",
        help="let an engine read each path in one prefill, and compare its log probabilities with the recorded ones",
    )
    options.add_argument(
        "--engine",
        metavar="ENGINE",
        action="append",
        default=[],
        help="the engine, as for penstock compare: a model, the URL of a vLLM server, or file.py:function",
    )
    options.add_argument(
        "--tolerance",
        metavar="NATS",
        type=_tolerance,
        default=TOLERANCE,
        help=f"the difference of log probabilities that is rounding ({TOLERANCE:g})",
    )


def _tolerance(text: str) -> float:
    number = float(text)
    if not 0 <= number < inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 on")
    return number


def read_settings(chosen: argparse.Namespace, others: Sequence[str], parser: Parser) -> Settings | None:
    """Return the settings of a server with the engine of the proof, or None without a proof; raise `CannotRun`."""
    if chosen.prove and chosen.engine:
        return engine_settings(chosen.engine, others, parser, "a proof")
    if chosen.prove or chosen.engine:
        raise CannotRun("--prove and --engine need each other")
    if others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    return None


def is_exact(
    paths: Iterable[TokenPath],
    settings: Settings,
    tolerance: float,
    arguments: Sequence[str],
    *,
    say: Callable[[str], object],
) -> bool:
    """Say what the engine finds of each path; return False if a token is off.

    ``arguments`` are those of the user.  Raise `CannotRun` if nothing can be proved.
    """
    log_to_stderr(settings.log_level, as_json=settings.log_format == "json")
    with engine_failures(arguments):
        check_model(settings)
        table = uvloop.run(_prove(paths, settings, tolerance, say))
    if not table.figures.proved:
        raise CannotRun("nothing could be proved")
    return not table.figures.off


async def _prove(
    paths: Iterable[TokenPath], settings: Settings, tolerance: float, say: Callable[[str], object]
) -> ProofTable:
    async with reading_engine(settings) as reading:
        table = ProofTable(reading.vocabulary, tolerance)
        say(table.head)
        proof = Proof(reading.engine, reading.vocabulary, tolerance, AT_ONCE)
        async with aclosing(proof.proved(paths)) as proved:
            async for path in proved:
                say(table.line(path))
    for line in table.end():
        say(line)
    return table
