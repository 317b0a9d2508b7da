"""Progress and a summary line for one test suite, as a pytest plugin; the lines of all suites, as a program.

``python -m pytest -p tests.support.progress --suite flow ...`` writes a line every few seconds in place of pytest's
dots, and a summary line at the end, which it also keeps in ``.cache/suites``.  ``python -m tests.support.progress``
writes the lines that are kept there.  Client suites run without penstock, so nothing of penstock is imported here.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

KEPT = Path(".cache/suites")
PERIOD = 15.0
"""Seconds between two lines of progress."""

ALMOST_HANGING = 0.8
"""Fraction of the time of a test after which the lines that stay if it hangs tell where it waits."""


def waits() -> Iterator[str]:
    """Yield the innermost place that each task of asyncio waits at, as far as a coroutine tells."""
    for task in [each for each in gc.get_objects() if isinstance(each, asyncio.Task) and not each.done()]:
        awaited: Any = task.get_coro()
        frame: FrameType | None = None
        while awaited is not None:
            frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None) or frame
            awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
        if frame is not None:
            yield f"{task.get_name()} waits at {frame.f_code.co_filename}:{frame.f_lineno}"


@dataclass
class Suite:
    name: str
    started: float = field(default_factory=time.monotonic)
    total: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    skipped: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    _next: float = PERIOD

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.started

    def add(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.skipped and isinstance(report.longrepr, tuple):
            self.skipped[report.longrepr[2].removeprefix("Skipped: ")] += 1
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" or not report.passed:
            self.outcomes[report.outcome] += 1

    def progress(self) -> str | None:
        """The next line of progress, if it is due."""
        if self.elapsed < self._next:
            return None
        self._next = self.elapsed + PERIOD
        failed = f", {self.outcomes['failed']} failed" if self.outcomes["failed"] else ""
        return f"{self.name}: {self.outcomes.total():,} of {self.total:,} tests in {self.elapsed:.0f} s{failed}"

    def keep(self, *lines: str) -> None:
        """Keep lines for the end of all suites."""
        KEPT.mkdir(parents=True, exist_ok=True)
        (KEPT / f"{self.name}.json").write_text(json.dumps({"at": time.time(), "lines": lines}))

    @property
    def failures(self) -> list[str]:
        """A line for each test that has failed."""
        return [f"{self.name}: FAILED {test}" for test in self.failed]

    def summary(self) -> list[str]:
        """The summary line, and one more for each test that failed and each reason of skipped tests."""
        counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.outcomes.items(), reverse=True))
        slowest = nlargest(3, self.seconds, key=lambda test: self.seconds[test])
        named = ", ".join(f"{test.rpartition('::')[2][:60]} {self.seconds[test]:.1f} s" for test in slowest)
        lines = [f"{self.name}: {counts or 'no tests'} in {self.elapsed:.0f} s; slowest: {named or 'none'}"]
        return (
            lines
            + self.failures
            + [f"{self.name}: NOT TESTED, {count:,} skipped: {why}" for why, count in self.skipped.items()]
        )


class Plugin:
    def __init__(self, suite: Suite, config: pytest.Config) -> None:
        self._suite = suite
        self._config = config
        self._watch: threading.Timer | None = None

    def _write(self, *lines: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        assert reporter is not None
        for line in lines:
            reporter.ensure_newline()
            reporter.write_line(line, flush=True)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._suite.total = self._suite.total or len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._suite.total = len(ids)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Keep the name of the test, which stays if the test hangs: its timeout ends the process."""
        self._keep_if_it_ends(nodeid)
        seconds = float(self._config.getini("timeout") or 0)
        if seconds and not self._config.getoption("numprocesses", None):  # a worker's hanging test fails like others
            self._watch = threading.Timer(ALMOST_HANGING * seconds, self._keep_if_it_ends, (nodeid, True))
            self._watch.daemon = True
            self._watch.start()

    def pytest_runtest_logfinish(self) -> None:
        if self._watch:
            self._watch.cancel()

    def _keep_if_it_ends(self, nodeid: str, is_late: bool = False) -> None:
        ended = f"{self._suite.name}: FAILED {nodeid}, in which the suite ended"
        self._suite.keep(*self._suite.failures, ended, *(waits() if is_late else ()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count, and write a line of progress if it is due."""
        self._suite.add(report)
        if line := self._suite.progress():
            self._write(line)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        if report.failed:
            return None
        return "" if report.passed and report.when != "call" else report.outcome, "", ""

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self) -> None:
        lines = self._suite.summary()
        self._suite.keep(*lines)
        self._write(*lines)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--suite", default="tests", help="name of the suite in lines of progress")


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin, but not in the workers of pytest-xdist."""
    if not hasattr(config, "workerinput"):
        suite = Suite(str(config.getoption("--suite")))
        config.pluginmanager.register(Plugin(suite, config), "penstock-progress")


def main() -> None:
    """Write the summary lines of all suites, in the order in which they ended."""
    kept = [json.loads(path.read_text()) for path in KEPT.glob("*.json")]
    lines = [line for suite in sorted(kept, key=lambda suite: suite["at"]) for line in suite["lines"]]
    print("", *lines, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
