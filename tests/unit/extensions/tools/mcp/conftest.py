from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.services.mcp_config import ServerConfig
from penstock.services.web.ssrf import AllowedNetworks
from tests.support.mcp_servers import LOCAL, HttpServers, MakeServers, http_servers


@pytest.fixture(scope="session")
def http() -> Iterator[HttpServers]:
    with http_servers() as servers:
        yield servers


@pytest.fixture
async def make() -> AsyncIterator[MakeServers]:
    """A factory of `McpServers`.  At the end they are closed, and no task of theirs may be left."""
    made: list[McpServers] = []

    def make(
        servers: dict[str, ServerConfig] | None = None, allowed: AllowedNetworks = LOCAL, **settings: Any
    ) -> McpServers:
        made.append(McpServers(servers or {}, allowed, **settings))
        return made[-1]

    yield make
    for servers in made:
        await servers.close()
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
