"""The server under test of real clients, the servers that it uses for its tools, and Codex as a client.

These tests run in an environment without penstock, so this module imports nothing of it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib import request as urls

import pytest
import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from tests.support.launched_agents import AgentServer, agent_server, obeying_engine, run, tiny_engine
from tests.support.paths import ROOT
from tests.support.processes import free_port, running_process

HOST = "localhost"
"""The host name of the servers that tools reach; the tiny model reads it, with the port, in its search results.

The model's next step is certain with this name and a port of `free_port`, but not with an address or a higher port."""

GREETING = """+++
model = "tiny-gpt-oss"
input = "Say {{word}}."
+++
You greet people.
"""
"""The prompt ``greeting`` of the server."""

FAILING_KEY = "sk-failing-0123456789"
USED_UP_KEY = "sk-used-up-0123456789"
"""The keys of the server that fails; one has used up its tokens."""

PAGE = "<title>vLLM</title><p>A library for inference and serving."


def search(query: str) -> str:
    """Search the documentation."""
    return f"{query}: a pipe that leads water to a turbine"


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


async def found(request: Request) -> JSONResponse:
    """Answer a search as SearXNG does."""
    return JSONResponse({"results": [{"url": f"{request.base_url}vllm", "title": "vLLM"}]})


async def page(_: Request) -> HTMLResponse:
    """Return the page that the search finds."""
    return HTMLResponse(PAGE)


def application() -> Starlette:
    """Serve the MCP server at /mcp, the search at /search, and the page at /vllm."""
    server = MCPServer("neighbour", log_level="CRITICAL")
    for tool in (search, add):
        server.add_tool(tool)
    app = server.streamable_http_app()
    app.router.routes += [Route("/search", found), Route("/vllm", page)]
    return app


@contextmanager
def running_neighbours() -> Iterator[str]:
    """Run these servers for the length of the block; yield their base URL."""
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

CODEX_EXEC = (
    *("exec", "--json", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
    *("-c", "include_environment_context=false", "-c", "skills.include_instructions=false"),
)
"""The arguments of a request to Codex, before its text.

Without the two settings, the prompt names folders and the date.  The tiny model writes a wrong patch in some folders.
"""


@dataclass(frozen=True)
class Codex:
    """The Codex program, its home folder, and the project that it works on."""

    node: str
    home: Path
    project: Path

    def events(self, *arguments: str) -> list[Json]:
        """The events of one run of ``codex exec``, which must succeed."""
        command = [self.node, str(CODEX_PROGRAM), *CODEX_EXEC, *arguments]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "CODEX_HOME": str(self.home)}
        ended = run(command, self.project, environment)
        assert ended.status == 0, ended
        return [json.loads(line) for line in ended.out.splitlines()]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--serve", required=True, help="command that starts a server with the tiny model")
    parser.addoption("--behind", help="command that starts a vLLM server for --serve to generate with")
    parser.addoption("--node", default="node", help="Node 22 or newer")


@pytest.fixture(scope="session")
def neighbours() -> Generator[str, None, None]:
    """The base URL of the servers that the tools of the server under test reach."""
    with running_neighbours() as url:
        yield url


@pytest.fixture(scope="session")
def documents(neighbours: str) -> str:
    return f"{neighbours}/mcp"


@dataclass(frozen=True)
class Server:
    """The server under test."""

    url: str
    log: Path
    store: Path


@pytest.fixture(scope="session")
def server(
    request: pytest.FixtureRequest, neighbours: str, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Server, None, None]:
    """The server that ``--serve`` starts; if ``--behind`` starts a vLLM server, that is its engine."""
    folder = tmp_path_factory.mktemp("serve")
    store = folder / "store.sqlite3"
    command = [*shlex.split(request.config.getoption("--serve")), f"--store={store}"]
    prompts = folder / "prompts"
    prompts.mkdir()
    (prompts / "greeting.md").write_text(GREETING)
    command += ["--allow-address=127.0.0.1", f"--web-search=searxng={neighbours}", f"--prompts={prompts}"]
    with ExitStack() as ending:
        if behind := request.config.getoption("--behind"):
            command.append(f"--engine={ending.enter_context(running(shlex.split(behind), folder / 'vllm.log'))}")
        log = folder / "serve.log"
        yield Server(ending.enter_context(running(command, log)) + "/v1", log, store)


@pytest.fixture(scope="session")
def penstock(request: pytest.FixtureRequest) -> str:
    """The command that ``--serve`` begins with."""
    return str(Path(shlex.split(request.config.getoption("--serve"))[0]).absolute())


@pytest.fixture(scope="session")
def agents(
    penstock: str, neighbours: str, tmp_path_factory: pytest.TempPathFactory
) -> Generator[AgentServer, None, None]:
    """A server for coding agents, whose model does what the user says."""
    options = ("--allow-address=127.0.0.1", f"--web-search=searxng={neighbours}")
    with agent_server(penstock, tmp_path_factory.mktemp("agents"), *options) as server:
        yield server


@pytest.fixture(scope="session")
def obeying(penstock: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The URL of a real engine for coding agents, whose model does what the user says."""
    with obeying_engine(penstock, tmp_path_factory.mktemp("obeying")) as url:
        yield url


@pytest.fixture(scope="session")
def noisy(penstock: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The URL of an engine with the same model, whose weights are a little off."""
    folder = tmp_path_factory.mktemp("noisy")
    write = [str(Path(penstock).with_name("python")), "-m", "tests.support.noisy", str(folder / "model")]
    subprocess.run(write, check=True, cwd=ROOT)
    with tiny_engine(penstock, folder, folder / "model") as url:
        yield url


@pytest.fixture(scope="session")
def programming(penstock: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The URL of a server whose model writes the programs that the user dictates, as `agent_engine` says."""
    folder = tmp_path_factory.mktemp("programming")
    engine = f"{ROOT / 'tests/support/agent_engine.py'}:engine"
    command = [penstock, "serve", f"--engine={engine}", f"--store={folder / 'store.sqlite3'}"]
    with running(command, folder / "serve.log") as url:
        yield url


@pytest.fixture(scope="session")
def failing(penstock: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[str, None, None]:
    """The URL of a server whose engine fails as the prompt says, and one of whose keys has used up its tokens."""
    folder = tmp_path_factory.mktemp("failing")
    keys, limits = folder / "keys", folder / "limits.toml"
    keys.write_text(f"{FAILING_KEY}\n{USED_UP_KEY} limits=small\n")
    keys.chmod(0o600)
    limits.write_text("[small]\ntokens_per_minute = 1\n")
    engine = f"{ROOT / 'tests/support/failing_engine.py'}:engine"
    command = [penstock, "serve", f"--engine={engine}", "--store=none", "--no-sandbox"]
    with running([*command, f"--api-key-file={keys}", f"--limits={limits}"], folder / "serve.log") as url:
        used_up = urls.Request(f"{url}/v1/responses", b'{"input": "Hi"}', {"Authorization": f"Bearer {USED_UP_KEY}"})
        used_up.add_header("Content-Type", "application/json")
        with urls.urlopen(used_up):  # its tokens are more than the key has
            yield url


@pytest.fixture(scope="session")
def url(server: Server) -> str:
    """The base URL for clients."""
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
    """Run a server command at a free port for the length of the block; yield the server's URL."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with running_process([*command, "--host=127.0.0.1", f"--port={port}"], f"{url}/health", log):
        yield url
