"""Tools of MCP servers for the model: list them, keep those the request allows, and apply its approval rules."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from msgspec import UNSET
from msgspec.structs import replace

from penstock.pipeline.frames import CallFinished, ListedTools, ResolvedRequest, with_facts
from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.protocol.items import Item, ListedTool, McpListTools, of_type
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.tools import (
    ANY_NAME,
    HostedTool,
    McpServer,
    McpTool,
    Tool,
    ToolFilter,
    Toolset,
    tool_key,
)
from penstock.pipeline.tasks import MANY_VALUES, apart
from penstock.services.tools import Declaration, Declaring, Host, ServerUnavailable, Toolbox, callable_tools

logger = logging.getLogger(__name__)


async def list_tools(server: McpServer, toolbox: Toolbox, seconds: float) -> CallFinished:
    """Request the tools of a server; return an error instead of raising it: a failing server only offers no tools."""
    try:
        async with asyncio.timeout(seconds):
            tools = await toolbox.tools(server, seconds)
            _warn_of_missing(server, tools)
            return CallFinished(data=ListedTools(tools))
    except ServerUnavailable as error:
        return CallFinished(error=str(error))
    except TimeoutError:
        return CallFinished(error=f"The server did not answer within {seconds:g} seconds.")
    except Exception:  # the host may be the operator's: the response goes on without these tools
        logger.exception("Listing the tools of the MCP server %s failed", server.label)
        return CallFinished(error="Internal error.")


def _warn_of_missing(server: McpServer, listed: Iterable[ListedTool]) -> None:
    allowed = server.allowed.names if server.allowed else None
    if missing := frozenset(allowed or ()).difference(tool.name for tool in listed):
        names = shortened(", ".join(sorted(missing)))
        logger.warning("The MCP server %s has none of these allowed tools: %s", server.label, names)


def known_tools(items: Iterable[Item]) -> dict[str, tuple[ListedTool, ...]]:
    """Return the tools that the conversation already lists, by server label; these servers are not listed again."""
    return {item.server_label: item.tools for item in of_type(items, McpListTools) if not item.error}


def with_mcp_tools(tools: Toolset, listed: Mapping[str, Sequence[ListedTool]]) -> Toolset:
    """Return ``tools`` with those tools of its servers added that the request lets the model, or programs, call."""
    if not tools.servers:
        return tools.limiting_programs()
    shown, deferred, loaded = list[McpTool](), list[McpTool](), frozenset(tools.loaded or ())
    in_programs = list[McpTool]()
    for server in tools.servers:
        for tool in _tools(server, listed.get(server.label, ())):
            if server.callers:
                in_programs.append(tool)
            if server.callers != "programs":
                is_shown = not server.is_deferred or tool_key(tool) in loaded
                (shown if is_shown else deferred).append(tool)
    descriptions = {server.label: server.description for server in tools.servers if server.description}
    return replace(
        tools,
        tools=(*tools.tools, *shown),
        deferred=(*(tools.deferred or ()), *deferred) or UNSET,
        descriptions={**tools.descriptions, **descriptions},
        in_programs=(*(tools.in_programs or ()), *in_programs) or tools.in_programs,
    ).limiting_programs()


async def with_declarations(request: ResolvedRequest, hosts: Mapping[str, Host], seconds: float) -> ResolvedRequest:
    """Return ``request`` with its built-in tools as the operator's servers declare them, if these run them.

    A tool that its server does not declare in time is offered as in the model's training.
    """
    tools = request.facts.tools
    kinds = await apart(len(tools.tools) > MANY_VALUES, _kinds, tools)
    if not kinds or tools.choice == "none":
        return request
    declarations = await asyncio.gather(*(_declaration(request, hosts.get(kind), kind, seconds) for kind in kinds))
    for kind, declaration in zip(kinds, declarations, strict=True):
        tools = _declared(tools, kind, declaration, tools.enabled(kind).allowed)
    return request if tools is request.facts.tools else with_facts(request, tools=tools)


def _kinds(tools: Toolset) -> dict[str, None]:
    offered = (*tools.tools, *(tools.in_programs or ()))
    return dict.fromkeys(tool.namespace for tool in offered if isinstance(tool, HostedTool))


async def _declaration(request: ResolvedRequest, host: Host | None, kind: str, seconds: float) -> Declaration | None:
    if not isinstance(host, Declaring):
        return None
    try:
        return await host.declaration(request, seconds)
    except ServerUnavailable as error:
        logger.warning("The server of the tool %s does not declare it: %s", kind, error)
        return None


def _declared(tools: Toolset, kind: str, declaration: Declaration | None, allowed: ToolFilter | None) -> Toolset:
    """Return ``tools`` with the functions of ``kind`` in the declaration, and only those that are ``allowed``."""
    if declaration is None and allowed is None:
        return tools
    functions = callable_tools(declaration.tools if declaration else kinds()[kind].tools)
    may_call = tuple(
        tool for tool in functions if allowed is None or allowed.names is None or tool.name in allowed.names
    )
    chosen = tools.allowed
    offered = (*tools.tools, *(tools.in_programs or ()))
    if chosen is not None and {tool_key(tool) for tool in offered if tool.namespace == kind}.issubset(chosen):
        chosen = (*chosen, (kind, ANY_NAME))  # all of the kind
    descriptions = {kind: declaration.description} if declaration and declaration.description else {}
    return replace(
        tools,
        tools=_with_functions(tools.tools, kind, may_call),
        in_programs=UNSET if tools.in_programs is UNSET else _with_functions(tools.in_programs, kind, may_call),
        allowed=chosen,
        descriptions={**tools.descriptions, **descriptions},
    )


def _with_functions(tools: Sequence[Tool], kind: str, functions: Iterable[HostedTool]) -> tuple[Tool, ...]:
    """Return tools with these functions in the place of those of their kind, if there are any."""
    places = [at for at, tool in enumerate(tools) if tool.namespace == kind]
    others = [tool for tool in tools if tool.namespace != kind]
    return (*others[: places[0]], *functions, *others[places[0] :]) if places else tuple(tools)


def _tools(server: McpServer, listed: Iterable[ListedTool]) -> Iterable[McpTool]:
    for tool in callable_tools(listed):
        if server.allowed is None or _matches(server.allowed, tool):
            yield McpTool(
                server.label,
                name=tool.name,
                description=tool.description or None,
                parameters=tool.input_schema,
                needs_approval=_needs_approval(server, tool),
            )


def _needs_approval(server: McpServer, tool: ListedTool) -> bool:
    """Return True if the client has to approve calls of the tool; if ``always`` and ``never`` both match, it has to."""
    if server.always is not None and _matches(server.always, tool):
        return True
    if server.never is not None and _matches(server.never, tool):
        return False
    return server.approves_rest


def _matches(rule: ToolFilter, tool: ListedTool) -> bool:
    is_read_only = (tool.annotations or {}).get("readOnlyHint") is True
    named = rule.names is None or tool.name in rule.names
    return named and (rule.read_only is None or rule.read_only == is_read_only)
