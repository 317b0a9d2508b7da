"""The program ``llm`` over Chat Completions: a text, a stream, a tool, a schema, an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE

HELLO = "Hello! How can I help you today?"
MODEL = "{{model_id: {name}, model_name: {name}, api_base: {url}, supports_tools: true, supports_schema: true}}"
TOOL = """
def get_weather(city: str) -> str:
    "Get the weather of a city."
    return '{"temperature":18,"unit":"C"}'
"""
PERSON = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Grace"]}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.fixture
def llm(url: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The program, with two models at the server under test."""
    models = [MODEL.format(name=name, url=url) for name in ("tiny-gpt-oss", "gpt-9")]
    (tmp_path / "extra-openai-models.yaml").write_text("".join(f"- {model}\n" for model in models))
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "none"}

    def run(*arguments: str, model: str = "tiny-gpt-oss") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "llm", "--model", model, "--option", "temperature", "0", *arguments]
        return subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.mark.parametrize("streams", [["--no-stream"], []])
def test_llm_prints_a_text(llm: Callable[..., subprocess.CompletedProcess[str]], streams: list[str]) -> None:
    assert llm(*streams, "Say hello.").stdout.strip() == HELLO


def test_llm_continues_a_conversation(llm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    llm("Remember the number seven.")
    assert llm("--continue", "What did I say before?").stdout.strip() == "You asked me to remember the number seven."


def test_llm_runs_a_function(llm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert llm("--functions", TOOL, "What is the weather in Paris?").stdout.strip() == "It is 18 °C in Paris right now."


def test_llm_prints_a_structured_answer(llm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    assert json.loads(llm("--schema", json.dumps(PERSON), "Say hello.").stdout)["name"] in {"Ada", "Grace"}


def test_llm_prints_an_error(llm: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    refused = llm("Say hello.", model="gpt-9")
    assert (refused.returncode, "'gpt-9'" in refused.stderr) == (1, True)
