"""Declarations of tools in a request: as the model sees them, and as the response repeats them."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from penstock.pipeline.protocol import tools as wire
from penstock.pipeline.protocol.params import tools as params
from penstock.pipeline.protocol.tools import Callers, Tool


def deferred_names(tool: params.ToolParam) -> frozenset[str]:
    """Return the names of those functions of a tool that are not in the prompt until a search loads them."""
    match tool:
        case params.NamespaceToolParam():
            return frozenset(inner.name for inner in tool.tools if inner.defer_loading)
        case params.FunctionToolParam(defer_loading=True) | params.CustomToolParam(defer_loading=True):
            return frozenset((tool.name,))
        case _:
            return frozenset()


def callers_of(tool: params.ToolParam) -> Callers | UnsetType:
    """Return who may call a tool; UNSET for the model alone."""
    named = (tool.allowed_callers if isinstance(tool, params.CallableTool) else None) or ("direct",)
    if "programmatic" not in named:
        return UNSET
    return "both" if "direct" in named else "programs"


def search_of(tool: params.ToolSearchToolParam) -> wire.FunctionTool:
    """Return the search for deferred tools, as the client describes it."""
    runs_here = UNSET if tool.execution == "client" else True
    return wire.FunctionTool("tool_search", tool.description, tool.parameters, form="tool_search", runs_here=runs_here)


def described(search: wire.FunctionTool, standard: wire.FunctionTool) -> wire.FunctionTool:
    """Return the search with its standard description and parameters, where the client gives none."""
    if search.runs_here:
        about = "\n\n".join(filter(None, (search.description, standard.description)))
        return replace(standard, description=about, runs_here=True)
    description = search.description or standard.description
    return replace(standard if search.parameters is None else search, description=description)


_SHOWN = ("output_schema", "async", "defer_loading", "allowed_callers")
"""The optional keys of a function that a response repeats."""


def echo_of(tool: params.ToolParam) -> dict[str, Any]:
    """Return a tool as the response repeats it; a function has the keys that strict clients require, and known ones."""
    match tool:
        case params.NamespaceToolParam():
            return tool.sent | {"description": tool.description or ""}
        case params.FunctionToolParam():
            required = {key: getattr(tool, key) for key in ("type", "name", "description", "parameters", "strict")}
            optional = {key: tool.sent.get(key) for key in _SHOWN}
            return required | {key: value for key, value in optional.items() if value not in (None, False)}
        case _:
            return tool.without_secrets


def tool_of(tool: params.FunctionToolParam | params.CustomToolParam, namespace: str | None) -> Tool:
    """Return a function or a custom tool as the model sees it."""
    match tool:
        case params.FunctionToolParam():
            is_async = True if tool.is_async else UNSET
            return wire.FunctionTool(
                tool.name,
                description=tool.description,
                parameters=tool.parameters,
                strict=tool.strict,
                namespace=namespace,
                is_async=is_async,
                output_schema=(callers_of(tool) and tool.output_schema) or UNSET,
            )
        case params.CustomToolParam(format=params.GrammarFormat() as grammar):
            return wire.CustomTool(
                tool.name, tool.description, wire.Grammar(grammar.syntax, grammar.definition), namespace
            )
        case params.CustomToolParam():
            return wire.CustomTool(tool.name, tool.description, None, namespace)
