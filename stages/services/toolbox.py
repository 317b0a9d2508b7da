"""The tools that the server runs for the model, as the operator configured them.

Each host comes through the door: it is an entry point of the group ``penstock.hosts``, a function that takes the
`HostSettings`.  Nothing here imports a host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from typing import Any

from penstock.pipeline.plugins import HOSTS, function_named
from penstock.pipeline.protocol.tools import HOSTED
from penstock.stages.services.tools import Host, HostSettings, ReplacingServers, Toolbox

_MCP = "mcp"
"""The entry point that opens the MCP servers, some of which may run a built-in tool."""


async def open_toolbox(settings: HostSettings) -> Toolbox:
    """Return the tools of these settings.

    An MCP server of the operator replaces the built-in tool of the same kind.
    """
    servers: ReplacingServers = await _opened(_MCP, settings)
    hosts: dict[str, Host] = {}
    for kind in HOSTED:
        if host := servers.host(kind) or await _opened(kind, settings):
            hosts[kind] = host
    return Toolbox(hosts, servers)


async def _opened(name: str, settings: HostSettings) -> Any:
    """Return what the entry point of that name opens; None if it is not to be had here."""
    opens: Callable[[HostSettings], Awaitable[object] | object] = function_named(name, group=HOSTS)
    opened = opens(settings)
    return await opened if isawaitable(opened) else opened
