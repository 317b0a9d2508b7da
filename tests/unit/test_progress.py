"""The lines that `make test` writes at its end."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = [pytest.mark.io, pytest.mark.slow]

TESTS = """
import asyncio
def test_fails(): raise AssertionError
async def waits(): await asyncio.Event().wait()
def test_hangs(): asyncio.run(waits())
"""


def test_suite_that_ends_in_a_hanging_test_names_it(tmp_path: Path) -> None:
    (tmp_path / "test_two.py").write_text(TESTS)

    def output(*arguments: str) -> str:
        command = [sys.executable, "-m", *arguments]
        return subprocess.run(
            command, check=False, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
        ).stdout

    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 5\ntimeout_method = thread\n")
    output("pytest", "-p", "tests.support.progress", "--suite", "live")
    first, second, waits = filter(None, output("tests.support.progress").split("\n"))
    assert first == "live: FAILED test_two.py::test_fails"
    assert second == "live: FAILED test_two.py::test_hangs, in which the suite ended"
    assert re.match(r"Task-1 waits at .*/asyncio/locks.py:\d+$", waits)
