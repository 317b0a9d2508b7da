"""Tools: convert the tools of a request into tools for the model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from msgspec import UNSET, UnsetType
from msgspec.structs import replace
from pydantic import ConfigDict, TypeAdapter, ValidationError

from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.hosted_kinds import HostedKind, ToolOptions, kinds
from penstock.pipeline.protocol import tools as wire
from penstock.pipeline.protocol.items import AdditionalTools, Item, Program, ToolSearchOutput, of_type
from penstock.pipeline.protocol.params import tools as params
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.tools import Callers, McpServer, StrictLevel, Tool, ToolKey, tool_key
from penstock.services.container_wishes import ContainerWish
from penstock.services.tool_search import search_tool
from penstock.services.tools import ADVICE
from penstock.stages.models.harmony.vocabulary import FUNCTIONS, recipient_of
from penstock.stages.normalize.declared import callers_of, deferred_names, described, echo_of, search_of, tool_of
from penstock.stages.normalize.mcp_server import refuse_headers, refuse_own_server, server_of, settings_of
from penstock.stages.normalize.tool_choice import Choosable, bad_choice, kind_of
from penstock.stages.normalize.tool_types import (
    CLIENT_TOOLS,
    MISSING,
    advice_on,
    client_tool,
    hosted_kind_of,
    is_of_the_client,
    is_unasked,
    unversioned,
)

logger = logging.getLogger(__name__)

MOST_SERVERS = 64
"""MCP servers of a request: each is listed before the first turn, over a connection of its own."""

_Bringing: TypeAlias = AdditionalTools | ToolSearchOutput
"""Items that bring tools."""

_SEARCH = f"{FUNCTIONS}.tool_search"

_PROGRAM: ToolKey = Program.tool
_PROGRAM_TYPE = "programmatic_tool_calling"
_ONCE = ("function", "custom", _PROGRAM[0])
"""The kinds of tools of which a request has each but once."""
_PYTHON = "python"
"""The name by which gpt-oss calls Python, and so programs, unless another tool has it."""

_tool_param: TypeAdapter[params.ToolParam] = TypeAdapter(params.ToolParam, config=ConfigDict(hide_input_in_errors=True))


@dataclass(kw_only=True)
class ToolsetBuilder:
    """Collect the tools of one request: first its own, then the tools that the conversation adds.

    ``usable`` are the namespaces of the built-in tools that this server can run.  ``labels`` are the labels of the
    operator's MCP servers, or None if they are not known because no response is being made.
    """

    usable: frozenset[str] = frozenset()
    labels: frozenset[str] | None = None
    left_out: frozenset[str] = frozenset()
    """The types of tools that the operator has left out of requests."""
    denied: frozenset[str] = frozenset()
    """The namespaces of the built-in tools that the client may not use."""
    of_denied: str = "This API key may not use"
    """The beginning of the error about such a tool."""
    own: frozenset[str] = frozenset()
    """The labels of hosts of the operator's own."""
    sees_images: bool = True
    """True if the model reads images."""
    of_unknown: str = ADVICE
    """The end of the error about a label that is not among the ``labels``."""
    takes_agents: bool = True
    """True if agents declare tools here that they do not need: see `is_unasked`, beside tools of their own."""
    strict_level: StrictLevel | UnsetType = UNSET
    """The level to which the operator holds all calls."""
    tools: dict[str, Tool] = field(default_factory=dict)
    """Tools by the model's names for them; a tool without a namespace and one in ``functions`` share a name."""
    servers: dict[str, McpServer] = field(default_factory=dict)
    """MCP servers by label."""
    settings: dict[str, McpServer] = field(default_factory=dict)
    """The settings of built-in tools that are enabled as MCP servers, by namespace."""
    descriptions: dict[str, str] = field(default_factory=dict)
    """The client's descriptions of namespaces."""
    echo: list[dict[str, Any]] = field(default_factory=list)
    """The tools as the response repeats them."""
    options: dict[str, ToolOptions] = field(default_factory=dict)
    """The options of built-in tools, by namespace."""
    ignored: dict[str, None] = field(default_factory=dict)
    """The types of tools in the request that were left out."""
    deferred: dict[str, Tool] = field(default_factory=dict)
    """The tools that are not in the prompt until a search loads them, by the model's names for them."""
    loaded: dict[ToolKey, None] = field(default_factory=dict)
    """The keys of the tools that items have brought."""
    in_programs: dict[str, Tool] = field(default_factory=dict)
    """The tools that programs may call, by the model's names for them."""
    _only_programs_at: str = ""
    """The path of the first tool that only programs may call."""
    _deferred_in_programs_at: str = ""
    """The path of the first deferred tool that programs may call."""
    _listed: dict[str, Tool] = field(default_factory=dict)
    """The tools that were deferred, loaded by now or not, in the order in which they came."""
    _deferred_at: str = ""
    """The path of the first deferred tool."""
    _owners: dict[str, str] = field(default_factory=dict)
    """The owner of each namespace: ``client``, ``server`` or ``built-in``."""
    _is_agent: bool = False
    """True if the client brings tools that it runs itself."""

    def add_all(self, tools: Sequence[params.ToolParam]) -> None:
        """Offer the request's own tools; raises `InvalidRequest` as `add` does."""
        self._meet(tools)
        for position, tool in enumerate(tools):
            self.add(tool, f"tools[{position}]")

    def _meet(self, tools: Iterable[params.ToolParam]) -> None:
        self._is_agent = self._is_agent or (self.takes_agents and any(map(is_of_the_client, tools)))

    def add(self, tool: params.ToolParam, path: str) -> None:
        """Offer one of the request's own tools; raises `InvalidRequest` if a call to it would be ambiguous."""
        offered = self._offered(tool, path)
        if offered is None:
            return
        if isinstance(offered, McpServer):
            if offered.label in self.servers:
                raise InvalidRequest(f"There are two servers labelled {offered.label!r}.", param=f"{path}.server_label")
            if len(self.servers) == MOST_SERVERS:
                raise InvalidRequest(f"A request may name at most {MOST_SERVERS} MCP servers.", param=path)
        else:
            self._refuse_namesakes(tool, offered, path)
        self._take(offered, tool, deferred_names(tool), path)
        self.echo.append(echo_of(tool))

    def add_items(self, tools: Iterable[params.ToolParam], item: _Bringing, path: str) -> None:
        """Offer the tools that an item at ``path`` brings; they replace tools of the same name.

        What this server has found are deferred tools of the request, which are loaded now.
        """
        if isinstance(item, ToolSearchOutput) and item.execution == "server":
            self._load(item)
            return
        tools = tuple(tools)
        self._meet(tools)
        for position, tool in enumerate(tools):
            at = f"{path}.tools[{position}]"
            if isinstance(tool, params.McpToolParam):
                refuse_own_server(tool, at)
            offered = self._offered(tool, at)
            deferred = frozenset[str]() if isinstance(item, ToolSearchOutput) else deferred_names(tool)
            self._take(offered, tool, deferred, at, is_loaded=True)

    def add_stored(self, item: _Bringing, path: str) -> None:
        """Offer the tools of a stored item, which has them as the client sent them."""
        self.add_items([_tool_param.validate_python(tool) for tool in item.tools], item, path)

    def inherit(self, history: Sequence[Item]) -> None:
        """Offer the tools that items of the history bring; the request's own tools replace those of the same name.

        The request's own tools stay first.  The earlier prompt had them in this order too, and the prefix cache needs
        the same beginning.  Tools that were accepted once are never refused: a tool is left out if the operator has
        removed its server, or if its namespace has another owner in this request.  Deferred ones may lack a search.
        """
        places = self._deferred_at, self._only_programs_at, self._deferred_in_programs_at
        own = self.tools | self.deferred, self.servers.copy(), self.descriptions.copy()
        in_programs = self.in_programs.copy()
        bringing: list[_Bringing] = [*of_type(history, AdditionalTools), *of_type(history, ToolSearchOutput)]
        for item in bringing:
            for tool in item.tools:
                with suppress(InvalidRequest, ValidationError):  # this server, or an earlier one, has accepted it once
                    self.add_stored(replace(item, tools=(tool,)), "previous_response_id")
        self.tools |= {name: tool for name, tool in own[0].items() if name not in self.deferred}
        self.servers |= own[1]
        self.descriptions |= own[2]
        for name in in_programs.keys() - own[0].keys():  # only programs may call these
            self.tools.pop(name, None)
            self.deferred.pop(name, None)
        for name in own[0].keys() - in_programs.keys():
            self.in_programs.pop(name, None)
        self.in_programs |= in_programs
        self._deferred_at, self._only_programs_at, self._deferred_in_programs_at = places

    def _take(
        self,
        offered: McpServer | Sequence[Tool] | None,
        param: params.ToolParam,
        deferred: Collection[str],
        path: str,
        *,
        is_loaded: bool = False,
    ) -> None:
        """Take a server or tools.  Those whose names are ``deferred`` stay out of the prompt.

        If ``is_loaded`` is True, an item brings them, and the others stand in the prompt where it does.
        """
        if isinstance(offered, McpServer):
            self.servers[offered.label] = offered
            self._deferred_at = self._deferred_at or (path if offered.is_deferred else "")
            self._note_callers(offered.callers, path, is_deferred=offered.is_deferred is True)
            return
        for position, tool in enumerate(offered or ()):
            name, at, callers = recipient_of(tool), path, callers_of(param)
            if isinstance(param, params.NamespaceToolParam):
                at, callers = f"{path}.tools[{position}]", callers_of(param.tools[position])
            self._note_callers(callers, at, is_deferred=tool.name in deferred)
            if tool.name in deferred:
                self.deferred[name] = self._listed[name] = tool
                self._deferred_at = self._deferred_at or at
                continue
            self.deferred.pop(name, None)
            self.in_programs.pop(name, None)
            if callers:  # a program waits for what it calls
                waits = isinstance(tool, wire.FunctionTool) and tool.is_async
                self.in_programs[name] = replace(tool, is_async=UNSET) if waits else tool
            if callers == "programs":
                self.tools.pop(name, None)
                continue
            if is_loaded and name not in self.tools:
                self.loaded[tool_key(tool)] = None
            self.tools[name] = tool

    def _note_callers(self, callers: Callers | UnsetType, at: str, *, is_deferred: bool) -> None:
        if callers and is_deferred:
            self._deferred_in_programs_at = self._deferred_in_programs_at or at
        if callers == "programs":
            self._only_programs_at = self._only_programs_at or at

    def _load(self, output: ToolSearchOutput) -> None:
        """Load the deferred tools that this server has found."""
        self.loaded |= dict.fromkeys(wire.keys_of(output.tools))
        for name, tool in list(self.deferred.items()):
            if tool_key(tool) in self.loaded:
                self.tools[name] = self.deferred.pop(name)

    def _offered(self, tool: params.ToolParam, path: str) -> McpServer | tuple[Tool, ...] | None:
        """Return the server or tools that the tool at ``path`` adds, or None if it is left out.

        Raises `UnsupportedParameter` for a tool that this server cannot run.
        """
        if self._is_left_out(tool):
            self.ignored[tool.type] = None
            return None
        if (kind := hosted_kind_of(tool)) and kind.namespace in self.usable:
            self._claim(kind.namespace, "built-in", f"{path}.type")
            self._set_up(tool, kind, path)
            return kind.tools
        match tool:
            case params.FunctionToolParam() | params.CustomToolParam():
                return (tool_of(tool, None),)
            case params.NamespaceToolParam():
                return self._namespace(tool, path)
            case params.ToolSearchToolParam():
                return (search_of(tool),)
            case params.McpToolParam():
                mcp_server = server_of(tool, path, self.labels, self.of_unknown)
                if mcp_server.url is None and mcp_server.configured_as in self.own:
                    refuse_headers(tool, path)
                self._claim(tool.server_label, "server", f"{path}.server_label")
                return mcp_server
            case _ if tool.type in CLIENT_TOOLS and self._is_of_the_client(tool):
                return (_of_the_client(tool, path),)
            case _ if MISSING in self.left_out or self._is_unasked(tool):
                self.ignored[tool.type] = None
                return None
            case _:
                raise self._missing(tool, path)

    def _is_left_out(self, tool: params.ToolParam) -> bool:
        if isinstance(tool, params.WebSearchToolParam) and tool.external_web_access is False and self._is_unasked(tool):
            return True  # there is no cache of the web here, and without the search the web stays untouched as well
        if unversioned(tool.type) not in self.left_out:
            return False
        return not isinstance(tool, params.ShellToolParam) or tool.runs_here

    def _is_unasked(self, tool: params.ToolParam) -> bool:
        return self._is_agent and is_unasked(tool.type)

    def _is_of_the_client(self, tool: params.ToolParam) -> bool:
        match tool:
            case params.ShellToolParam():
                return not tool.runs_here
            case params.ComputerToolParam():
                return self.sees_images
            case _:
                return True

    def _missing(self, tool: params.ToolParam, path: str) -> UnsupportedParameter:
        if isinstance(tool, params.ComputerToolParam):
            message = f"This model reads text only, and cannot see the screen of a computer. {advice_on(tool.type)}"
        elif (kind := hosted_kind_of(tool)) and kind.namespace in self.denied:
            message = f"{self.of_denied} tools of type {shortened(tool.type)!r}."
        elif (named := kinds().get(tool.type)) and named.api_type != tool.type:
            message = f"A tool of type {tool.type!r} is {named.api_type!r}, or 'mcp' with this server_label."
        else:
            message = f"This server does not run tools of type {shortened(tool.type)!r}. {advice_on(tool.type)}"
        return UnsupportedParameter(message, param=f"{path}.type")

    def _set_up(self, tool: params.ToolParam, kind: HostedKind, path: str) -> None:
        """Keep the options of a built-in tool; raises `InvalidRequest` for one that nothing here would obey."""
        if isinstance(tool, params.McpToolParam):
            if tool.defer_loading:
                raise UnsupportedParameter("A built-in tool cannot be deferred.", param=f"{path}.defer_loading")
            self.settings[kind.namespace] = settings_of(tool, kind.namespace)
        options = kind.read(tool, path, by_mcp=kind.namespace in self._run_by_mcp)
        if options and self.options.setdefault(kind.namespace, options).conflicts(options):
            raise InvalidRequest("There are two tools of this type with different options.", param=options.path)

    def _namespace(self, tool: params.NamespaceToolParam, path: str) -> tuple[Tool, ...]:
        self._claim(tool.name, "client", f"{path}.name")
        if tool.description:
            self.descriptions[tool.name] = tool.description
        return tuple(tool_of(inner, tool.name) for inner in tool.tools)

    def _claim(self, namespace: str, kind: str, path: str) -> None:
        """Raise `InvalidRequest` if a namespace belongs to another kind of owner: a call would be ambiguous."""
        if self._owners.setdefault(namespace, kind) != kind:
            raise InvalidRequest(f"There are two namespaces named {namespace!r}.", param=path)

    def _refuse_namesakes(self, tool: params.ToolParam, offered: Sequence[Tool], path: str) -> None:
        """Raise `InvalidRequest` if two tools have one name; the same API tool may be listed more than once."""
        names = dict[str, Tool]()
        for position, offered_tool in enumerate(offered):
            name = recipient_of(offered_tool)
            namesake = self.tools.get(name) or self.deferred.get(name) or self.in_programs.get(name) or names.get(name)
            names[name] = offered_tool
            if namesake is not None and (namesake != offered_tool or kind_of(offered_tool) in _ONCE):
                at = f"{path}.tools[{position}]" if isinstance(tool, params.NamespaceToolParam) else path
                key = "name" if hasattr(tool, "name") else "type"
                raise InvalidRequest(f"There are two tools named {offered_tool.name!r}.", param=f"{at}.{key}")

    def toolset(self, request: CreateResponse) -> wire.Toolset:
        """Return all tools, restricted by ``tool_choice``; raises `InvalidRequest` if the choice cannot be met."""
        if self.ignored:
            logger.info("Left out tools: %s", shortened(", ".join(self.ignored)))
        self._settle_search()
        has_programs = self._settle_programs()
        choosable = Choosable(
            tools=self.tools,
            deferred=self.deferred,
            in_programs=self.in_programs,
            servers=self.servers,
            ignored=self.ignored,
            run_by_mcp=self._run_by_mcp,
        )
        mode, allowed = choosable.chosen(request.tool_choice or "auto")
        if mode == "required" and not (self.tools or self.servers if allowed is None else allowed):
            raise bad_choice("There is no tool that this choice lets the model call.")
        waiting = {tool_key(tool) for tool in self.deferred.values()}
        if mode == "required" and allowed and waiting.issuperset(allowed):
            raise bad_choice("This choice names only deferred tools, which no search has loaded yet.")
        if mode == "required" and allowed and all(map(choosable.is_only_in_programs, allowed)):
            raise bad_choice("Only programs may call what this names: choose programmatic_tool_calling.")
        is_put_off = request.ignore_eos or request.min_tokens  # a grammar says when the output ends
        is_held = (self.tools or self.servers) and not is_put_off
        if allowed == ():  # the choice names only tools that were left out
            mode, allowed = "none", None
        made = wire.Toolset(
            tuple(self.tools.values()),
            choice=mode,
            allowed=allowed,
            parallel=request.parallel_tool_calls is not False,
            descriptions=self.descriptions,
            servers=tuple(self.servers.values()),
            hosted=tuple(self.settings.values()) or UNSET,
            deferred=tuple(self.deferred.values()) or UNSET,
            loaded=tuple(self.loaded) or UNSET,
            strict_level=self.strict_level if is_held else UNSET,
            in_programs=tuple(self.in_programs.values()) if has_programs else UNSET,
        )
        is_listed = not any(server.callers for server in self.servers.values())
        return made.limiting_programs() if is_listed else made

    @property
    def _run_by_mcp(self) -> frozenset[str]:
        """The labels of the operator's MCP servers, which are also the namespaces of built-in tools that these run."""
        return self.labels or frozenset()

    @property
    def wishes(self) -> Mapping[str, ContainerWish]:
        """The wishes of built-in tools for containers, by namespace."""
        return {name: wish for name, wish in self.options.items() if isinstance(wish, ContainerWish)}

    def _settle_search(self) -> None:
        """Describe the search; raises `InvalidRequest` if tools are deferred that nothing can load.

        They are not deferred if the operator has the search left out.
        """
        search = self.tools.get(_SEARCH)
        if isinstance(search, wire.FunctionTool) and search.form == "tool_search":
            servers = [server for server in self.servers.values() if server.is_deferred]
            self.tools[_SEARCH] = described(search, search_tool(self._listed.values(), self.descriptions, servers))
        elif "tool_search" in self.ignored:
            self.tools |= self.deferred
            self.deferred.clear()
            self.servers = {label: replace(server, is_deferred=UNSET) for label, server in self.servers.items()}
        elif self._deferred_at:
            message = "A deferred tool needs a search that loads it: a tool of the type tool_search."
            raise InvalidRequest(message, param=f"{self._deferred_at}.defer_loading")

    def _settle_programs(self) -> bool:
        """Name the programs of the model, and return True if it may write any.

        Raises `InvalidRequest` for what only they may call, if it may not.  If the operator has them left out, so is
        what only they may call.
        """
        name = next((name for name, tool in self.tools.items() if tool_key(tool) == _PROGRAM), None)
        if name is None:
            if self._only_programs_at and _PROGRAM_TYPE not in self.ignored:
                message = "Only programs may call this: that needs a tool of the type programmatic_tool_calling."
                raise InvalidRequest(message, param=f"{self._only_programs_at}.allowed_callers")
            servers = {label: server for label, server in self.servers.items() if server.callers != "programs"}
            self.servers = {label: replace(server, callers=UNSET) for label, server in servers.items()}
            return False
        if self._deferred_in_programs_at:
            message = "Programs cannot call a deferred tool, as its signature is not in the prompt."
            raise UnsupportedParameter(message, param=f"{self._deferred_in_programs_at}.defer_loading")
        others = (*self.tools.values(), *self.deferred.values())
        if not any(_PYTHON in tool_key(tool) for tool in others):
            self.tools[name] = replace(self.tools[name], spoken=_PYTHON)
        return True


def _of_the_client(tool: params.ToolParam, path: str) -> wire.FunctionTool:
    """Return the function for a tool that the client runs; raises `UnsupportedParameter` for one of programs alone."""
    if callers_of(tool) == "programs":
        message = f"Programs call no tool of type {tool.type!r}: this should hold 'direct'."
        raise UnsupportedParameter(message, param=f"{path}.allowed_callers")
    return client_tool(tool)
