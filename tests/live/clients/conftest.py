"""One real server for all clients: what the command ``--serve`` starts, or the one that ``--server`` names.

With ``--behind``, a command that starts a `vllm serve`, that one is its engine.

These tests run in an environment of their own (`make clients`), as the users of a server do: nothing of penstock's is
installed beside the clients.  To try them against a server that runs already, with ``--allow-address 127.0.0.1`` and
without web search:

    make clients ARGS="--server http://127.0.0.1:8000/v1"
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from tests.support.client_server import neighbours, pytest_addoption, pytest_sessionstart, url

__all__ = ["pytest_addoption", "pytest_sessionstart", "url"]

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or importing it asks the network for prices


NEIGHBOURS = pytest.StashKey[str]()


def pytest_configure(config: pytest.Config) -> None:
    """Start what the server is told of when it starts."""
    ending = ExitStack()
    config.add_cleanup(ending.close)
    base = config.stash[NEIGHBOURS] = ending.enter_context(neighbours())
    if config.option.serve:
        config.option.serve += f" --allow-address 127.0.0.1 --web-search searxng={base}"


@pytest.fixture(scope="session")
def documents(request: pytest.FixtureRequest) -> str:
    """The URL of an MCP server."""
    return f"{request.config.stash[NEIGHBOURS]}/mcp"


@pytest.fixture(scope="session")
def searching(request: pytest.FixtureRequest) -> None:
    """The server can search the web of its neighbours."""
    if request.config.getoption("--server"):
        pytest.skip("only a server that was started here knows where to search")
