"""One real server for all clients: what the command ``--serve`` starts, or the one that ``--server`` names.

With ``--behind``, a command that starts a `vllm serve`, that one is its engine.

These tests run in an environment of their own (`make clients`), as the users of a server do: nothing of penstock's is
installed beside the clients.  To try them against a server that runs already, with ``--allow-address 127.0.0.1`` and
without web search:

    make clients ARGS="--server http://127.0.0.1:8000/v1"
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.support.client_neighbours import neighbours
from tests.support.ports import free_port

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing it asks the network for prices


NEIGHBOURS = pytest.StashKey[str]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", help="base URL of a running server with the tiny model")
    parser.addoption("--serve", help="command that starts a server with the tiny model")
    parser.addoption("--behind", help="command that starts a vLLM server for --serve to generate with")
    parser.addoption("--node", default="node", help="Node 22 or newer")


def pytest_configure(config: pytest.Config) -> None:
    """Start what the server is told of when it starts."""
    ending = ExitStack()
    config.add_cleanup(ending.close)
    base = config.stash[NEIGHBOURS] = ending.enter_context(neighbours())
    if config.option.serve:
        config.option.serve += f" --allow-address 127.0.0.1 --web-search searxng={base}"


def pytest_sessionstart(session: pytest.Session) -> None:
    if not (session.config.getoption("--server") or session.config.getoption("--serve")):
        raise pytest.UsageError("a server is needed: --serve COMMAND, or --server URL")


@pytest.fixture(scope="session")
def documents(request: pytest.FixtureRequest) -> str:
    """The URL of an MCP server."""
    return f"{request.config.stash[NEIGHBOURS]}/mcp"


@pytest.fixture(scope="session")
def searching(request: pytest.FixtureRequest) -> None:
    """The server can search the web of its neighbours."""
    if request.config.getoption("--server"):
        pytest.skip("only a server that was started here knows where to search")


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
