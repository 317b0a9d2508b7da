"""Tools: what the model may call, as the stages see it.

The wire nests tools in namespaces, and spreads over three parameters which of them may be called; ``normalize`` reads
all of it once, into one `Toolset` that travels with the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec


class FunctionTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A function of the client's, called with JSON.

    ``strict`` promises arguments that match ``parameters``, a JSON schema.  ``namespace`` is that of the namespace
    tool that it came in, None for one that stood alone.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: str | None = None


class Grammar(msgspec.Struct, frozen=True):
    """What the input of a custom tool must look like."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """A tool of the client's that is called with plain text; without a ``grammar`` with any text."""

    name: str
    description: str | None = None
    grammar: Grammar | None = None
    namespace: str | None = None


Tool: TypeAlias = FunctionTool | CustomTool

ToolKey: TypeAlias = tuple[str | None, str]
"""What tells one tool from another: its namespace and its name."""


def tool_key(tool: Tool) -> ToolKey:
    """The key of ``tool``."""
    return tool.namespace, tool.name


class Toolset(msgspec.Struct, frozen=True):
    """The tools of one request, and how freely the model may use them."""

    tools: tuple[Tool, ...] = ()
    """All that the model is told of, each key once."""
    choice: Literal["auto", "required", "none"] = "auto"
    """Whether it may call, must, or must not.  A choice of one tool is ``required`` with one key ``allowed``."""
    allowed: tuple[ToolKey, ...] | None = None
    """The keys of those that it may call, where these are not all: a hard limit."""
    parallel: bool = True
    """Whether it may make several calls in one turn."""
    descriptions: Mapping[str, str] = {}
    """What the client says of each namespace."""

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == "none":
            return ()
        if self.allowed is None:
            return self.tools
        allowed = frozenset(self.allowed)
        return tuple(tool for tool in self.tools if tool_key(tool) in allowed)
