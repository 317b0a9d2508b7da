"""The tools that the server runs for the model, as the operator configured them.

Each host comes through the door: it is an entry point of the group ``penstock.hosts``, a function that takes the
`HostSettings`.  Nothing here imports a host.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from inspect import isawaitable
from typing import Any

from penstock.pipeline.hosted_kinds import kinds
from penstock.pipeline.plugins import HOSTS, TOOL, WrongPlugin, function_named, optional_function
from penstock.services.containers import Containers
from penstock.services.own_hosts import label_of, own_host
from penstock.services.tools import Host, HostSettings, NoServers, OwnHost, ReplacingServers, Toolbox

_CONTAINERS = "containers"
"""The entry point that opens the containers in which other hosts run their calls."""

_MCP = "mcp"
"""The entry point that opens the MCP servers, some of which may run a built-in tool."""

_SET_UP_BY = {_MCP: "mcp_config", "browser": "web_search", "file_search": "embeddings"}
"""The settings by which an operator sets up what an entry point opens, whether it is installed or not."""


async def open_toolbox(settings: HostSettings, own: Sequence[str] = ()) -> Toolbox:
    """Return the tools of these settings, and those whose hosts, or whose kinds, the operator names: ``own``.

    An MCP server of the operator replaces the built-in tool of the same kind.  Raises `WrongPlugin` for a wrong host.
    """
    for name, setting in _SET_UP_BY.items():
        if getattr(settings, setting):
            function_named(name, f"--{setting.replace('_', '-')}", HOSTS)  # it must not be left out
    async with AsyncExitStack() as opened:
        servers: ReplacingServers = await _opened(_MCP, settings) or NoServers()
        opened.push_async_callback(servers.close)
        containers: Containers | None = await _opened(_CONTAINERS, settings)
        if containers:
            opened.push_async_callback(containers.close)
            settings = replace(settings, containers=containers)
        hosts: dict[str, Host] = {}
        for kind in kinds().offered(own):
            if host := servers.host(kind) or await _opened(kind, settings):
                hosts[kind] = host
                opened.push_async_callback(host.close)
            elif kind in own:
                function_named(kind, TOOL, HOSTS)  # which says why there is none
                raise WrongPlugin(kind, "its host cannot run here", TOOL)
        own_hosts: dict[str, OwnHost] = {}
        for name in (name for name in own if name not in kinds()):
            if (label := label_of(name)) in servers.labels:
                raise WrongPlugin(name, f"--mcp-config has a server {label}, too", TOOL)
            own_hosts[label] = await own_host(name, settings)
            opened.push_async_callback(own_hosts[label].close)
        opened.pop_all()
        return Toolbox(hosts, servers, own_hosts, containers=containers)


async def _opened(name: str, settings: HostSettings) -> Any:
    """Return what the entry point of that name opens; None if it is not to be had here."""
    opens: Callable[[HostSettings], Awaitable[object] | object] | None = optional_function(name, HOSTS)
    opened = opens(settings) if opens else None
    return await opened if isawaitable(opened) else opened
