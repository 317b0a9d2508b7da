"""The check of `penstock check` that lists the tools of the MCP servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.api.settings import Settings
from penstock.api.start.assembly import mcp_servers
from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.tools import McpServer
from penstock.services.tools import ServerUnavailable


async def check(settings: Settings) -> str:
    """List the tools of the MCP servers."""
    servers = McpServers(mcp_servers(settings))
    try:
        return await listed(servers, settings.mcp_config, settings.tool_timeout)
    finally:
        await servers.close()


async def listed(servers: McpServers, file: Path | None, seconds: float) -> str:
    """Describe the tools of the MCP servers in a file.

    Raise `CannotRun` if a server has not listed them within ``seconds``.
    """
    labels = sorted(servers.labels)
    listings = await asyncio.gather(
        *(servers.tools(McpServer(label), seconds) for label in labels), return_exceptions=True
    )
    found: list[str] = []
    silent: list[str] = []
    for label, listing in zip(labels, listings, strict=True):
        if isinstance(listing, ServerUnavailable):
            silent.append(f"{label}: it does not answer as an MCP server: {listing}")
        elif isinstance(listing, BaseException):
            raise listing
        else:
            found.append(f"{label} ({counted(len(listing), 'tool')})")
    if silent:
        raise CannotRun(f"--mcp-config {file}: {'; '.join(silent)}")
    return ", ".join(found) or "no servers"
