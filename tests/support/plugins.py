"""Plug-ins in tests: functions that edit a pipeline at once, and those that edit it for the length of a block."""

from __future__ import annotations

import sys
from collections.abc import Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

from penstock.pipeline.core import Pipeline
from penstock.pipeline.plugins import Edit, Install

Value = TypeVar("Value")


def install_of(edit: Edit) -> Install:
    """Return the plug-in that edits a pipeline and keeps nothing open."""
    return lambda pipeline: nullcontext(edit(pipeline))


def edit_of(install: Install) -> Edit:
    """Return the function of plug-ins that keep nothing open, and so await nothing."""

    async def edited(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        async with install(pipeline) as within:
            return within

    return lambda pipeline: at_once(edited(pipeline))


def forget_modules(folder: Path) -> None:
    """Let the modules of a folder be imported anew; a module of the product would then be there twice."""
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


def at_once(work: Coroutine[Any, Any, Value]) -> Value:
    """Return the result of a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as returned:
        result: Value = returned.value
        return result
    raise AssertionError("it waits")
