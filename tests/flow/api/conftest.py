from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import cast

import anthropic
import openai
import pytest

from penstock.extensions.tools.sandbox.probe import Sandbox
from tests.support.api_clients import openai_client
from tests.support.mcp_servers import HttpServers, http_servers
from tests.support.messages import anthropic_client
from tests.support.sandboxes import available
from tests.support.server import PacedEngine, PacedServer, running_server, script


@pytest.fixture
def models() -> tuple[str, ...]:
    return ("tiny",)


@pytest.fixture
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """The store of a server: in both databases in turn if the test uses `store_at`, else a file."""
    uses_both = "store_at" in request.fixturenames
    return cast("str", request.getfixturevalue("store_at")) if uses_both else tmp_path


@pytest.fixture
async def served(where: Path | str, models: tuple[str, ...]) -> AsyncGenerator[PacedServer, None]:
    async with running_server(PacedEngine(script(), models=models), where) as served:
        yield served


@pytest.fixture
async def sdk(served: PacedServer) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai_client(served.url) as client:
        yield client


@pytest.fixture
async def claude(served: PacedServer) -> AsyncGenerator[anthropic.AsyncAnthropic, None]:
    async with anthropic_client(served.url) as client:
        yield client


@pytest.fixture(scope="session")
def http() -> Iterator[HttpServers]:
    with http_servers() as servers:
        yield servers


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    return asyncio.run(available("python"))


@pytest.fixture(scope="session")
def program_sandbox() -> Sandbox:
    return asyncio.run(available("program"))
