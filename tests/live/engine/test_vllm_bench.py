"""`vllm bench serve`, whose requests are those of Chat Completions."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.processes import PATIENCE
from tests.support.serve_command import Command
from tests.support.tiny_engine import CHECKPOINT

REQUESTS, LENGTH = 8, 12


def test_vllm_bench_serve_completes_all_chats(server: Command, tmp_path: Path) -> None:
    """It asks for `ignore_eos`, so that each answer has its length."""
    program = Path(sys.executable).with_name("vllm")
    command = [str(program), "bench", "serve", "--backend=openai-chat", "--endpoint=/v1/chat/completions"]
    command += [f"--base-url={server.url}", "--model=tiny-gpt-oss", f"--tokenizer={CHECKPOINT}"]
    command += ["--dataset-name=random", "--random-input-len=20", f"--random-output-len={LENGTH}"]
    command += [f"--num-prompts={REQUESTS}", "--save-result", f"--result-dir={tmp_path}"]
    command += ["--result-filename=result.json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ran.returncode == 0, ran.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * LENGTH
