from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.io

_RUN = """
import runpy, sys

for name in ("torch", "vllm", "transformers", "tokenizers", "xgrammar"):
    sys.modules[name] = None  # from here on its import fails
runpy.run_module("tests.support.fake_vllm", run_name="__main__")
"""


def test_harmony_over_http_needs_no_local_engine() -> None:
    done = subprocess.run([sys.executable, "-c", _RUN], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == "Hello!"
