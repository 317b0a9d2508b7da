"""The names of a request's tools in a chat model's prompt, where all tools are functions with plain names.

A tool in a namespace, an MCP server's tool and a function of a built-in tool are named ``<namespace>__<name>``.
Characters that a function name cannot hold are replaced by ``_``.  If two tools get the same name, the later one is
numbered.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.pipeline.hosted_kinds import takes_text
from penstock.pipeline.protocol.items import CallItem, CodeInterpreterCall, CustomToolCall, Program
from penstock.pipeline.protocol.tools import CustomTool, HostedTool, Tool, ToolKey, Toolset, tool_key

_UNNAMEABLE = re.compile(r"[^A-Za-z0-9_-]")
_MOST_CHARACTERS = 64
"""Characters of a name, which is OpenAI's limit for the names of functions."""

CUSTOM_ARGUMENT = "input"
CODE_ARGUMENT = "code"


class ToolNames:
    """The names of one request's tools."""

    def __init__(self, tools: Toolset) -> None:
        # the client expects its plain functions under their own names: they are never the ones to be numbered
        plain_first = sorted(tools.tools, key=lambda tool: tool.namespace is not None)
        self._tools: dict[str, Tool] = {}
        for tool in plain_first:
            self._tools[_free(_own_name(tool), self._tools)] = tool
        self._names: Mapping[ToolKey, str] = {tool_key(tool): name for name, tool in self._tools.items()}
        # reversed, so that the first of several names that differ in case wins
        lowered = {name.lower(): tool for name, tool in reversed(self._tools.items())}
        self._lowered: Mapping[str, Tool] = lowered

    def of(self, tool: Tool) -> str:
        """Return the name of a tool of the request."""
        return self._names[tool_key(tool)]

    def of_call(self, call: CallItem) -> str:
        """Return the name to show for ``call``, which works also if its tool is not in this request."""
        return self._names.get(call.tool) or _spelled(*call.tool)

    def tool(self, name: str) -> Tool | None:
        """Find a tool by its exact name, or else ignoring case."""
        return self._tools.get(name) or self._lowered.get(name.lower())


def text_argument(tool: Tool | CallItem) -> str | None:
    """Return the argument that holds the text of a custom tool or code; None for tools called with JSON."""
    match tool:
        case CustomTool() | CustomToolCall():
            return CUSTOM_ARGUMENT
        case CodeInterpreterCall() | Program():
            return CODE_ARGUMENT
        case HostedTool() if takes_text(tool):
            return CODE_ARGUMENT
        case _:
            return None


def _own_name(tool: Tool) -> str:
    spoken = tool.spoken if isinstance(tool, HostedTool) else ""
    return spoken or _spelled(*tool_key(tool))


def _spelled(namespace: str | None, name: str) -> str:
    whole = name if namespace in (None, name) else f"{namespace}__{name}"
    return _UNNAMEABLE.sub("_", whole)[-_MOST_CHARACTERS:]


def _free(name: str, taken: Mapping[str, Tool]) -> str:
    if name not in taken:
        return name
    numbered = (f"{name[: _MOST_CHARACTERS - 4]}_{number}" for number in range(2, len(taken) + 3))
    return next(free for free in numbered if free not in taken)
