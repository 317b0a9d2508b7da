"""The server under test of real clients, the servers that it uses for its tools, and Codex as a client.

These tests run where nothing of penstock is installed, so this module imports nothing of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

HOST = "localhost"
"""The tiny model reads this name and the port behind it in its search results.

It is sure of what it does next with this name and a port of `free_port`, but not with an address or a higher port."""

PAGE = "<title>vLLM</title><p>A library for inference and serving."


def search(query: str) -> str:
    """Search the documentation."""
    return f"{query}: a pipe that leads water to a turbine"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def found(request: Request) -> JSONResponse:
    """An answer of SearXNG."""
    return JSONResponse({"results": [{"url": f"{request.base_url}vllm", "title": "vLLM"}]})


async def page(_: Request) -> HTMLResponse:
    """The page that is read."""
    return HTMLResponse(PAGE)


def application() -> Starlette:
    """All of them: the MCP server is at /mcp."""
    server = MCPServer("neighbour", log_level="CRITICAL")
    for tool in (search, add):
        server.add_tool(tool)
    app = server.streamable_http_app()
    app.router.routes += [Route("/search", found), Route("/vllm", page)]
    return app


@contextmanager
def running_neighbours() -> Iterator[str]:
    """Their base URL, for the length of the block."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", free_port()))
        server = uvicorn.Server(uvicorn.Config(application(), log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://{HOST}:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


Json = dict[str, Any]

CODEX_PROGRAM = ROOT / "tests/live/codex/node/node_modules/@openai/codex/bin/codex.js"


@dataclass(frozen=True)
class Codex:
    """The program, and the project that it works on."""

    node: str
    home: Path
    project: Path

    def events(self, *arguments: str) -> list[Json]:
        """The events of one run of ``codex exec``, which must succeed."""
        command = [self.node, str(CODEX_PROGRAM), "exec", *arguments, "--json", "--skip-git-repo-check"]
        command.append("--dangerously-bypass-approvals-and-sandbox")
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "CODEX_HOME": str(self.home)}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command,
            cwd=self.project,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, errors = process.communicate(timeout=PATIENCE)
            finally:  # the program is a child of the one that was started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, output + errors
        return [json.loads(line) for line in output.splitlines()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--serve", required=True, help="command that starts a server with the tiny model")
    parser.addoption("--behind", help="command that starts a vLLM server for --serve to generate with")
    parser.addoption("--node", default="node", help="Node 22 or newer")


@pytest.fixture(scope="session")
def neighbours() -> Generator[str, None, None]:
    """The base URL of the servers that the one under test uses for its tools."""
    with running_neighbours() as url:
        yield url


@pytest.fixture(scope="session")
def documents(neighbours: str) -> str:
    """The URL of an MCP server."""
    return f"{neighbours}/mcp"


@dataclass(frozen=True)
class Server:
    """The server under test."""

    url: str
    log: Path


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, neighbours: str, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Server, None, None]:
    """The server that the command ``--serve`` starts, and the one behind it."""
    folder = tmp_path_factory.mktemp("serve")
    command = [*shlex.split(request.config.getoption("--serve")), f"--store={folder}/store.sqlite3"]
    command += ["--allow-address=127.0.0.1", f"--web-search=searxng={neighbours}"]
    with ExitStack() as ending:
        if behind := request.config.getoption("--behind"):
            command.append(f"--engine={ending.enter_context(running(shlex.split(behind), folder / 'vllm.log'))}")
        log = folder / "serve.log"
        yield Server(ending.enter_context(running(command, log)) + "/v1", log)


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    """The base URL that clients are given."""
    return server.url


@pytest.fixture(scope="session")
def shell(server: Server) -> None:
    """Skip the test if the machine offers the server no sandbox for commands."""
    found = re.search(r"Shell for the model: (.*)", server.log.read_text())
    assert found
    if not found[1].startswith("container: "):
        pytest.skip(found[1])


@contextmanager
def running(command: list[str], log: Path) -> Iterator[str]:
    """The URL of the server that a command starts at any free port."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running_process([*command, "--host=127.0.0.1", f"--port={port}"], f"{url}/health", log):
        yield url
