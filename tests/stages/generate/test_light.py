from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_RUN = """
import runpy, sys
for name in ("torch", "vllm", "transformers", "tokenizers", "xgrammar"):
    sys.modules[name] = None  # from here on its import fails
runpy.run_module("tests.stages.generate.light", run_name="__main__")
"""


def test_harmony_over_http_needs_no_engine_here() -> None:
    """Whole responses of a Harmony model, with neither torch nor vLLM nor transformers."""
    folder = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, cwd=folder, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "Hello!"
