"""Check: verify what a server needs, without loading its model."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from penstock.api.cli.mistakes import explained
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.logs import counted
from penstock.pipeline.protocol.tools import McpServer
from penstock.stages.services.mcp.mcp_servers import McpServers
from penstock.stages.services.tools import ServerUnavailable

Check: TypeAlias = Callable[[], Awaitable[str]]
"""A check: it describes what it found, or raises the error that ends the start of a server."""


async def all_pass(checks: Mapping[str, Check], errors: tuple[type[Exception], ...], arguments: Sequence[str]) -> bool:
    """Run all checks, and print what each found; return False if one has raised any of ``errors``.

    Options that an error names are shown where the operator set them, on the command line ``arguments`` or elsewhere.
    """
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok     {name}: {await check()}", flush=True)
        except errors as error:
            failed += 1
            print(f"wrong  {name}: {explained(error, arguments)}", flush=True)
    return not failed


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


def without_password(store: str) -> str:
    """Return the setting ``store`` as it may be shown."""
    if "://" not in store:
        return store
    password = urlsplit(store).password
    shown = store.replace(f":{password}@", ":***@") if password else store
    return re.sub(r"([?&](ssl)?password=)[^&]+", r"\1***", shown)
