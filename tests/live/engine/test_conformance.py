from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.paths import TINY_QWEN
from tests.support.serve_command import Command, running


def failures(url: str) -> dict[str, str]:
    program = Path(sys.executable).with_name("penstock")
    found = subprocess.run([program, "conformance", f"{url}/v1", "--json"], capture_output=True, check=False)
    report = json.loads(found.stdout)
    assert report["counts"]["pass"] > 120, found.stderr
    return {check["name"]: check["reason"] for check in report["checks"] if check["verdict"] == "fail"}


def test_tiny_gpt_oss_conforms(server: Command) -> None:
    assert failures(server.url) == {}


def test_tiny_qwen_conforms(tmp_path: Path) -> None:
    with running(
        tmp_path / "qwen.sqlite3",
        "--served-model-name=tiny-qwen",
        model=str(TINY_QWEN),
        VLLM_ENABLE_V1_MULTIPROCESSING="1",
    ) as qwen:
        assert failures(qwen.url) == {}
