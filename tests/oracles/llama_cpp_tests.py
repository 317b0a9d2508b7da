"""The outputs in llama.cpp's test of chat formats, ``test-chat.cpp``, and what it expects of them.

The cases are C++.  So the parts of the file that state them are compiled against ``llama_cpp_cases.h``, whose tester
prints each case instead of testing it.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.pipeline.protocol.tools import FunctionTool
from penstock.stages.models.chat.families import REASONING, TOOL_CALLS, guess
from penstock.stages.models.chat.model import ChatModel
from penstock.stages.models.chat.parsers import UnknownParser
from tests.oracles.case import Case, Names, Reading, model_of
from tests.oracles.sources import LLAMA_CPP
from tests.oracles.templates import expected

FAMILIES = {
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "CohereForAI-c4ai-command-r-plus-tool_use": "command_r_plus",
    "NVIDIA-Nemotron-Nano-v2": "nemotron_v2",
    "fireworks-ai-llama-3-firefunction-v2": "firefunction",
    "google-gemma-2-2b-it": "gemma2",
    "meetkai-functionary-medium-v3.2": "functionary",
    "openai-gpt-oss-120b": "openai",
    "unsloth-Apriel-1.5": "apriel",
}
"""The family of calls of each template whose parser has another name."""

_HERE = "vendor/llama.cpp"
_MARK = re.compile(r"</?[|｜][^<>{}'\" ]{1,40}[|｜]>")
_ENDS = frozenset({"<|im_end|>", "<|eot|>", "<|role_end|>", "<|end|>", "<|END_OF_TURN_TOKEN|>"})
_NEWER_MARKS = frozenset({"[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"})
"""Marks that older models of Mistral do not have: a parser reads their output by that."""
_THOUGHT_MARKS = ("<think>", "THINK", "<|channel", "<mm:think>", "<|think", "<seed:think>")


def cases() -> Iterator[Case]:
    """Yield the cases that a server can meet."""
    for record in _records():
        is_continued, shows_thoughts = record["continuation"], not record["reasoning_format"]
        has_marks = any(mark in record["expected"]["content"] for mark in _THOUGHT_MARKS)
        if not is_continued and not (shows_thoughts and has_marks):
            yield _case(record)


def _case(record: dict[str, Any]) -> Case:
    template = Path(record["template"]).stem
    known = expected()["llama.cpp", template]
    source, chat = _model(template, known.type)
    tools = tuple(FunctionTool(tool["name"], tool["description"], _schema(tool)) for tool in record["tools"])
    variables: dict[str, Any] = {"enable_thinking": record["thinking"], "thinking": record["thinking"]}
    prompt = default = ""
    if chat is not None:
        prompt, default = (_prompt(chat, source, record, each) for each in (variables, {}))
    wanted = record["expected"]
    calls = tuple((name, arguments if _is_json(arguments) else None) for name, arguments in wanted["calls"])
    return Case(
        oracle="llama.cpp",
        family=FAMILIES.get(template) or known.calls or "",
        name=f"{template} line {record['line']}",
        text=record["text"],
        expected=(Reading(wanted["reasoning"], wanted["content"], calls),),
        chat=chat,
        tools=tools,
        variables=variables,
        prompt=prompt,
        reason="length" if record["cut"] else "stop",
        renders_by_default=prompt == default,
    )


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(tool["parameters"] or "{}")
    return schema


def _is_json(text: str) -> bool:
    try:
        json.loads(text or "{}")
    except ValueError:
        return False
    return True


@cache
def _model(template: str, model_type: str) -> tuple[str, ChatModel | None]:
    """Return the template, and a model whose parsers penstock chooses by the template; None for a gpt-oss."""
    source = (LLAMA_CPP.folder() / _HERE / "models" / "templates" / f"{template}.jinja").read_text()
    if model_type == "gpt_oss":
        return source, None
    found: Names = (guess(REASONING, [source], model_type).parser, guess(TOOL_CALLS, [source], model_type).parser)
    marks = frozenset(_MARK.findall(source))
    without = frozenset(mark for mark in _NEWER_MARKS if mark not in source)
    for parsers in (found, (None, found[1]), (found[0], None)):
        try:
            return source, model_of(parsers, marks & _ENDS, marks, without)
        except UnknownParser:
            continue
    return source, model_of((None, None), marks & _ENDS, marks, without)


def _prompt(chat: ChatModel, source: str, record: dict[str, Any], variables: dict[str, Any]) -> str:
    messages = record["messages"] or [{"role": "user", "content": "Hey there!"}]
    functions = [{"type": "function", "function": {**tool, "parameters": _schema(tool)}} for tool in record["tools"]]
    render = partial(
        chat.vocabulary.tokenizer.apply_chat_template,
        [_message(message) for message in messages],
        chat_template=source,
        add_generation_prompt=True,
        tokenize=False,
        bos_token="",
        functions=json.dumps(functions),
        datetime="",
        **variables,
    )
    for tools in (functions or None, functions):
        with suppress(TypeError):  # the template wants a list, or cannot print these tools
            return str(render(tools=tools))
    return str(render(tools=None))


def _message(message: dict[str, Any]) -> dict[str, Any]:
    calls = [
        {"id": f"call_{at:05}", "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
        for at, (name, arguments) in enumerate(message.get("calls", ()))
    ]
    plain = {"role": message["role"], "content": message["content"]}
    return {**plain, **({"tool_calls": calls} if calls else {})}


def _records() -> list[dict[str, Any]]:
    """Compile the cases, and return what they print."""
    header = Path(__file__).with_name("llama_cpp_cases.h")
    program = LLAMA_CPP.result(header)
    if not program.exists():
        with TemporaryDirectory() as folder:
            source = Path(folder) / "cases.cpp"
            source.write_text(cases_in((LLAMA_CPP.folder() / _HERE / "tests" / "test-chat.cpp").read_text()))
            command = ["g++", "-std=c++17", "-O0", "-w", "-I", str(header.parent), str(source), "-o", str(program)]
            subprocess.run(command, check=True)
    printed = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines()]


def cases_in(test: str) -> str:
    """Return the parts of the test that state cases, around a tester that prints them."""
    values = _part(test, "static common_chat_tool special_function_tool{", "struct make_peg_parser {")
    tester = _part(test, "// Fluent builder for PEG parser tests", "static void test_msgs_oaicompat_json_conversion")
    before, run, rest = tester.partition("    void run() {")
    after = rest[rest.index("\n};\n") :]
    printing = (
        "    void run(int line = __builtin_LINE()) { tc_.line = line; print_case(tester_.template_path(), tc_); }"
    )
    assert run
    return "\n".join(
        (
            '#include "llama_cpp_cases.h"',
            "static std::string g_template_filter;",
            values.replace("struct peg_test_case {", "struct peg_test_case { int line = 0;"),
            f"{before}{printing}{after}",
            _part(test, "static void test_lfm2_parser(", "static void test_template_generation_prompt()"),
            "int main() { test_template_output_peg_parsers(false); }",
        )
    )


def _part(test: str, start: str, end: str) -> str:
    at = test.index(start)
    line = test.count("\n", 0, at) + 1
    return f'#line {line} "test-chat.cpp"\n{test[at : test.index(end, at)]}'
