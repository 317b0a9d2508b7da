"""A program that reads outputs with SGLang's detectors of calls, each whole and in pieces.

Its argument is the folder of SGLang's wheel, with the detectors alone: what they import of the server is replaced.
Jobs come in as lines of JSON, and readings go out so.
"""

from __future__ import annotations

import json
import sys
from enum import IntEnum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

from pydantic import BaseModel

PIECE = 4
"""Characters of a piece."""


class Function(BaseModel):
    name: str
    description: str | None = None
    parameters: object | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    key_order: list[str] = []


class Tool(BaseModel):
    type: str = "function"
    function: Function
    defer_loading: bool | None = None


class ToolStrictLevel(IntEnum):
    OFF = 0
    FUNCTION = 1
    PARAMETER = 2


def _settings() -> Any:
    values = {"SGLANG_FORWARD_UNKNOWN_TOOLS": True, "SGLANG_TOOL_STRICT_LEVEL": ToolStrictLevel.OFF}
    return SimpleNamespace(**{name: SimpleNamespace(get=lambda value=value: value) for name, value in values.items()})


def _replace(name: str, **members: Any) -> None:
    sys.modules[name] = module = ModuleType(name)
    vars(module).update(members)


def install(folder: str) -> None:
    """Make the detectors importable."""
    sys.path.insert(0, folder)
    tags = ("LegacyStructuralTagResponseFormat", "StructuralTagResponseFormat", "StructuresResponseFormat")
    formats = ("ToolChoice", "ToolCallConstraint", *tags)
    for package in ("sglang.srt.entrypoints", "sglang.srt.entrypoints.openai"):
        _replace(package)
    _replace("sglang.srt.entrypoints.openai.protocol", Tool=Tool, Function=Function, **dict.fromkeys(formats, object))
    _replace("sglang.srt.environ", envs=_settings(), ToolStrictLevel=ToolStrictLevel)
    _replace(
        "orjson",
        loads=json.loads,
        dumps=lambda value, *_, **__: json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(),
        JSONDecodeError=json.JSONDecodeError,
    )


def readings(name: str, tools: list[Tool], text: str) -> list[Any]:
    """Return the text and the calls of an output, read as a whole and in pieces."""
    parser_of = import_module("sglang.srt.function_call.function_call_parser").FunctionCallParser
    content, calls = parser_of(tools, name).parse_non_stream(text)
    whole = [content, [[call.name, call.parameters] for call in calls]]
    parser, said, made = parser_of(tools, name), "", dict[int, list[str]]()
    steps = [parser.parse_stream_chunk(text[at : at + PIECE]) for at in range(0, len(text), PIECE)]
    for words, items in (*steps, parser.parse_stream_end()):
        said += words
        for item in items:
            call = made.setdefault(item.tool_index, ["", ""])
            call[0] = call[0] or item.name or ""
            call[1] += item.parameters or ""
    return [whole, [said, [made[at] for at in sorted(made)]]]


def main() -> None:
    install(sys.argv[1])
    for line in sys.stdin:
        job = json.loads(line)
        tools = [Tool(function=Function(**tool)) for tool in job["tools"]]
        try:
            found = readings(job["parser"], tools, job["text"])
        except Exception as error:  # noqa: BLE001 - a detector that fails says nothing
            found = [repr(error)]
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
