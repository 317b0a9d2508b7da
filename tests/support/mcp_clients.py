"""Ways to the servers that tests start."""

from __future__ import annotations

from typing import Any, Protocol

from stages.converse.mcp.config import HttpServer, ServerConfig, StdioServer
from stages.converse.mcp.servers import McpServers
from stages.guard import AllowedNetworks
from tests.support.mcp_servers import HttpServers, stdio_config

LOCAL = AllowedNetworks.parse(["127.0.0.1"])
"""Where the servers of tests are."""

PATIENT = 60.0
"""Seconds for what takes a fraction of one, unless the machine is busy."""


class Make(Protocol):
    """Makes `McpServers` that are closed when the test ends."""

    def __call__(
        self, servers: dict[str, ServerConfig] | None = None, allowed: AllowedNetworks = LOCAL, **settings: Any
    ) -> McpServers: ...


def child(kind: str = "good", **env: str) -> StdioServer:
    """A server that is started as a child."""
    config = stdio_config(kind, **env)
    return StdioServer(config["command"], tuple(config["args"]), config["env"], config["cwd"])


def reached(over: str, http: HttpServers) -> ServerConfig:
    """The server with all tools, over one of the ways to it."""
    match over:
        case "stdio":
            return child(GIVEN="to it")
        case "legacy":
            return HttpServer(http.url("legacy"))
        case _:
            return HttpServer(http.url("good", over))
