"""Plug-in for tests of others: ``RECORDED_RESULTS`` names the file for their results, a line of JSON each."""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest

RESULTS = Path(os.environ["RECORDED_RESULTS"])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the result of a test."""
    report = yield
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _write(report)
    return report


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write that a file cannot be read as tests."""
    if report.failed:
        _write(report)


def _write(report: pytest.TestReport | pytest.CollectReport) -> None:
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
    with RESULTS.open("a") as file:
        file.write(json.dumps({"test": report.nodeid, "outcome": report.outcome, "why": why}) + "\n")
