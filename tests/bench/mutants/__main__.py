"""Mutants of the product, and which of them the tests kill.

    python -m tests.bench.mutants [--against FILE] [--out FILE] [--jobs N] [--seed N] [--per-folder N] [--budget S]

With ``--against`` the mutants are those of an earlier run; the exit status is 1 if one that was killed there survives.

Not `cosmic-ray`, which was tried on ``api/limits/allowance.py`` (131 lines, version 8.7).  It makes 279 mutants of it
and runs the same command for each, 8 seconds for one file of tests, where this program forks a warm process that runs
the tests that execute the mutated line, cheapest first.  It has no sample: 216 mutants of ours stand for the product,
and its list of all did not end in two minutes.  Its mutants are numbered by their place, so an earlier run cannot be
compared after an edit, and they are written into the tree, where an interrupted run leaves the last one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from math import inf
from pathlib import Path
from typing import TypeAlias

from tests.bench.mutants.choose import PER_FOLDER, SEED, Mutant, chosen, product
from tests.bench.mutants.covering import CACHE, Covering, affordable, covering
from tests.bench.mutants.judge import Trial, Verdict, verdicts, warm

OUTCOMES = ("killed", "timed out", "survived", "not covered")
DEAD = ("killed", "timed out")
FIXED = {"PYTHONHASHSEED": "0", "CI": "true"}
"""Environment variables that give tests the same names and the same random examples in each run."""

POSTGRES = """
import sys
from tests.support.stores import any_postgres

with any_postgres() as server:
    print(server.url, flush=True)
    sys.stdin.read()
"""

Mutants: TypeAlias = Mapping[str, Mutant]


@dataclass
class Judge:
    covering: Covering
    jobs: int
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    _unsound: set[str] = field(default_factory=set)
    """Tests that fail over the unchanged product."""

    def judge(self, mutants: Mutants, budget: float) -> None:
        """Judge each mutant, and again if the test that killed it kills the product as well."""
        while mutants:
            self._judge(mutants, budget)
            killers = {test for name in mutants for test in self.verdicts[name].tests}
            unsound = self._failing(sorted(killers & self.covering.seconds.keys()))
            self._unsound |= unsound
            mutants = {name: mutant for name, mutant in mutants.items() if unsound & set(self.verdicts[name].tests)}

    def survivors(self, names: Iterable[str]) -> list[str]:
        """The names of mutants that are not dead."""
        return [name for name in names if self.verdicts[name].outcome not in DEAD]

    def _judge(self, mutants: Mutants, budget: float) -> None:
        trials: deque[Trial] = deque()
        for name, mutant in mutants.items():
            self.verdicts[name] = Verdict("not covered")
            if near_and_far := self._tests(mutant, budget):
                trials.append(Trial(name, mutant, near_and_far))
        started, count = time.monotonic(), len(trials)
        for number, (name, verdict) in enumerate(verdicts(trials, self.covering.seconds, self.jobs), 1):
            self.verdicts[name] = verdict
            print(
                f"{number} of {count} in {time.monotonic() - started:.0f} s: {verdict.outcome}: {name}"[:180],
                flush=True,
            )

    def _tests(self, mutant: Mutant, budget: float) -> list[list[str]]:
        """The tests that the budget allows, in two groups: those next to the mutated folder come first."""
        tests = [test for test in self.covering.tests(mutant) if test not in self._unsound]
        groups: tuple[list[str], list[str]] = ([], [])
        for test in affordable(tests, self.covering.seconds, budget):
            groups[f"/{mutant.folder}/" not in test.partition("::")[0]].append(test)
        return [group for group in groups if group]

    def _failing(self, tests: list[str]) -> set[str]:
        trials = deque([Trial("", None, [tests])] if tests else [])
        return {test for _, verdict in verdicts(trials, self.covering.seconds, 1) for test in verdict.tests}


def outcome_table(mutants: Mutants, verdicts: Mapping[str, Verdict]) -> Iterator[str]:
    """Yield a table of the outcomes in each folder, then a line for each mutant that survived."""
    counts = Counter((mutant.folder, verdicts[name].outcome) for name, mutant in mutants.items())
    yield "| folder | mutants | " + " | ".join(OUTCOMES) + " |"
    yield "|---" + "|--:" * (1 + len(OUTCOMES)) + "|"
    folders = sorted({mutant.folder for mutant in mutants.values()})
    for row in (*folders, "all"):
        by_outcome = [
            sum(counts[folder, outcome] for folder in folders if row in (folder, "all")) for outcome in OUTCOMES
        ]
        yield f"| {row} | {sum(by_outcome)} | " + " | ".join(map(str, by_outcome)) + " |"
    yield ""
    for name, mutant in mutants.items():
        if verdicts[name].outcome not in DEAD:
            yield f"{verdicts[name].outcome}: {mutant.path}:{mutant.span[0]}: {name}"


def write(path: Path, seed: int, verdicts: Mapping[str, Verdict]) -> None:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
    kept = {name: {"outcome": verdict.outcome, "tests": verdict.tests} for name, verdict in sorted(verdicts.items())}
    document = {"commit": commit.strip(), "date": str(date.today()), "seed": seed, "verdicts": kept}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", "utf-8")


def compared(judge: Judge, mutants: Mutants, before: Mapping[str, str]) -> list[str]:
    """Return mutants that an earlier run killed and this one does not, even with every test that executes them."""
    alive = judge.survivors(name for name in mutants if before[name] in DEAD)
    judge.judge({name: mutants[name] for name in alive}, inf)
    return judge.survivors(alive)


@contextmanager
def postgres() -> Iterator[str]:
    """Yield the URL of a server for all tests; another process starts it, as this one may not import the product."""
    command = [sys.executable, "-c", POSTGRES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield process.stdout.readline().strip()


def main() -> int:
    """Try the mutants and print the outcomes; return 1 if a mutant killed earlier survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.mutants", description=__doc__)
    parser.add_argument("--against", type=Path, metavar="FILE", help="verdicts to compare with, on the same mutants")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", default=CACHE / "mutants.json", help="where to write verdicts"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes at once")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--per-folder", type=int, default=PER_FOLDER)
    parser.add_argument("--budget", type=float, default=40.0, help="seconds of tests for each mutant")
    options = parser.parse_args()
    before: dict[str, str] = {}
    everything = product(Path())
    mutants: Mutants = {mutant.id: mutant for mutant in chosen(everything, options.per_folder, options.seed)}
    if options.against:
        known = json.loads(options.against.read_text("utf-8"))["verdicts"]
        before = {name: verdict["outcome"] for name, verdict in known.items()}
        mutants = {mutant.id: mutant for mutant in everything if mutant.id in before}
    judge = Judge(covering(options.jobs), options.jobs)
    warm()
    with postgres() as url:
        os.environ["TEST_POSTGRES_URL"] = url
        judge.judge(mutants, options.budget)
        regressed = compared(judge, mutants, before) if options.against else []
    write(options.out, options.seed, judge.verdicts)
    print("", *outcome_table(mutants, judge.verdicts), sep="\n")
    for name in before.keys() - mutants.keys():
        print(f"no longer in the product: {name}")
    for name in regressed:
        print(f"KILLED BEFORE, NOT NOW: {name}")
    return 1 if regressed else 0


if __name__ == "__main__":
    if any(os.environ.get(name) != value for name, value in FIXED.items()):
        command = [sys.executable, "-m", "tests.bench.mutants", *sys.argv[1:]]
        os.execve(sys.executable, command, os.environ | FIXED)
    sys.exit(main())
