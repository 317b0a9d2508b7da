"""The outputs in vLLM's own tests of its parsers, and what the parsers make of them.

The tests run in a process of their own, under the plug-in `vllm_recorder`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.stages.models.chat.parsers import UnknownParser
from tests.oracles.case import Case, Names, Reading, model_of, numbered, stand_in, tool_of
from tests.oracles.recorded import recorded, run_recorded
from tests.oracles.sources import PARSER_FOLDERS, VLLM

UNREAD = {
    ("hf", "hf"): "needs a template of responses in the tokenizer",
    ("openai_gptoss", "openai"): "a gpt-oss has a parser of its own",
}
"""Parsers that do not start here."""

_CUT = re.compile(r"cut_?(off|point)|truncated", re.IGNORECASE)
"""In the name of a test, or of its class: its outputs are cut, as by a limit of tokens."""


def cases() -> Iterator[Case]:
    """Yield each distinct output; raise `UnknownParser` for a parser that does not start and is not in `UNREAD`."""
    found = list(_distinct(_records()))
    names = numbered(_name(record) for record, _ in found)
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
            tools=tuple(map(tool_of, record["tools"])),
            variables=record["variables"],
            prompt=record["prompt"] or "",
            reason="length" if _is_cut(record) else "stop",
        )


def _records() -> list[dict[str, Any]]:
    """Run vLLM's tests, once for a release, and return what each has shown."""
    kept = recorded(VLLM, "vllm_recorder")
    if kept is None:
        with TemporaryDirectory() as folder:
            _run(VLLM.folder(), Path(folder))
        kept = recorded(VLLM, "vllm_recorder")
        assert kept is not None
    return kept


def _run(sdist: Path, folder: Path) -> None:
    (folder / "tests").symlink_to(sdist / "tests")  # away from the code of vLLM beside them
    words = folder / "tokenizer.json"
    stand_in().backend_tokenizer.save(str(words))
    environment = {"PARSER_TOKENIZER": str(words), "HF_HUB_OFFLINE": "1"}
    tests = (f"tests/{name}" for name in PARSER_FOLDERS)
    run_recorded(VLLM, "vllm_recorder", folder, environment, "-o", "asyncio_mode=auto", *tests)


def _distinct(records: Iterable[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], tuple[Reading, ...]]]:
    """Yield outputs with their readings.

    One that some test ends, and another leaves open, is ended: vLLM may still hold back a part of the open one.
    """
    same: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        if _is_comparable(record):
            key = [record[name] for name in ("names", "tools", "variables", "prompt", "text")]
            same.setdefault(json.dumps(key, sort_keys=True), []).append(record)
    for each in same.values():
        meant = [record for record in each if not _is_cut(record)] or each
        yield meant[0] | {"test": each[0]["test"]}, tuple(dict.fromkeys(map(_expected, meant)))


def _is_cut(record: dict[str, Any]) -> bool:
    """Return True if the test leaves the output open, or says that it is cut."""
    return record["cut"] or _CUT.search(_name(record)) is not None


def _name(record: dict[str, Any]) -> str:
    name: str = record["test"].partition("::")[2].partition("[")[0]
    return name


def _is_comparable(record: dict[str, Any]) -> bool:
    """Return False for a parser of a test's own, a single delta of a call, and calls that vLLM's test forbids."""
    is_known = record["text"] is not None and any(record["names"])
    is_whole = all(name for name, _ in record["calls"])
    is_free = record["choice"] in ("auto", "None") or record["choice"].startswith("<MagicMock")
    leaves_calls = record["choice"] == "none" and all(record["names"]) and not record["calls"]
    return is_known and is_whole and (is_free or (record["choice"] == "none" and not leaves_calls))


def _expected(record: dict[str, Any]) -> Reading:
    calls = tuple((name, arguments or "") for name, arguments in record["calls"])
    return Reading(record["reasoning"], record["content"], calls)
