"""Suites of tests of other servers that run against penstock, with a verdict on each test that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.oracles.sources import CACHE

VERDICTS = ("model", "absent", "theirs", "arguable", "ours")
COLUMNS = ("tests", "passed", "skipped", *VERDICTS, "unexplained")

Result = dict[str, str]
"""The name of a test, its outcome, and why it failed, as `recorded_results` writes them."""


PLUGINS = Path(__file__).with_name("plugins")


@dataclass(frozen=True)
class Suite:
    """A suite, and the folder of its ``differences.toml`` and of its plug-ins."""

    folder: Path
    root: str
    """The folder of the tests, below that where they run."""

    @property
    def differences(self) -> Path:
        return self.folder / "differences.toml"

    def results(
        self, place: Path, tests: Iterable[str], environment: Mapping[str, str], *options: str
    ) -> Iterator[Result]:
        """Run tests below a folder with pytest, and yield the result of each."""
        results = place / "results.jsonl"
        results.unlink(missing_ok=True)  # of other tests below this folder
        environment = {
            **environment,
            "RECORDED_RESULTS": str(results),
            "PYTHONPATH": os.pathsep.join(map(str, (PLUGINS, self.folder))),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "recorded_results", "-p", "no:cacheprovider"]
        command += ["-c", os.devnull, "--rootdir", ".", "--tb=short", "--continue-on-collection-errors", *options]
        run = [*command, *(f"{self.root}/{test}" for test in tests)]
        done = subprocess.run(run, cwd=place, env=os.environ | environment, capture_output=True, text=True, check=False)
        if not results.exists():
            raise RuntimeError(f"The tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        for line in results.read_text().splitlines():
            result: Result = json.loads(line)
            yield result | {"test": result["test"].removeprefix(f"{self.root}/")}

    def verdicts(self) -> dict[str, str]:
        """Return the verdict of each test that has one; a test without a name is a file that cannot be read."""
        found: dict[str, str] = {}
        for each in tomllib.loads(self.differences.read_text()).get("difference", ()):
            assert each["verdict"] in VERDICTS, each
            assert each["reason"]
            for name in each["tests"]:
                test = f"{each['file']}::{name}" if name else each["file"]
                assert test not in found, test
                found[test] = each["verdict"]
        return found

    def judge(self, results: Iterable[Result], *, all_ran: bool) -> tuple[list[str], bool]:
        """Return the lines of a report, and whether each failure is explained; what is not is in a file as well.

        An explanation needs a test that fails, unless not ``all_ran``.
        """
        known, counts, report = self.verdicts(), dict[str, Counter[str]](), CACHE / f"{self.folder.name}.json"
        unexplained, gone = list[Result](), list[str]()
        for result in results:
            file = result["test"].partition("::")[0]
            verdict = known.pop(result["test"], "")
            failed = result["outcome"] == "failed"
            if failed and not verdict:
                unexplained.append(result)
            if verdict and not failed:
                gone.append(result["test"])
            outcome = verdict or "unexplained" if failed else result["outcome"]
            counts.setdefault(file, Counter()).update(["tests", outcome])
        gone += known if all_ran else ()
        report.write_text(json.dumps(unexplained, indent=1))
        lines = [*_table(counts), *(f"{result['test']}: {_last(result['why'])}" for result in unexplained)]
        lines += [f"{len(unexplained)} unexplained: {report}"]
        lines += [f"{self.differences.name} explains a test that does not fail: {name}" for name in gone]
        return lines, bool(counts) and not unexplained and not gone


def _last(why: str) -> str:
    errors = [line[1:].strip() for line in why.splitlines() if line.startswith("E ")]
    return (errors or why.splitlines() or [""])[0]


def _table(counts: Mapping[str, Counter[str]]) -> Iterator[str]:
    yield f"{'file':70s}" + "".join(f"{column:>12s}" for column in COLUMNS)
    total = Counter[str]()
    for file, count in sorted(counts.items()):
        total.update(count)
        yield f"{file:70s}" + "".join(f"{count[column] or '':>12}" for column in COLUMNS)
    yield f"{'all':70s}" + "".join(f"{total[column]:12d}" for column in COLUMNS)
