"""Tools: what the model may call, as the stages see it.

The wire nests tools in namespaces, and spreads over three parameters which of them may be called; ``normalize`` reads
all of it once, into one `Toolset` that travels with the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.pipeline.secret import Secret

ClientForm: TypeAlias = Literal["function", "local_shell", "shell", "apply_patch"]
"""As which item of the wire a function call goes to the client."""

HostedKind: TypeAlias = Literal["python", "browser", "container"]
"""The namespaces of the built-in tools, by the names under which the model was taught them."""


class FunctionTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A function of the client's, called with JSON.

    ``strict`` promises arguments that match ``parameters``, a JSON schema.  ``namespace`` is that of the namespace
    tool that it came in, None for one that stood alone.  ``form`` is not ``function`` for the tools of the API that a
    client runs itself: the model knows these as functions.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: str | None = None
    form: ClientForm = "function"


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


class McpTool(msgspec.Struct, frozen=True, tag_field="type", tag="mcp"):
    """A tool of an MCP server, which this server calls; ``namespace`` is that server's label.

    ``parameters`` is a JSON schema.  ``needs_approval`` says that the client has to approve of each call.
    """

    namespace: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    needs_approval: bool = False


class HostedTool(msgspec.Struct, frozen=True, tag_field="type", tag="hosted"):
    """One function of a built-in tool, which this server runs: ``python.python``, ``browser.search``, ..."""

    namespace: HostedKind
    name: str


Tool: TypeAlias = FunctionTool | CustomTool | McpTool | HostedTool

HOSTED: Mapping[HostedKind, tuple[HostedTool, ...]] = {
    "python": (HostedTool("python", "python"),),
    "browser": (HostedTool("browser", "search"), HostedTool("browser", "open"), HostedTool("browser", "find")),
    "container": (HostedTool("container", "exec"),),
}
"""The functions of each built-in tool."""

ToolKey: TypeAlias = tuple[str | None, str]
"""What tells one tool from another: its namespace and its name."""

ANY_NAME = "*"
"""In place of a name in `Toolset.allowed`: all the tools of a namespace, also those that are not known yet."""


class ToolFilter(msgspec.Struct, frozen=True):
    """Some of the tools of an MCP server: those of these ``names``, and those whose ``readOnlyHint`` is so."""

    names: tuple[str, ...] | None = None
    read_only: bool | None = None


class McpServer(msgspec.Struct, frozen=True):
    """An MCP server that a request names.

    ``url`` is None for one that the operator configured: under ``connector``, or else under this label.  ``headers``
    go with every call of it.
    ``always`` and ``never`` tell whose calls need approval; for tools of neither ``approves_rest`` decides.
    """

    label: str
    url: str | None = None
    headers: Secret = Secret()
    description: str | None = None
    allowed: ToolFilter | None = None
    always: ToolFilter | None = None
    never: ToolFilter | None = None
    approves_rest: bool = True
    """Whether calls of the other tools need approval: the API's default."""
    connector: str | None = None

    @property
    def configured_as(self) -> str:
        """The label under which the operator configured it, where it has no URL."""
        return self.connector or self.label


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
    servers: tuple[McpServer, ...] = ()
    """MCP servers whose tools are not known yet: ``converse`` asks them, and adds what they offer."""

    @property
    def runs_here(self) -> bool:
        """Whether this server may have to run a call itself."""
        return bool(self.servers) or any(isinstance(tool, McpTool | HostedTool) for tool in self.tools)

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.choice == "none":
            return ()
        if self.allowed is None:
            return self.tools
        allowed = frozenset(self.allowed)
        return tuple(
            tool for tool in self.tools if not allowed.isdisjoint((tool_key(tool), (tool.namespace, ANY_NAME)))
        )
