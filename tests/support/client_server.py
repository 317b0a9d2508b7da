"""The server under test of real clients, the servers that it uses for its tools, and Codex as a client.

These tests run where nothing of penstock is installed, so this module imports nothing of it.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import urllib.request
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
from tests.support.processes import free_port

PORT = 40857
"""The tiny model reads it, and what it does next hangs on every token: with this one it was seen to go on."""

PAGE = "<title>vLLM</title><p>A library for inference and serving."


def search(query: str) -> str:
    """Search the documentation."""
    return f"{query}: a pipe that leads water to a turbine"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def found(request: Request) -> JSONResponse:
    """What SearXNG would answer."""
    return JSONResponse({"results": [{"url": f"{request.base_url}vllm", "title": "vLLM"}]})


async def page(_: Request) -> HTMLResponse:
    """What there is to read."""
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
def neighbours() -> Iterator[str]:
    """Their base URL, for the length of the block."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", PORT))
        except OSError:  # somebody else has it
            listening.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(application(), log_level="critical", ws="none"))
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


Json = dict[str, Any]

CODEX_PROGRAM = ROOT / "tests/live/codex/node/node_modules/@openai/codex/bin/codex.js"
CODEX_SECONDS = 180


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
                output, errors = process.communicate(timeout=CODEX_SECONDS)
            finally:  # the program is a child of the one that was started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, output + errors
        return [json.loads(line) for line in output.splitlines()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", help="base URL of a running server with the tiny model")
    parser.addoption("--serve", help="command that starts a server with the tiny model")
    parser.addoption("--behind", help="command that starts a vLLM server for --serve to generate with")
    parser.addoption("--node", default="node", help="Node 22 or newer")


def pytest_sessionstart(session: pytest.Session) -> None:
    if not (session.config.getoption("--server") or session.config.getoption("--serve")):
        raise pytest.UsageError("a server is needed: --serve COMMAND, or --server URL")


@pytest.fixture(scope="session")
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The base URL that clients are given."""
    if running := request.config.getoption("--server"):
        yield running
        return
    folder = tmp_path_factory.mktemp("serve")
    command = [*shlex.split(request.config.getoption("--serve")), f"--store={folder}/store.sqlite3"]
    with ExitStack() as ending:
        if behind := request.config.getoption("--behind"):
            command.append(f"--engine={ending.enter_context(started(shlex.split(behind), folder / 'vllm.log'))}")
        yield ending.enter_context(started(command, folder / "serve.log")) + "/v1"


@contextmanager
def started(command: list[str], log: Path) -> Generator[str, None, None]:
    """Where the server of that command answers, for the length of the block."""
    port = free_port()
    with log.open("wb") as output:
        server = subprocess.Popen([*command, "--host=127.0.0.1", f"--port={port}"], stdout=output, stderr=output)
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


def wait_for(health: str, server: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1500):
        assert server.poll() is None, "the server has ended:\n" + log.read_text(errors="replace")[-4000:]
        try:
            with urllib.request.urlopen(health, timeout=1):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(health + "\n" + log.read_text(errors="replace")[-4000:])
