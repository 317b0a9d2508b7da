"""Type checkers find wrong junctions: they refuse the marked lines of ``rejected.py``, and accept ``accepted.py``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def wrong_lines() -> set[int]:
    lines = (HERE / "rejected.py").read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith("# error")}


def output_of(*command: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout


def test_mypy_rejects_wrong_junctions() -> None:
    output = output_of(
        "mypy", "--config-file", "pyproject.toml", "tests/typing/rejected.py", "tests/typing/accepted.py"
    )
    found = re.findall(r"^tests/typing/(\w+)\.py:(\d+): error", output, re.MULTILINE)
    assert {(file, int(line)) for file, line in found} == {("rejected", line) for line in wrong_lines()}, output


def test_pyright_rejects_wrong_junctions() -> None:
    report = json.loads(output_of("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(HERE)))
    assert report["summary"]["filesAnalyzed"] == 2
    errors = [found for found in report["generalDiagnostics"] if found["severity"] == "error"]
    found = {(Path(error["file"]).stem, error["range"]["start"]["line"] + 1) for error in errors}
    assert found == {("rejected", line) for line in wrong_lines()}, errors
