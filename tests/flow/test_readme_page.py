"""The README: its lines run as they stand, but for those that need a GPU, a `vllm serve` or an installation."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
COMMANDS = [line for language, code in BLOCKS if language == "sh" for line in code.splitlines()]
ELSEWHERE = re.compile(r"gpubox|gpt-oss-20b|pip install|penstock demo$")
"""What only runs elsewhere; `test_demo.py` runs the demo, and `test_wheel.py` installations."""


@pytest.mark.io
@pytest.mark.slow
def test_lines_run_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "fixtures").symlink_to(ROOT / "fixtures")
    (tmp_path / "shout.py").write_text(next(code for language, code in BLOCKS if language == "python"))
    port = free_port()
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "PENSTOCK_PORT": str(port), "PENSTOCK_STORE": str(tmp_path / "store")}
    served, *others = [line for line in COMMANDS if not ELSEWHERE.search(line)]
    command = ["bash", "-c", f"cd {tmp_path} && exec {served}"]
    with running_process(command, f"http://127.0.0.1:{port}/ready", tmp_path / "log", environment):
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as client:
            answer = client.responses.create(model="tiny-gpt-oss", input="Say hello.")
        assert answer.output_text == "HELLO! HOW CAN I HELP YOU TODAY?"
    assert (tmp_path / "recordings" / answer.id).is_dir()
    assert len(others) >= 3
    for line in others:
        subprocess.run(["bash", "-euc", line], cwd=tmp_path, env=os.environ | environment, timeout=PATIENCE, check=True)
    assert (tmp_path / "weather.html").stat().st_size > 10_000
