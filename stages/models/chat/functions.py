"""The tools of a request as functions, the only kind of tool that chat templates know.

A tool that takes plain text becomes a function with one string argument.  The description of a namespace is put before
the description of its first function.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any

from penstock.pipeline.hosted_kinds import own_function
from penstock.pipeline.protocol.tools import (
    CustomTool,
    FunctionTool,
    HostedTool,
    McpTool,
    Tool,
    ToolKey,
    Toolset,
    tool_key,
)
from penstock.stages.models.chat.model import Function
from penstock.stages.models.chat.names import CODE_ARGUMENT, CUSTOM_ARGUMENT, ToolNames
from penstock.stages.models.harmony.hosted import description_of, function_of

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
_KINDS = {"lark": "Lark grammar", "regex": "regular expression"}


def functions(toolset: Toolset, names: ToolNames, elsewhere: Container[ToolKey] = ()) -> list[Function]:
    """Return the functions to show the model: all tools of the request, including those it may not call now.

    Showing all of them keeps the prompt the same between requests, for the prefix cache.  Those with keys in
    ``elsewhere`` stand in another place.  Empty if ``tool_choice`` is ``none``.
    """
    if toolset.choice == "none":
        return []
    return described((tool for tool in toolset.tools if tool_key(tool) not in elsewhere), toolset.descriptions, names)


def described(tools: Iterable[Tool], descriptions: Mapping[str, str], names: ToolNames) -> list[Function]:
    """Return tools as functions."""
    introduced: set[str | None] = set()
    shown = []
    for tool in tools:
        is_first = tool.namespace not in introduced
        introduced.add(tool.namespace)
        shown.append(_function(tool, names.of(tool), _about(tool, descriptions) if is_first else ""))
    return shown


def _about(tool: Tool, descriptions: Mapping[str, str]) -> str:
    if isinstance(tool, HostedTool):
        return description_of(tool.namespace, descriptions)
    return descriptions.get(tool.namespace, "") if tool.namespace else ""


def _function(tool: Tool, name: str, introduction: str) -> Function:
    description, parameters = _described(tool)
    function: dict[str, Any] = {"name": name}
    if text := "\n\n".join(filter(None, (introduction, description))):
        function["description"] = text
    function["parameters"] = parameters or _NO_PARAMETERS
    if isinstance(tool, FunctionTool) and tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _described(tool: Tool) -> tuple[str | None, Mapping[str, Any] | None]:
    match tool:
        case FunctionTool() | McpTool():
            return tool.description, tool.parameters
        case CustomTool():
            return tool.description, _one_text(CUSTOM_ARGUMENT, rule_of(tool))
        case HostedTool():
            if function := function_of(tool):
                return function.description, function.parameters
            own = own_function(tool)
            return None, _one_text(CODE_ARGUMENT, (own and own.description) or "")


def _one_text(argument: str, description: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {argument: {"type": "string", "description": description}},
        "required": [argument],
        "additionalProperties": False,
    }


def rule_of(tool: CustomTool) -> str:
    """Return a sentence about the input of a tool, with its grammar if it has one."""
    if tool.grammar is None:
        return "Any text."
    return f"Text that matches this {_KINDS[tool.grammar.syntax]}:\n{tool.grammar.definition}"
