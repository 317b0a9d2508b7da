"""Measure penstock beside vLLM's own frontend, and compare the results with the goals.

    python -m tests.bench [--quick] [--write] [PART...]
    python -m tests.bench [--quick] [--write] --model MODEL [--engine "OPTIONS"] [--streams N]

`tests/bench/METHOD.md` describes the method.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from penstock.api.runs.housekeeping import tune_gc
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.bench.engines import engines
from tests.bench.loopback import QUIET
from tests.bench.measuring import DETAILS, PARTS, Found, measured
from tests.bench.report import goals_table, keep, last, machine, seconds_table, section
from tests.bench.stated import restate
from tests.support.orphans import ending_with_us

FOLDER, KEPT = Path(".cache/bench"), Path(__file__).parent


async def with_engines(options: argparse.Namespace, tell: Callable[[str, Found], None]) -> None:
    rounds, load = (1, (8, 128)) if options.quick else (5, (options.streams, 1_000))
    compared = await engines(options.model, shlex.split(options.engine), FOLDER, rounds, load)
    title = f"Real engines: {Path(options.model).name}, {load[1]} tokens a stream. "
    tell("engines", Found(comparisons={title + beside: rows for beside, rows in compared.items()}))


async def without(options: argparse.Namespace, tell: Callable[[str, Found], None]) -> None:
    load_encoding()
    tune_gc()  # as a server does once it is up
    await measured(options.parts or [*PARTS], FOLDER, tell, is_quick=options.quick)


def main() -> int:
    """Measure the selected parts and print their results; return 1 if a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, *DETAILS, []], help=f"what to measure; if none, {', '.join(PARTS)}"
    )
    parser.add_argument("--quick", action="store_true", help="less of each")
    parser.add_argument(
        "--write",
        action="store_true",
        help=f"write to {KEPT.name}/ beside this file and to the pages that state figures, not to {FOLDER}",
    )
    parser.add_argument("--model", help="measure `penstock serve` beside `vllm serve`, both with this model")
    parser.add_argument("--engine", default="", help="options for both, in one word: '--dtype bfloat16 ...'")
    parser.add_argument("--streams", type=int, default=32, help="at a time, with --model")
    options = parser.parse_args()
    os.environ.update({**QUIET, **ending_with_us()})
    FOLDER.mkdir(parents=True, exist_ok=True)
    where, folder = machine(is_quick=options.quick), KEPT if options.write else FOLDER
    results: dict[str, Found] = {}

    def tell(name: str, found: Found) -> None:
        """Print and save each part as soon as it is done: a run may be stopped early."""
        found.where = where
        results[name] = found
        print(section(name, found), end="\n\n", flush=True)
        keep({name: found}, folder)

    uvloop.run(with_engines(options, tell) if options.model else without(options, tell))
    print(goals_table(last(folder)), seconds_table(results), sep="\n\n", flush=True)
    if options.write:
        restate()
    return int(any(found.failed for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
