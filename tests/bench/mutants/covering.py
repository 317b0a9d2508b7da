"""The tests that execute each line of the product, and how long each takes, from one run of the tests.

In that run this module is a pytest plugin, which writes the duration of each passed test to the file MUTANTS_TIMES.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage
import pytest

from tests.bench.mutants.choose import Mutant
from tests.support.paths import PRODUCT

CACHE = Path(".cache/mutants")


@dataclass(frozen=True)
class Covering:
    data: coverage.CoverageData
    seconds: dict[str, float]
    """Seconds of each test that passed."""

    def tests(self, mutant: Mutant) -> list[str]:
        """The tests that execute the statement of a mutant, cheapest first."""
        lines = self.data.contexts_by_lineno(str(Path(mutant.path).resolve()))
        first, last = mutant.span
        contexts = {context for line in range(first, last + 1) for context in lines.get(line, ())}
        tests = {context.rpartition("|")[0] for context in contexts} & self.seconds.keys()
        return sorted(tests, key=lambda test: (self.seconds[test], test))


def covering(jobs: int) -> Covering:
    """The findings for product and tests as they are now, from the cache if they are there."""
    folder = CACHE / _fingerprint()
    times, lines = folder / "times.json", folder / "coverage"
    if not times.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _measure(times, lines, jobs)
    data = coverage.CoverageData(str(lines))
    data.read()
    return Covering(data, json.loads(times.read_text()))


def affordable(tests: Sequence[str], seconds: dict[str, float], budget: float) -> list[str]:
    result = list(tests[:1])
    for test in tests[1:]:
        budget -= seconds[test]
        if budget < 0:
            break
        result.append(test)
    return result


def _measure(times: Path, lines: Path, jobs: int) -> None:
    """Run all tests that need no engine; failing tests are ignored, because they cannot judge a mutant."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    command += ["-p", "tests.support.progress", "--suite", "coverage", "-p", "tests.bench.mutants.covering"]
    command += ["-n", str(jobs), "--dist", "worksteal"]
    command += [*(f"--cov={folder}" for folder in PRODUCT), "--cov-context=test", "--cov-report="]
    environment = {"MUTANTS_TIMES": str(times.resolve()), "COVERAGE_FILE": str(lines.resolve())}
    subprocess.run(command, env=os.environ | environment, check=False)


def _fingerprint() -> str:
    paths = [Path("server.py"), Path("pyproject.toml")]
    for folder in (*PRODUCT, "tests"):
        paths += sorted(Path(folder).rglob("*.py"))
    digest = hashlib.sha256()
    for path in paths:
        if path.parts[:2] != ("tests", "bench"):
            digest.update(f"{path}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


_seconds: defaultdict[str, float] = defaultdict(float)
_others: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _others.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        passed = {test: round(seconds, 4) for test, seconds in sorted(_seconds.items()) if test not in _others}
        Path(os.environ["MUTANTS_TIMES"]).write_text(json.dumps(passed), "utf-8")
