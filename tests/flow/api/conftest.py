from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import openai
import pytest

from penstock.stages.models.harmony.vocabulary import HarmonyEncoding
from penstock.stages.services.sandbox.probe import Sandbox
from tests.support.api_clients import openai_client
from tests.support.mcp_servers import HttpServers, http_servers
from tests.support.sandboxes import available
from tests.support.server import PacedEngine, PacedServer, running_server, script


@pytest.fixture
def models() -> tuple[str, ...]:
    """The names under which the server offers its model."""
    return ("tiny",)


@pytest.fixture
def where(tmp_path: Path) -> Path | str:
    """The location of the server's store."""
    return tmp_path


@pytest.fixture
async def served(
    encoding: HarmonyEncoding, where: Path | str, models: tuple[str, ...]
) -> AsyncGenerator[PacedServer, None]:
    """A server whose engine says hello."""
    async with running_server(PacedEngine(script(encoding)), encoding, where, models=models) as served:
        yield served


@pytest.fixture
async def sdk(served: PacedServer) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    """openai-python as its client."""
    async with openai_client(served.url) as client:
        yield client


@pytest.fixture(scope="session")
def http() -> Iterator[HttpServers]:
    """MCP servers of all kinds over HTTP, for all tests."""
    with http_servers() as servers:
        yield servers


@pytest.fixture(scope="session")
def sandbox() -> Sandbox:
    """A sandbox for code."""
    return asyncio.run(available("python"))
