"""The readings of the outputs of the other oracles by SGLang's detectors of calls.

They run in a process of their own: see `sglang_reader`.  A detector that reads an output otherwise in pieces than as a
whole says nothing.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.oracles.case import Case, Reading
from tests.oracles.sources import SGLANG

DETECTORS = {
    "apertus": "apertus2509",
    "cohere_command4": "cohere_command4",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "deepseek_v4": "deepseekv4",
    "deepseek_v41": "deepseekv41",
    "dots": "dots",
    "gemma4": "gemma4",
    "gigachat3": "gigachat3",
    "glm45": "glm47",
    "glm47": "glm47",
    "hermes": "hermes",
    "hy_v3": "hunyuan",
    "inkling": "inkling",
    "k2_horizon": "k2_horizon",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "lfm2": "lfm2",
    "ling3": "ling3",
    "llama3_json": "llama3",
    "llama4_pythonic": "pythonic",
    "mimo": "mimo",
    "minicpm5": "minicpm5",
    "minimax_m2": "minimax-m2",
    "minimax_m3": "minimax-m3",
    "mistral": "mistral",
    "muse_glimmer": "muse",
    "poolside_v1": "poolside_v1",
    "pythonic": "pythonic",
    "qwen3_coder": "qwen3_coder",
    "step3": "step3",
    "step3p5": "step3p5",
}
"""The detector of each family."""

WITHOUT_CASES = {
    "beam": "the other oracles have no output of it",
    "gigachat35": "penstock has no parser of its markup",
    "glm": "another name of glm45",
    "glm45": "an older reader of the markup of glm47",
    "gpt-oss": "a gpt-oss has a parser of its own",
    "interns1": "its markup is that of internlm, of which vLLM's tests have the cases",
    "iquest_q1": "penstock has no parser of its markup",
    "nanbeige": "reads as qwen3_coder does",
    "qwen": "another name of qwen25",
    "qwen25": "its markup is that of hermes",
    "response_template": "needs the template of responses of a checkpoint",
    "spark25": "penstock reads the template of Spark 2.5 as glm45, by llama.cpp's cases",
    "trinity": "reads as qwen25 does, within thoughts, too",
}
"""The other detectors, each with the reason why it has no family here."""


def unlisted() -> Iterator[str]:
    """Yield a line for each detector that is in none of the tables, and for one that SGLang does not have."""
    listed = {*DETECTORS.values(), *WITHOUT_CASES}
    for name in sorted(_names() ^ listed):
        yield f"SGLang's detector {name}: {'neither has a family nor a reason' if name not in listed else 'is gone'}"


def _names() -> frozenset[str]:
    """Return the names of SGLang's detectors, which are the keys of one table."""
    source = (SGLANG.folder() / "sglang/srt/function_call/function_call_parser.py").read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "ToolCallParserEnum":
            assert isinstance(node.value, ast.Dict)
            return frozenset(str(ast.literal_eval(key)) for key in node.value.keys if key)
    raise LookupError("SGLang's table of detectors is not where it was")


def cases(others: Iterable[Case]) -> Iterator[Case]:
    """Yield the outputs of other oracles with calls, and what the detectors say of them."""
    chosen = [case for case in others if case.family in DETECTORS and any(each.calls for each in case.expected)]
    folder = str(SGLANG.folder())
    reader = Path(__file__).with_name("sglang_reader.py")
    jobs = "\n".join(json.dumps(_job(case)) for case in chosen)
    done = subprocess.run([sys.executable, reader, folder], input=jobs, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if len(lines) != len(chosen):
        raise RuntimeError(f"SGLang's detectors did not run:\n{done.stderr[-2000:]}")
    for case, line in zip(chosen, lines, strict=True):
        if expected := _agreed(case, json.loads(line)):
            name = f"{case.oracle}: {case.name}"
            yield replace(case, oracle="sglang", name=name, tools=case.declared(), expected=(expected,))


def _job(case: Case) -> dict[str, Any]:
    tools = [{"name": tool.name, "parameters": tool.parameters or {}} for tool in case.declared()]
    return {"parser": DETECTORS[case.family], "tools": tools, "text": case.text}


def _agreed(case: Case, readings: list[Any]) -> Reading | None:
    """Return the reading if it is the same in pieces; a detector says nothing of thoughts, nor of text beside them."""
    is_alone = case.chat is not None and not case.chat.parsers.thinking and "think" not in case.text
    found = [
        Reading(None, content if is_alone else None, tuple(map(tuple, calls)))
        for content, calls in (each for each in readings if isinstance(each, list))
    ]
    return found[0] if len(found) == 2 and found[0].equals(found[1]) else None
