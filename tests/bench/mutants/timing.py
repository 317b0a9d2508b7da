"""A pytest plugin that writes the duration of each passed test to the file named by MUTANTS_TIMES."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

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
