"""The tools that the server runs for the model, as the operator configured them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from penstock.pipeline.protocol.tools import HOSTED
from penstock.stages.services.browser.search_engines import search_backend
from penstock.stages.services.browser.session import BrowserHost
from penstock.stages.services.fair_places import FairPlaces
from penstock.stages.services.mcp.builtin_tools import McpHost
from penstock.stages.services.mcp.config import ServerConfig
from penstock.stages.services.mcp.mcp_servers import McpServers
from penstock.stages.services.sandbox.container import ContainerHost
from penstock.stages.services.sandbox.lease import Limit, unlimited
from penstock.stages.services.sandbox.probe import NoSandbox, Sandbox, probe
from penstock.stages.services.sandbox.python import PythonHost
from penstock.stages.services.tools import Host, Toolbox
from penstock.stages.services.web.ssrf import AllowedNetworks

logger = logging.getLogger(__name__)


async def open_toolbox(
    allowed: AllowedNetworks,
    configured: Mapping[str, ServerConfig],
    web_search: str | None,
    search_key: str,
    *,
    places: FairPlaces | None,
    limit: Limit = unlimited,
) -> Toolbox:
    """Return the tools of these settings; ``configured`` are the MCP servers of the operator, by label.

    ``places`` are those of sandboxes, if there are to be any, and ``limit`` limits the sandboxes of an owner.  An MCP
    server of the operator replaces the built-in tool of the same kind.
    """
    servers = McpServers(configured, allowed)
    hosts: dict[str, Host] = await _sandboxed(places, limit) if places else {}
    if web_search:
        kind, _, url = web_search.partition("=")
        hosts["browser"] = BrowserHost(search_backend(kind, url, search_key), allowed)
    own: dict[str, Host] = {kind: McpHost(servers, kind) for kind in HOSTED if kind in configured}
    return Toolbox({**hosts, **own}, servers)


async def sandboxes() -> tuple[Sandbox | NoSandbox, Sandbox | NoSandbox]:
    """Return the sandboxes of the Python tool and of the shell that work on this machine."""
    return await probe("python"), await probe("container")


async def _sandboxed(places: FairPlaces, limit: Limit) -> dict[str, Host]:
    """Return the hosts of the tools whose sandbox works on this machine, and log the result of each probe."""
    python, container = await sandboxes()
    hosts: dict[str, Host] = {}
    if isinstance(python, Sandbox):
        hosts["python"] = PythonHost(python, places, limit)
    if isinstance(container, Sandbox):
        hosts["container"] = ContainerHost(container, places, limit)
    for name, probed in (("Python", python), ("Shell", container)):
        is_late = isinstance(probed, Sandbox) and probed.is_late
        logger.log(logging.WARNING if is_late else logging.INFO, "%s for the model: %s", name, probed.describe())
    return hosts
