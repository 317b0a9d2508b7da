"""The chat templates that other servers ship, and the parsers that penstock selects for them.

A difference from ``templates.toml`` fails, as does a template that is not there, and one that is there alone.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, guess
from tests.oracles.sources import LLAMA_CPP, SGLANG, VLLM, Release

DATA = Path(__file__).with_name("templates.toml")

_FOLDERS: Mapping[str, tuple[Release, str]] = {
    "vllm": (VLLM, "examples/*.jinja"),
    "vllm, built in": (VLLM, "vllm/transformers_utils/chat_templates/*.jinja"),
    "llama.cpp": (LLAMA_CPP, "vendor/llama.cpp/models/templates/*.jinja"),
    "sglang": (SGLANG, "sglang/srt/parser/*_chat_template.py"),
}
"""The places of the templates: SGLang's wheel has one alone, as Python code."""

_WITH_TOOLS = re.compile(r"\btool(?:s|_calls)\b")
_WITH_THOUGHTS = re.compile(r"reasoning_content|thinking|<think")


@dataclass(frozen=True)
class Expected:
    """The parsers that a model of this ``type`` needs with a template, and ``why`` one is missing."""

    type: str = ""
    reasoning: str | None = None
    calls: str | None = None
    why: str = ""


@cache
def expected() -> Mapping[tuple[str, str], Expected]:
    """Return what is known of each template, by the server that ships it and the name."""
    found = tomllib.loads(DATA.read_text())
    return {(server, name): Expected(**entry) for server, each in found.items() for name, entry in each.items()}


def shipped() -> Mapping[tuple[str, str], str]:
    """Return the text of each template that is shipped."""
    return {
        (server, path.stem): path.read_text()
        for server, (release, pattern) in _FOLDERS.items()
        for path in sorted(release.folder().glob(pattern))
    }


def unexplained() -> Iterator[str]:
    """Yield a line for each template that is not as ``templates.toml`` says."""
    texts = shipped()
    for key in sorted(texts.keys() ^ expected().keys()):
        yield f"{' '.join(key)}: {'not in' if key in texts else 'only in'} {DATA.name}"
    for key in sorted(texts.keys() & expected().keys()):
        for problem in _problems(texts[key], expected()[key]):
            yield f"{' '.join(key)}: {problem}"


def _problems(text: str, known: Expected) -> Iterator[str]:
    needs = (("reasoning", REASONING, known.reasoning, _WITH_THOUGHTS), ("calls", TOOL_CALLS, known.calls, _WITH_TOOLS))
    for kind, signs, needed, shows in needs:
        found = guess(signs, [text], known.type)
        if found.parser != needed:
            yield f"the parser of {kind} is {found.parser}, not {needed}"
        elif needed is None and shows.search(text) and not known.why:
            yield f"there is no parser of {kind}, for no reason"
        elif needed and found.doubt:
            yield f"the parser of {kind} is {needed}, but {found.doubt}"
