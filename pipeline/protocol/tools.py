"""Tools that the model may call, in the form for the stages.

On the wire, tools are nested in namespaces, and three parameters decide which of them may be called.  ``normalize``
reads all of this once, into a `Toolset` that travels with the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from penstock.pipeline.secret import Secret

ClientForm: TypeAlias = Literal[
    "function", "local_shell", "shell", "apply_patch", "tool_search", "computer", "computer_use_preview"
]
"""The type of a function call's item on the wire."""


StrictLevel: TypeAlias = Literal["function", "parameter"]
"""The strictness of all calls: their markup and the names in it, or the schemas of functions as well."""


Callers: TypeAlias = Literal["programs", "both"]
"""The callers of a tool that programs may call: programs alone, or the model as well."""


class FunctionTool(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    """A function of the client, called with JSON.

    If ``strict`` is True, arguments are sure to match ``parameters``, a JSON schema.  ``namespace`` is the name of the
    namespace tool around it, or None.  ``form`` is not ``function`` for shells, patches, searches and computers, which
    the API lets a client run: the model sees them as functions.  If ``is_async`` is True, the model goes on after a
    call, without its output.  If ``runs_here`` is True, this server runs it: it is the search for deferred tools.
    ``output_schema`` is a JSON schema of its results, for programs.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    namespace: str | None = None
    form: ClientForm = "function"
    is_async: bool | UnsetType = UNSET
    runs_here: bool | UnsetType = UNSET
    output_schema: dict[str, Any] | UnsetType = UNSET


class Grammar(msgspec.Struct, frozen=True):
    """A grammar for the input of a custom tool."""

    syntax: Literal["lark", "regex"]
    definition: str


class CustomTool(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    """A tool of the client, called with plain text: any text, or text that matches ``grammar``."""

    name: str
    description: str | None = None
    grammar: Grammar | None = None
    namespace: str | None = None


class McpTool(msgspec.Struct, frozen=True, tag_field="type", tag="mcp"):
    """A tool of an MCP server, which this server calls; ``namespace`` is that server's label.

    ``parameters`` is a JSON schema.  ``needs_approval`` is True if the client must approve each call.
    """

    namespace: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    needs_approval: bool = False


class HostedTool(msgspec.Struct, frozen=True, tag_field="type", tag="hosted", omit_defaults=True):
    """One function of a built-in tool, which this server runs: ``python.python``, ``browser.search``, ...

    ``description`` and ``parameters`` are those of the operator's MCP server that runs the tool.  Without parameters,
    the function is that of the tool's kind.  ``spoken`` is the model's name for the tool if it is not its own.
    """

    namespace: str
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    spoken: str = ""


Tool: TypeAlias = FunctionTool | CustomTool | McpTool | HostedTool

ToolKey: TypeAlias = tuple[str | None, str]
"""The identity of a tool: its namespace and its name."""

ANY_NAME = "*"
"""A wildcard in place of a name in `Toolset.allowed`: all tools of a namespace, even if not listed yet."""


class ToolFilter(msgspec.Struct, frozen=True):
    """A selection of an MCP server's tools, by name and by MCP's ``readOnlyHint``.

    A tool must match both; None matches every tool.
    """

    names: tuple[str, ...] | None = None
    read_only: bool | None = None


EVERY_TOOL = ToolFilter()


class ContainerUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """The container in which a built-in tool runs the calls of a response."""

    id: str
    is_own: bool = True
    """True if the server may make the container; False if the request names it, and its end is an error."""
    memory_limit: Literal["1g", "4g", "16g", "64g"] | None = None
    """The limit of memory of a container that is made."""
    file_ids: tuple[str, ...] = ()
    """The files of the Files API to put into the folder before the first call."""


class McpServer(msgspec.Struct, frozen=True):
    """An MCP server that a request names.

    ``url`` is None for a server that the operator configured: under the label ``connector``, or else under ``label``.
    ``headers`` go with every call.  Calls of tools in ``always`` need approval, and calls of tools in ``never`` need
    none; a tool in both needs it, and ``approves_rest`` decides for tools in neither.
    """

    label: str
    url: str | None = None
    headers: Secret = Secret()
    description: str | None = None
    allowed: ToolFilter | None = None
    always: ToolFilter | None = None
    never: ToolFilter | None = None
    approves_rest: bool = True
    """True if calls of the other tools need approval, which is the API's default."""
    connector: str | None = None
    is_deferred: bool | UnsetType = UNSET
    """True if its tools are not in the prompt until a search loads them."""
    callers: Callers | UnsetType = UNSET
    """Set if programs may call its tools."""

    @property
    def configured_as(self) -> str:
        """The label of the server in the operator's configuration, if it has no URL."""
        return self.connector or self.label


def tool_key(tool: Tool) -> ToolKey:
    """Return the key of ``tool``."""
    return tool.namespace, tool.name


def keys_of(declared: Iterable[Mapping[str, Any]]) -> Iterator[ToolKey]:
    """Yield the keys of functions and custom tools in their wire form, also of those in namespaces."""
    for tool in declared:
        match tool:
            case {"type": "namespace", "name": namespace}:
                yield from ((namespace, inner["name"]) for inner in tool.get("tools") or ())
            case {"type": "function" | "custom", "name": name}:
                yield None, name
            case _:
                pass


class Toolset(msgspec.Struct, frozen=True):
    """The tools of one request, and the rules for using them."""

    tools: tuple[Tool, ...] = ()
    """All tools that the model sees, each key once."""
    choice: Literal["auto", "required", "none"] = "auto"
    """Calls are optional, required or forbidden.  A choice of one tool is ``required`` with one key ``allowed``."""
    allowed: tuple[ToolKey, ...] | None = None
    """The keys of the tools that may be called, a hard limit; None if all may."""
    parallel: bool = True
    """True if the model may make several calls in one turn."""
    descriptions: Mapping[str, str] = {}
    """The client's description of each namespace."""
    servers: tuple[McpServer, ...] = ()
    """MCP servers whose tools are not known yet; ``converse`` lists them and adds them to ``tools``."""
    hosted: tuple[McpServer, ...] | UnsetType = UNSET
    """The built-in tools that the request enables as MCP servers, labelled with the namespace of the tool."""
    deferred: tuple[Tool, ...] | UnsetType = UNSET
    """The tools that the model does not see until a search loads them."""
    loaded: tuple[ToolKey, ...] | UnsetType = UNSET
    """The keys of the tools that items of the conversation have brought: they stand in the prompt where their item does
    (see `placed`).  A key may name a tool of a server that is not listed yet.
    """
    strict_level: StrictLevel | UnsetType = UNSET
    """The operator's level, to which calls are held although the request does not ask for it."""
    in_programs: tuple[Tool, ...] | UnsetType = UNSET
    """The tools that programs may call; those that the model may call as well are among ``tools``, too."""

    def enabled(self, namespace: str) -> McpServer:
        """Return the settings of a built-in tool: those of the MCP server as which the request enables it, if any."""
        return next((server for server in self.hosted or () if server.label == namespace), McpServer(namespace))

    def loading(self, declared: Iterable[Mapping[str, Any]]) -> Toolset:
        """Return the tools after a search has loaded deferred ones, which it shows in their wire form."""
        keys = frozenset(keys_of(declared))
        found = tuple(tool for tool in self.deferred or () if tool_key(tool) in keys)
        return msgspec.structs.replace(
            self,
            tools=(*self.tools, *found),
            deferred=tuple(tool for tool in self.deferred or () if tool_key(tool) not in keys),
            loaded=(*(self.loaded or ()), *map(tool_key, found)),
        )

    @property
    def callable(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        return () if self.choice == "none" else self._allowed(self.tools)

    def limiting_programs(self) -> Toolset:
        """Return the tools with those of programs that the choice allows, if it names any of them; else with all."""
        named = self._allowed(self.in_programs or ())
        return msgspec.structs.replace(self, in_programs=named) if named else self

    def _allowed(self, tools: tuple[Tool, ...]) -> tuple[Tool, ...]:
        if self.allowed is None:
            return tools
        allowed = frozenset(self.allowed)
        return tuple(tool for tool in tools if not allowed.isdisjoint((tool_key(tool), (tool.namespace, ANY_NAME))))
