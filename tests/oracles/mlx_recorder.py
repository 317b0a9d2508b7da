"""A plug-in for mlx-lm's own tests: it records what each passed test gives a parser of calls, and what it gets.

``PARSER_CASES`` names the file for the records.
"""

from __future__ import annotations

import functools
import json
import os
import pkgutil
from collections.abc import Callable, Generator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

CASES = Path(os.environ["PARSER_CASES"])
PARSERS = "mlx_lm.tool_parsers"

_found: list[dict[str, Any]] = []
"""What the current test has given the parsers."""


def pytest_configure() -> None:
    """Wrap the function of each parser."""
    for module in pkgutil.iter_modules(import_module(PARSERS).__path__):
        parser: Any = import_module(f"{PARSERS}.{module.name}")
        if parser.parse_tool_call.__module__ == parser.__name__:  # else it is another name of a parser
            parser.parse_tool_call = _noted(parser, parser.parse_tool_call)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Forget what a test has shown that has failed."""
    _found.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write what a test, or a part of one, has shown that has passed."""
    report = yield
    if call.when == "call" and report.passed:
        with CASES.open("a") as file:
            file.writelines(json.dumps(case | {"test": item.nodeid}) + "\n" for case in _found)
        _found.clear()
    return report


def _noted(parser: Any, parse: Callable[..., Any]) -> Callable[..., Any]:
    """Return a parser that notes what it reads; it has no calls if it raises ``ValueError``."""

    @functools.wraps(parse)
    def noted(text: str, tools: Any = None) -> Any:
        case = {
            "parser": parser.__name__.rpartition(".")[2],
            "marks": [parser.tool_call_start, parser.tool_call_end],
            "text": text,
            "tools": tools or [],
            "calls": [],
        }
        _found.append(case)
        result = parse(text, tools)
        calls = result if isinstance(result, list) else [result]
        case["calls"] = [[call["name"], json.dumps(call["arguments"])] for call in calls]
        return result

    return noted
