"""`docs/START.md`: its commands and programs run in their order, as a reader types them, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

PAGE = (ROOT / "docs/START.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
[STAGE] = re.findall(r"^```python\n(# shout\.py\n.*?)^```$", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
ADDRESS = "127.0.0.1:8000"
SERVES = "penstock serve "


@pytest.mark.io
@pytest.mark.slow
def test_page_runs_as_it_stands(tmp_path: Path) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    (tmp_path / "venv").symlink_to(sys.prefix)
    (tmp_path / "shout.py").write_text(STAGE)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {"PENSTOCK_PORT": str(port), "PENSTOCK_STORE": str(tmp_path / "store"), "COLUMNS": "120"}
    printed = ""
    with ExitStack() as server:
        for language, code in BLOCKS:
            text = code.replace(ADDRESS, f"127.0.0.1:{port}")
            if language == "python":
                (tmp_path / text.split(maxsplit=2)[1]).write_text(text)
            elif language == "text":
                assert printed == code
            elif code.startswith(SERVES):
                server.close()
                command = ["bash", "-c", f"cd {tmp_path} && source venv/bin/activate && exec {code}"]
                server.enter_context(running_process(command, f"{url}/ready", tmp_path / "log", environment))
            else:
                if code.startswith("ls "):
                    server.close()  # which writes the ends of its recordings
                printed = typed(f"source venv/bin/activate\n{text}", tmp_path, environment)


def typed(lines: str, folder: Path, environment: dict[str, str]) -> str:
    """Run lines in a shell, and return what they print; each has to succeed."""
    ran = subprocess.run(
        ["bash", "-euc", lines],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
