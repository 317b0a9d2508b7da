"""A plug-in for vLLM's own tests: it records what each passed test gives a parser, and what it gets.

The tests run in a process of their own, from vLLM's sdist, with the vLLM that is installed here.  Tokenizers of the hub
are replaced by that in the file ``PARSER_TOKENIZER``.  ``PARSER_CASES`` names the file for the records.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import transformers
from vllm import tokenizers
from vllm.parser.abstract_parser import Parser
from vllm.reasoning import ReasoningParser, ReasoningParserManager
from vllm.tokenizers import registry
from vllm.tool_parsers import ToolParser, ToolParserManager

CASES = Path(os.environ["PARSER_CASES"])
TOKENIZER = Path(os.environ["PARSER_TOKENIZER"])

Names: TypeAlias = tuple[str | None, str | None]
"""The names of a parser of reasoning and of one of calls."""

_names: dict[type, str] = {}
_engines: dict[type, Names] = {}
_found: dict[tuple[int, str], dict[str, Any]] = {}
"""The outputs that the current test has given each parser."""
_kept: list[Any] = []
"""Parsers of the current test: ids are not used again while they live."""
_reading: list[Any] = []
"""The parser that is reading; those that it calls are not recorded."""


def pytest_configure() -> None:
    """Replace the tokenizers, and wrap the methods of all parsers."""
    _replace_tokenizers()
    for manager, get in (
        (ReasoningParserManager, ReasoningParserManager.get_reasoning_parser),
        (ToolParserManager, ToolParserManager.get_tool_parser),
    ):
        for name in sorted(manager.list_registered()):
            try:
                _names.setdefault(get(name), name)
            except Exception:  # noqa: BLE001 - a parser may need a package that is missing
                continue
    for cls, name in _names.items():
        engine = getattr(cls, "_parser_engine_cls", None)
        if engine is not None:
            reasoning, tools = _engines.get(engine, (None, None))
            _engines[engine] = (name, tools) if issubclass(cls, ReasoningParser) else (reasoning, tools or name)
    recorded: tuple[tuple[Any, dict[str, Callable[..., None]]], ...] = (
        (ToolParser, {"extract_tool_calls": _whole_calls, "extract_tool_calls_streaming": _calls_in_pieces}),
        (ReasoningParser, {"extract_reasoning": _whole_reasoning, "extract_reasoning_streaming": _reasoning_in_pieces}),
        (Parser, {"parse": _whole, "parse_delta": _in_pieces}),
    )
    for base, methods in recorded:
        _remember_variables(base)
        for cls in [base, *_subclasses(base)]:
            for method, note in methods.items():
                if method in vars(cls):
                    setattr(cls, method, _noted(vars(cls)[method], note))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """Forget what was read while the tests were collected."""
    _found.clear()
    _kept.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write what a test that has passed has shown."""
    report = yield
    if call.when == "call" and report.passed and not hasattr(report, "wasxfail"):
        with CASES.open("a") as file:
            for case in _found.values():
                with suppress(TypeError):  # it holds a mock of the test
                    file.write(json.dumps(case | {"test": item.nodeid}) + "\n")
    return report


def _subclasses(cls: type) -> Iterator[type]:
    each: type
    for each in type.__subclasses__(cls):
        yield each
        yield from _subclasses(each)


def _replace_tokenizers() -> None:
    @functools.cache
    def stand_in() -> Any:
        return transformers.PreTrainedTokenizerFast(tokenizer_file=str(TOKENIZER), eos_token="</s>")

    def load(*names: Any, tokenizer_mode: str = "auto", **_: Any) -> Any:
        if tokenizer_mode == "mistral":
            pytest.skip("needs a tokenizer of Mistral")
        return stand_in()

    transformers.AutoTokenizer.from_pretrained = load
    tokenizers.get_tokenizer = registry.get_tokenizer = load


def _remember_variables(base: Any) -> None:
    inner = base.__init__

    def init(self: Any, *args: Any, **more: Any) -> None:
        self.__dict__.setdefault("penstock_variables", more.get("chat_template_kwargs") or {})
        inner(self, *args, **more)

    base.__init__ = init


