"""`vllm bench serve`, whose requests are those of Chat Completions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes import PATIENCE
from tests.support.serve_command import Command
from tests.support.tiny_engine import CHECKPOINT

REQUESTS = 8


def test_vllm_bench_serve_completes_all_chats(server: Command, tmp_path: Path) -> None:
    """It asks for `ignore_eos` unless its own options say otherwise: penstock refuses that for chats."""
    program = Path(sys.executable).with_name("vllm")
    command = [str(program), "bench", "serve", "--backend=openai-chat", "--endpoint=/v1/chat/completions"]
    command += [f"--base-url={server.url}", "--model=tiny-gpt-oss", f"--tokenizer={CHECKPOINT}"]
    command += ["--dataset-name=random", "--random-input-len=20", "--random-output-len=8"]
    command += [f"--num-prompts={REQUESTS}", '--extra-body={"ignore_eos": false}']
    command += ["--save-result", f"--result-dir={tmp_path}", "--result-filename=result.json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert 0 < result["total_output_tokens"] <= REQUESTS * 8
