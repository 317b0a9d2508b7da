"""The README and the pages of its doors: their lines run, but for those that need a GPU, another server or an index."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

PAGES = ("README.md", "docs/OPERATE.md", "docs/BUILD.md", "docs/EXTEND.md", "docs/FAULTS.md")
BLOCKS = [
    block
    for page in PAGES
    for block in re.findall(r"^```(\w+)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
]
STAGE, CLIENT = [code for language, code in BLOCKS if language == "python"]
COMMANDS = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]
ELSEWHERE = re.compile(r"gpubox|gpt-oss-20b|pip install|-m venv|penstock demo$")
"""What only runs elsewhere; `test_demo.py` runs the demo, and `test_wheel.py` installations."""


@pytest.mark.io
@pytest.mark.slow
def test_lines_run_as_they_stand(tmp_path: Path) -> None:
    port = free_port()
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    (tmp_path / "shout.py").write_text(STAGE)
    (tmp_path / "ask.py").write_text(CLIENT.replace("127.0.0.1:8000", f"127.0.0.1:{port}"))
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "PENSTOCK_PORT": str(port), "PENSTOCK_STORE": str(tmp_path / "store")}
    served, *others = [line for line in COMMANDS if not ELSEWHERE.search(line)]
    command = ["bash", "-c", f"cd {tmp_path} && exec {served}"]
    with running_process(command, f"http://127.0.0.1:{port}/ready", tmp_path / "log", environment):
        assert typed("python ask.py", tmp_path, environment) == "HELLO! HOW CAN I HELP YOU TODAY?"
    assert list((tmp_path / "recordings").glob("resp_*"))
    assert len(others) >= 5
    for line in others:
        assert typed(line, tmp_path, environment)
    assert (tmp_path / "weather.html").stat().st_size > 10_000


def typed(line: str, folder: Path, environment: dict[str, str]) -> str:
    """Run a line in a shell, which has to succeed, and return what it prints."""
    command = ["bash", "-euc", line]
    ran = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    return ran.stdout
