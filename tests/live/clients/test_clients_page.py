"""The snippets of `docs/CLIENTS.md`, as a user would paste them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE

PAGE = (ROOT / "docs" / "CLIENTS.md").read_text()
HELLO = "Hello! How can I help you today?\n"


def section(name: str, url: str) -> str:
    """Return the section about a client, with the URL and the model of the server under test."""
    text = PAGE.partition(f"\n### {name}\n")[2].partition("\n#")[0]
    assert text
    return text.replace("http://127.0.0.1:8000/v1", url).replace("openai/gpt-oss-20b", "tiny-gpt-oss")


def output(command: Sequence[str], **variables: str) -> str:
    run = subprocess.run(
        [sys.executable, *command],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_snippet_prints_an_answer(url: str) -> None:
    [snippet] = re.findall(r"```python\n(.*?)```", section("LiteLLM", url), re.DOTALL)
    assert output(["-c", snippet]) == HELLO


def test_llm_finds_the_model_in_its_file(url: str, tmp_path: Path) -> None:
    text = section("llm", url)
    [models] = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    [command] = re.findall(r"for `(llm .*?)`", text)
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    variables = {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}
    assert output(["-m", *shlex.split(command)], **variables) == HELLO
