"""The choice of a request among its tools: the parameter ``tool_choice``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol import tools as wire
from penstock.pipeline.protocol.params import tools as params
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.tools import McpServer, Tool, ToolKey, tool_key
from penstock.stages.models.harmony.vocabulary import FUNCTIONS
from penstock.stages.normalize.tool_types import kinds_of

_Groups: TypeAlias = Mapping[tuple[str, str | None], Sequence[ToolKey]]
"""Tool keys by kind and name, by kind and None, and by "namespace" and the name of the namespace."""

Mode: TypeAlias = Literal["auto", "required", "none"]


@dataclass(frozen=True, kw_only=True)
class Choosable:
    """The tools among which a choice chooses; ``tools`` and ``deferred`` are by the model's names for them."""

    tools: Mapping[str, Tool]
    deferred: Mapping[str, Tool]
    in_programs: Mapping[str, Tool]
    """The tools that programs may call, by the model's names for them."""
    servers: Mapping[str, McpServer]
    """MCP servers by label."""
    ignored: Container[str]
    """The types of tools that were left out, which a choice may name."""
    run_by_mcp: Container[str]
    """The namespaces of built-in tools that an MCP server of the operator runs."""

    def chosen(self, choice: params.ToolChoice) -> tuple[Mode, tuple[ToolKey, ...] | None]:
        """Return the mode, and the keys of the tools that may be called, or None if all may be.

        Raises `InvalidRequest` for a choice of a tool that there is not.
        """
        match choice:
            case "auto" | "none" | "required":
                return choice, None
            case params.AllowedTools():
                return choice.mode, self._allowed(choice.tools, "tool_choice.tools[{}]")
            case params.ChosenTool() | params.ChosenServer() | params.OtherChoice():
                return "required", self._allowed([choice], "tool_choice")

    def _allowed(self, choices: Sequence[params.AllowedTool], path: str) -> tuple[ToolKey, ...]:
        """Return the keys of the chosen tools, each once; ``path`` has ``{}`` for the position of a choice."""
        groups = defaultdict[tuple[str, str | None], list[ToolKey]](list)
        for tool in {**self.tools, **self.deferred, **self.in_programs}.values():
            groups[kind_of(tool), tool.name].append(tool_key(tool))
            groups[kind_of(tool), None].append(tool_key(tool))
            groups["namespace", tool.namespace].append(tool_key(tool))
        allowed = dict[ToolKey, None]()
        for choice in dict.fromkeys(choices):
            try:
                allowed |= dict.fromkeys(self._keys_of(choice, groups))
            except InvalidRequest as error:
                error.param = path.format(choices.index(choice))
                raise
        return tuple(allowed)

    def is_only_in_programs(self, key: ToolKey) -> bool:
        """Return True if only programs may call a tool that a choice names."""
        server = self.servers.get(key[0] or "")
        if server is not None:
            return server.callers == "programs"
        return any(tool_key(tool) == key and name not in self.tools for name, tool in self.in_programs.items())

    def _keys_of(self, choice: params.AllowedTool, groups: _Groups) -> Sequence[ToolKey]:
        match choice:
            case params.OtherChoice(type=kind):
                return self._chosen_type(kind, groups)
            case params.ChosenServer():
                return self._chosen_server(choice, groups)
            case params.ChosenTool():
                keys = self._named(choice, groups)
            case params.ChosenNamespace():
                keys = groups.get((choice.type, choice.name), ())
        if not keys:
            raise bad_choice(f"There is no {choice.type} tool named {shortened(choice.name)!r}.")
        return keys

    def _chosen_type(self, kind: str, groups: _Groups) -> Sequence[ToolKey]:
        """Return the tools of this type; empty for a tool that was left out."""
        keys = [key for tool_kind in kinds_of(kind) for key in groups.get((tool_kind, None), ())]
        if not keys and kind not in self.ignored:
            raise bad_choice(f"There is no tool of type {shortened(kind)!r} in this request.")
        return keys

    def _chosen_server(self, choice: params.ChosenServer, groups: _Groups) -> Sequence[ToolKey]:
        """Return the tools of a server, or of the built-in tool that its label enables.

        A server's tools may not be listed yet, so the key may stand for any of them.
        """
        label, name = choice.server_label, choice.name
        if label in self.servers:
            allowed = self.servers[label].allowed
            if name is None or allowed is None or allowed.names is None or name in allowed.names:
                return [(label, name or wire.ANY_NAME)]
        elif (kind := kinds().by_label.get(label)) and (keys := groups.get((kind.namespace, None), ())):
            if kind.namespace in self.run_by_mcp and name is not None:  # the operator's server may have more functions
                return [(kind.namespace, name)]
            if chosen := [key for key in keys if name in (None, key[1])]:
                return chosen
        raise bad_choice(f"There is no such tool of an MCP server labelled {shortened(label)!r}.")

    def _named(self, choice: params.ChosenTool, groups: _Groups) -> Sequence[ToolKey]:
        name = f"{choice.namespace or FUNCTIONS}.{choice.name}"
        tool = self.tools.get(name) or self.deferred.get(name) or self.in_programs.get(name)
        if tool is not None and kind_of(tool) == choice.type:
            return (tool_key(tool),)
        return groups.get((choice.type, choice.name), ()) if choice.namespace is None else ()


def kind_of(tool: Tool) -> str:
    """Return the name of the tool's kind in a tool choice: its type, or the built-in tool that it belongs to."""
    match tool:
        case wire.FunctionTool():
            return tool.form
        case wire.HostedTool():
            return tool.namespace
        case _:
            return "custom"


def bad_choice(message: str) -> InvalidRequest:
    """Return the error about a choice."""
    return InvalidRequest(message, param="tool_choice")
