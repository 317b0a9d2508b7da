"""The lines that `make test` writes at its end."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.io, pytest.mark.slow]

TESTS = """
import time
def test_fails(): raise AssertionError
def test_hangs(): time.sleep(600)
"""


def test_suite_that_ends_in_a_hanging_test_names_it(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)

    def output(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        ).stdout

    output("pytest", "-p", "tests.support.progress", "--suite", "live", "--timeout", "5", "--timeout-method", "thread")
    assert output("tests.support.progress").split("\n") == [
        "",
        "live: FAILED test_two.py::test_fails",
        "live: FAILED test_two.py::test_hangs, in which the suite ended",
        "",
    ]
