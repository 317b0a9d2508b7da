"""MCP server processes, and the ways to reach them.

A process costs about a second, so start one for a whole module (`stdio_config`, `http_servers`).  The kinds: ``good``
has tools of every behaviour, ``many`` lists a thousand tools in pages, and ``endless`` lists pages without a last one.
``python``, ``browser`` and ``container`` replace the built-in tools, and ``counting`` counts its calls.  Over HTTP
alone, ``guarded`` requires a header, ``away`` redirects, ``broken`` answers with an error, ``mute`` never answers,
``legacy`` knows only the older handshake, and ``events`` knows only SSE.
`tests.support.mcp_tools` has their tools.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.error import URLError

from penstock.extensions.tools.mcp.mcp_servers import McpServers
from penstock.services.mcp_config import HttpServer, ServerConfig, StdioServer
from penstock.services.web.ssrf import AllowedNetworks
from tests.support.paths import ROOT
from tests.support.processes import free_port

STARTING = 240.0
"""Seconds after which a start has failed."""


def stdio_config(kind: str = "good", **env: str) -> dict[str, Any]:
    """The settings of a server that is started as a child."""
    return {"command": sys.executable, "args": ["-m", "tests.support.mcp_tools", kind], "cwd": str(ROOT), "env": env}


@dataclass
class HttpServers:
    """A process that serves all kinds."""

    port: int
    process: subprocess.Popen[bytes] | None = None

    def url(self, kind: str = "good", over: str = "mcp") -> str:
        """Return the URL of a kind; ``over`` is mcp or sse."""
        return f"http://127.0.0.1:{self.port}/{kind}/{over}"

    def state(self) -> dict[str, Any]:
        """Return the counts of the server, and the headers of the latest request of each path."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/state") as answer:
            state: dict[str, Any] = json.load(answer)
        return state

    def start(self) -> None:
        command = (sys.executable, "-m", "tests.support.mcp_tools", "--port", str(self.port))
        self.process = subprocess.Popen(command, cwd=ROOT)
        end = time.monotonic() + STARTING
        while not self._answers():
            assert self.process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.03)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _answers(self) -> bool:
        try:
            return bool(self.state())
        except (URLError, ConnectionError):
            return False


@contextmanager
def http_servers() -> Iterator[HttpServers]:
    """All kinds over HTTP for the length of the block; it blocks while they start, so use it in a sync fixture."""
    servers = HttpServers(free_port())
    servers.start()
    try:
        yield servers
    finally:
        servers.kill()


LOCAL = AllowedNetworks.parse(["127.0.0.1"])
"""The networks that all servers of tests are in."""

PATIENT = 60.0
"""Seconds after which a short wait has failed."""


class MakeServers(Protocol):
    """A function that makes `McpServers`, closed when the test ends."""

    def __call__(
        self, servers: dict[str, ServerConfig] | None = None, allowed: AllowedNetworks = LOCAL, **settings: Any
    ) -> McpServers: ...


def stdio_server(kind: str = "good", **env: str) -> StdioServer:
    """A server that is started as a child."""
    config = stdio_config(kind, **env)
    return StdioServer(config["command"], tuple(config["args"]), config["env"], config["cwd"])


def server_over(over: str, http: HttpServers) -> ServerConfig:
    """The server with all tools, over one transport."""
    match over:
        case "stdio":
            return stdio_server(GIVEN="to it")
        case "legacy":
            return HttpServer(http.url("legacy"))
        case _:
            return HttpServer(http.url("good", over))
