"""Outputs of chat models from vLLM's own tests: what vLLM's parsers make of them, and what penstock makes of them.

`recorded_cases` runs vLLM's tests in a process of their own, under the plug-in `tests.thorough.vllm_recorder`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from penstock.pipeline.frames import ChatTurn, FinishReason, GenerationFinished
from penstock.pipeline.protocol.tools import FunctionTool, Toolset
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import VllmParsers
from penstock.stages.models.chat.vocabulary import Vocabulary
from tests.support.chat_families import FAMILIES, EndingTemplate, tokenizer_with
from tests.support.parsed_output import parse_chat_frames, parsed_items, token_chunks, turn_started

FOLDERS = ("tool_parsers", "reasoning", "parser")
"""Folders of vLLM's code, and of its tests, that are about parsers."""

_MARK = re.compile(r"""["'](<[^"'<>= {}\\]{1,40}>|\[/?[A-Z_]{3,}\]|<[|｜][^"'<>{}\\]{1,40}[|｜]>|<\|"\|>)["']""")
"""A string in vLLM's code that looks like a mark."""

Read: TypeAlias = tuple[str, str, tuple[tuple[str, str], ...]]
"""Thoughts and messages without white space, and calls: their names and arguments."""


@dataclass(frozen=True)
class Case:
    """An output, and what vLLM's parsers made of it, in pieces or as a whole, in the tests that passed."""

    parsers: tuple[str | None, str | None]
    tools: tuple[FunctionTool, ...]
    variables: dict[str, Any]
    prompt: str
    text: str
    expected: tuple[Read, ...]
    test: str

    @property
    def names(self) -> str:
        """The names of its parsers, as reasoning/calls."""
        return "/".join(name or "-" for name in self.parsers)

    def agrees(self) -> bool:
        """Return True if penstock reads the output as vLLM does.

        A test may end in the middle of an output, and may call functions that its request does not declare.
        """
        called = {name for _, _, calls in self.expected for name, _ in calls} - {tool.name for tool in self.tools}
        declared = (*self.tools, *(FunctionTool(name) for name in sorted(called)))
        reasons: tuple[FinishReason, ...] = ("stop", "length")
        return any(
            self.read(reason, tools) in self.expected
            for tools in ([self.tools, declared] if called else [self.tools])
            for reason in reasons
        )

    def read(self, reason: FinishReason = "stop", tools: Sequence[FunctionTool] | None = None, size: int = 1) -> Read:
        """Return what penstock makes of the output, in chunks of ``size`` tokens."""
        model = model_of(self.parsers)
        started = turn_started(
            tools=Toolset(tuple(self.tools if tools is None else tools)),
            prompt=tuple(model.vocabulary.encode(self.prompt)),
            chat=ChatTurn(self.variables),
        )
        chunks = token_chunks(model.vocabulary.encode(self.text), size)
        items = parsed_items(parse_chat_frames(model, [started, *chunks, GenerationFinished(reason, 0, 0.0)]))
        is_call = [item.kind not in ("Message", "Reasoning") or bool(item.repairs) for item in items]
        calls = [(item.name, _arguments(item.text)) for item, called in zip(items, is_call, strict=True) if called]
        texts = {
            kind: "".join(
                item.text for item, called in zip(items, is_call, strict=True) if item.kind == kind and not called
            )
            for kind in ("Reasoning", "Message")
        }
        return _closed_up(texts["Reasoning"]), _closed_up(texts["Message"]), tuple(calls)


def recorded_cases(sdist: Path, folder: Path) -> list[Case]:
    """Run the tests of vLLM's ``sdist``, and return each distinct output; ``folder`` is for the files of this run."""
    (folder / "tests").symlink_to(sdist / "tests")  # away from the code of vLLM beside them
    cases, words = folder / "cases.jsonl", folder / "tokenizer.json"
    stand_in().backend_tokenizer.save(str(words))
    environment = {
        "PARSER_CASES": str(cases),
        "PARSER_TOKENIZER": str(words),
        "PYTHONPATH": str(Path(__file__).parent),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_recorder", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", ".", "-o", "asyncio_mode=auto", "--tb=no", "--continue-on-collection-errors"]
    run = [*command, *(f"tests/{name}" for name in FOLDERS)]
    done = subprocess.run(run, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)
    if not cases.exists():
        raise RuntimeError(f"vLLM's tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return list(_distinct(json.loads(line) for line in cases.read_text().splitlines()))


def _distinct(records: Iterator[dict[str, Any]]) -> Iterator[Case]:
    same: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if _is_comparable(record):
            key = [record[name] for name in ("names", "tools", "variables", "prompt", "text")]
            same.setdefault(json.dumps(key, sort_keys=True), []).append(record)
    for first, *others in same.values():
        yield Case(
            parsers=tuple(first["names"]),
            tools=tuple(map(_tool, first["tools"])),
            variables=first["variables"],
            prompt=first["prompt"] or "",
            text=first["text"],
            expected=tuple(dict.fromkeys(_expected(record) for record in (first, *others))),
            test=first["test"].partition("::")[2].partition("[")[0],
        )


def _is_comparable(record: dict[str, Any]) -> bool:
    """Return False for a parser of a test's own, a single delta of a call, and calls that vLLM's test forbids."""
    is_known = record["text"] is not None and any(record["names"])
    is_whole = all(name for name, _ in record["calls"])
    is_free = record["choice"] in ("auto", "None") or record["choice"].startswith("<MagicMock")
    leaves_calls = record["choice"] == "none" and all(record["names"]) and not record["calls"]
    return is_known and is_whole and (is_free or (record["choice"] == "none" and not leaves_calls))


def _tool(described: dict[str, Any]) -> FunctionTool:
    function = described.get("function", described)
    return FunctionTool(function["name"], parameters=function.get("parameters") or {})


def _expected(record: dict[str, Any]) -> Read:
    calls = tuple((name, _arguments(arguments or "{}")) for name, arguments in record["calls"])
    return _closed_up(record["reasoning"]), _closed_up(record["content"]), calls


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True)
    except ValueError:
        return text


def _closed_up(text: str) -> str:
    return "".join(text.split())


@cache
def stand_in() -> Any:
    """A tokenizer with the marks of all families, in place of those of the hub."""
    code = Path(str(find_spec("vllm").origin)).parent  # type: ignore[union-attr]  # it is installed
    files = [path for name in FOLDERS for path in sorted((code / name).rglob("*.py"))]
    marks = {mark for path in files for mark in _MARK.findall(path.read_text())}
    marks |= {mark for family in FAMILIES.values() for mark in (*family.ends, *family.marks)}
    return tokenizer_with(["</s>", *sorted(marks - {"</s>"})])


@cache
def model_of(parsers: tuple[str | None, str | None]) -> ChatModel:
    """A model with these parsers; raise `UnknownParser` if they do not fit the tokenizer."""
    vocabulary = Vocabulary(stand_in())
    ends = {end for family in FAMILIES.values() for end in family.ends}
    stops = tuple(vocabulary.marks[end] for end in sorted(ends))
    return ChatModel(vocabulary, EndingTemplate(""), VllmParsers(stand_in(), *parsers), stops, {})
