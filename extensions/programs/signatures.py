"""The description of programs for the model: rules, and the functions as stubs with types from their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.extensions.programs.names import Function, Names, python_names
from penstock.extensions.programs.python_types import (
    INDENT,
    default_of,
    docstring,
    laid_out,
    python_type,
    remark,
)
from penstock.pipeline.protocol.tools import CustomTool, HostedTool, Toolset
from penstock.stages.models.chat.functions import rule_of
from penstock.stages.models.harmony.hosted import description_of, function_of

RULES: Final = """\
Runs a Python program that calls the functions below: for tasks with several calls, or if you need a part of their \
results.

- The functions are there, and async: `await` each at the top level, or several at once by `asyncio.gather`; start no \
event loop.
- A call returns parsed JSON, or text, or raises `ToolError` with a reason.
- You see only what the program prints: print what you need, and nothing else.
- Each program starts anew, without earlier variables and files, and reaches nothing but these functions."""
"""The rules of programs: short, as the model reads them twice for each one."""


def described(tools: Toolset) -> str:
    """Return the description of programs in a request: the rules, and the functions."""
    objects: dict[str, list[Function]] = {}
    for function in Names(tools.in_programs or ()).functions:
        objects.setdefault(function.object, []).append(function)
    parts = [RULES, *map(_stub, objects.pop("", ()))]
    if objects:
        (first, *_), *_ = objects.values()
        parts.append(f"# Methods of objects that are there already, called as `await {first.path}(...)`:")
    for name, members in objects.items():
        about = docstring(_about(members[0], tools), INDENT)
        methods = (_stub(function, INDENT) for function in members)
        parts.append("\n".join([f"class {name}:", *([about] if about else ()), *methods]))
    return "\n\n".join(parts)


def _about(member: Function, tools: Toolset) -> str:
    """Return the description of the object of a function."""
    if isinstance(member.tool, HostedTool):
        return description_of(member.tool.namespace, tools.descriptions)
    return tools.descriptions.get(member.tool.namespace or "", "")


def _stub(function: Function, indent: str = "") -> str:
    parameters = [*_parameters(function, indent + INDENT)]
    head = laid_out(f"{indent}async def {function.name}(", parameters, f"){_returned(function, indent)}:", indent)
    about = docstring(_description(function), indent + INDENT)
    return f"{head}\n{about}" if about else f"{head} ..."


def _description(function: Function) -> str:
    tool = function.tool
    known = function_of(tool) if isinstance(tool, HostedTool) else tool
    described = (known and known.description) or ""
    return f"{described}\n\n{rule_of(tool)}" if isinstance(tool, CustomTool) and tool.grammar else described


def _returned(function: Function, indent: str) -> str:
    return "" if function.returned is None else f" -> {python_type(function.returned, indent)}"


def _parameters(function: Function, indent: str) -> Iterator[tuple[str, str]]:
    """Yield each parameter, and the remark on it."""
    shape = function.shape
    nodes = dict(shape.properties) if shape else {}
    for name, key in function.parameters.items():
        node = nodes[key]
        default = "" if name in function.required else f" = {default_of(node.notes)}"
        yield f"{name}: {python_type(node, indent)}{default}", remark(node.notes)
    others = python_names([*function.parameters, "others"])[-1]
    if shape is None:
        yield f"**{others}: Any", ""
    elif shape.index:
        yield f"**{others}: {python_type(shape.index, indent)}", remark(shape.index.notes)
