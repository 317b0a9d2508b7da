"""The outputs in vLLM's own tests of its parsers, and what the parsers make of them.

The tests run in a process of their own, under the plug-in `vllm_recorder`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.pipeline.protocol.tools import FunctionTool
from penstock.stages.models.chat.parsers import UnknownParser
from tests.oracles.case import Case, Names, Reading, model_of, numbered, stand_in
from tests.oracles.sources import CACHE, PARSER_FOLDERS, VLLM

UNREAD = {
    ("hf", "hf"): "needs a template of responses in the tokenizer",
    ("openai_gptoss", "openai"): "a gpt-oss has a parser of its own",
}
"""Parsers that do not start here."""


def cases() -> Iterator[Case]:
    """Yield each distinct output; raise `UnknownParser` for a parser that does not start and is not in `UNREAD`."""
    found = list(_distinct(_records()))
    names = numbered(record["test"].partition("::")[2].partition("[")[0] for record, _ in found)
    for (record, expected), name in zip(found, names, strict=True):
        parsers: Names = tuple(record["names"])
        try:
            chat = model_of(parsers)
        except UnknownParser:
            if parsers in UNREAD:
                continue
            raise
        yield Case(
            oracle="vllm",
            family=parsers[1] or parsers[0] or "",
            name=f"{'/'.join(each or '-' for each in parsers)} {name}",
            text=record["text"],
            expected=expected,
            chat=chat,
            tools=tuple(map(_tool, record["tools"])),
            variables=record["variables"],
            prompt=record["prompt"] or "",
        )


def _records() -> list[dict[str, Any]]:
    """Run vLLM's tests, once for a release, and return what each has shown."""
    kept = VLLM.result(Path(__file__).with_name("vllm_recorder.py"))
    if not kept.exists():
        with TemporaryDirectory() as folder:
            _run(VLLM.folder(), Path(folder)).rename(kept)
    return [json.loads(line) for line in kept.read_text().splitlines()]


def _run(sdist: Path, folder: Path) -> Path:
    (folder / "tests").symlink_to(sdist / "tests")  # away from the code of vLLM beside them
    records, words = CACHE / "vllm.part", folder / "tokenizer.json"
    records.unlink(missing_ok=True)
    stand_in().backend_tokenizer.save(str(words))
    environment = {
        "PARSER_CASES": str(records),
        "PARSER_TOKENIZER": str(words),
        "PYTHONPATH": str(Path(__file__).parent),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_recorder", "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", ".", "-o", "asyncio_mode=auto", "--tb=no", "--continue-on-collection-errors"]
    run = [*command, *(f"tests/{name}" for name in PARSER_FOLDERS)]
    done = subprocess.run(run, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False)
    if not records.exists():
        raise RuntimeError(f"vLLM's tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return records


def _distinct(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[Reading, ...]]]:
    same: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if _is_comparable(record):
            key = [record[name] for name in ("names", "tools", "variables", "prompt", "text")]
            same.setdefault(json.dumps(key, sort_keys=True), []).append(record)
    for first, *others in same.values():
        yield first, tuple(dict.fromkeys(map(_expected, (first, *others))))


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


def _expected(record: dict[str, Any]) -> Reading:
    calls = tuple((name, arguments or "") for name, arguments in record["calls"])
    return Reading(record["reasoning"], record["content"], calls)