def _noted(method: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def noted(self: Any, *args: Any, **named: Any) -> Any:
        if _reading:
            return method(self, *args, **named)
        _reading.append(self)
        try:
            result = method(self, *args, **named)
        finally:
            _reading.clear()
        note(self, result, *args, **named)
        return result

    return noted


def _case(parser: Any, kind: str, request: Any = None, *, anew: bool = False) -> dict[str, Any]:
    key = (id(parser), kind)
    if anew or key not in _found:
        if key in _found:  # the same parser reads another output
            _found[(id(parser), f"{kind} {len(_found)}")] = _found.pop(key)
        _kept.append(parser)
        tools = getattr(request, "tools", None) or getattr(parser, "tools", None) or getattr(parser, "_tools", None)
        variables = getattr(request, "chat_template_kwargs", None) or parser.__dict__.get("penstock_variables")
        _found[key] = {
            "names": _names_of(parser),
            "tools": [_dumped(tool) for tool in tools] if isinstance(tools, list) else [],
            "choice": str(getattr(request, "tool_choice", None)),
            "variables": variables if isinstance(variables, dict) else {},
            "prompt": None,
            "text": None,
            "kind": kind,
            "cut": False,
            "reasoning": "",
            "content": "",
            "calls": [],
        }
    return _found[key]


def _names_of(parser: Any) -> Names:
    cls = type(parser)
    if cls in _names:
        return (_names[cls], None) if issubclass(cls, ReasoningParser) else (None, _names[cls])
    if engines := [_engines[base] for base in cls.__mro__ if base in _engines]:  # the nearest base decides
        reasoning, tools = (next(filter(None, names), None) for names in zip(*engines, strict=True))
        return reasoning, tools
    parts = (getattr(parser, "reasoning_parser", None), getattr(parser, "tool_parser", None))
    reasoning, tools = (_names.get(type(part)) if part is not None else None for part in parts)
    if any(part is not None and type(part) not in _names for part in parts):
        return (None, None)
    return (reasoning, tools)


def _dumped(tool: Any) -> Any:
    return tool if isinstance(tool, dict) else tool.model_dump(mode="json") if hasattr(tool, "model_dump") else {}


def _add_calls(case: dict[str, Any], calls: Any) -> None:
    for call in calls or ():
        function = getattr(call, "function", call)
        case["calls"].append([function.name, function.arguments])


def _whole_calls(parser: Any, result: Any, model_output: str, request: Any = None, **_: Any) -> None:
    case = _case(parser, "whole", request, anew=True)
    case["text"], case["content"] = str(model_output), result.content or ""
    _add_calls(case, result.tool_calls)


def _whole_reasoning(parser: Any, result: Any, model_output: str, request: Any = None, **_: Any) -> None:
    case = _case(parser, "whole", request, anew=True)
    case["text"], (case["reasoning"], case["content"]) = str(model_output), (result[0] or "", result[1] or "")


def _whole(parser: Any, result: Any, model_output: str, request: Any = None, *_: Any, **__: Any) -> None:
    case = _case(parser, "whole", request, anew=True)
    case["text"], (reasoning, content, calls) = str(model_output), result
    case["reasoning"], case["content"] = reasoning or "", content or ""
    _add_calls(case, calls)


def _add_delta(case: dict[str, Any], delta: Any) -> None:
    if delta is None:
        return
    case["reasoning"] += delta.reasoning or ""
    case["content"] += delta.content or ""
    for call in delta.tool_calls or ():
        while len(case["calls"]) <= call.index < 50:
            case["calls"].append(["", ""])
        known = case["calls"][call.index]
        if call.function is not None:
            known[0] = known[0] or call.function.name or ""
            known[1] += call.function.arguments or ""


def _goes_on(parser: Any, text: str, delta_text: str) -> bool:
    """Return True for the next piece of an output, of which the test does not repeat the previous text."""
    known = _found.get((id(parser), "pieces"))
    return known is not None and text == f"{known['text']}{delta_text}"


def _calls_in_pieces(
    parser: Any, result: Any, previous_text: str, current_text: str, delta_text: str, *args: Any, **named: Any
) -> None:
    request = named.get("request") or (args[3] if len(args) > 3 else None)
    case = _case(parser, "pieces", request, anew=not previous_text and not _goes_on(parser, current_text, delta_text))
    case["text"] = current_text
    _add_delta(case, result)


def _reasoning_in_pieces(parser: Any, result: Any, previous_text: str, current_text: str, *_: Any, **__: Any) -> None:
    case = _case(parser, "pieces", anew=not previous_text)
    case["text"] = current_text
    _add_delta(case, result)


def _in_pieces(
    parser: Any,
    result: Any,
    delta_text: str,
    delta_token_ids: Sequence[int],
    request: Any,
    prompt_token_ids: Sequence[int] | None = None,
    *,
    finished: bool,
) -> None:
    case = _case(parser, "pieces", request)
    case["cut"] = not finished
    if case["text"] is None and prompt_token_ids:
        try:
            case["prompt"] = parser.model_tokenizer.decode(list(prompt_token_ids))
        except Exception:  # noqa: BLE001 - a tokenizer of a test may know nothing
            case["prompt"] = None
    case["prompt"] = case["prompt"] if isinstance(case["prompt"], str) else None
    case["text"] = (case["text"] or "") + delta_text
    _add_delta(case, result)
