from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, cast

import pytest

from penstock.extensions.tools.sandbox.container import ContainerSession
from penstock.extensions.tools.sandbox.plan import MODES, Mode
from penstock.extensions.tools.sandbox.probe import Sandbox
from penstock.extensions.tools.sandbox.python import PythonSession
from penstock.services.tools import Host
from tests.support.sandboxes import available, code_host, shell_host
from tests.support.scripted_tools import NO_CONVERSATION, RunCell


@pytest.fixture(scope="session", params=MODES)
def mode(request: pytest.FixtureRequest) -> Mode:
    return cast("Mode", request.param)


@pytest.fixture(scope="session")
def python_sandbox(mode: Mode) -> Sandbox:
    return asyncio.run(available("python", (mode,)))


@pytest.fixture(scope="session")
def container_sandbox(mode: Mode) -> Sandbox:
    return asyncio.run(available("container", (mode,)))


def small_one(sandbox: Sandbox) -> Sandbox:
    limits = replace(sandbox.plan.limits, disk=4 << 20, flood=4 << 20)
    return Sandbox(replace(sandbox.plan, limits=limits))


@asynccontextmanager
async def session_of(host: Host) -> AsyncIterator[Any]:
    """Open a session of a host for the length of the block, and close both."""
    session = host.session(NO_CONVERSATION)
    yield session
    await session.close()
    await host.close()


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of a command take as long as a busy machine needs for all of its processes."""
    monkeypatch.setattr("penstock.extensions.tools.sandbox.container._GRACE_SECONDS", 120.0)


@pytest.fixture
async def python(python_sandbox: Sandbox) -> AsyncIterator[PythonSession]:
    """A session that has started, so that tests can give their cells little time."""
    async with session_of(code_host(python_sandbox)) as session:
        await session.run("python", "None", 120)
        yield session


@pytest.fixture
async def small(python_sandbox: Sandbox) -> AsyncIterator[PythonSession]:
    async with session_of(code_host(small_one(python_sandbox))) as session:
        yield session


@pytest.fixture
async def small_container(container_sandbox: Sandbox) -> AsyncIterator[ContainerSession]:
    async with session_of(shell_host(small_one(container_sandbox))) as session:
        yield session


@pytest.fixture
async def container(container_sandbox: Sandbox) -> AsyncIterator[ContainerSession]:
    async with session_of(shell_host(container_sandbox)) as session:
        yield session


@pytest.fixture
def run(python: PythonSession) -> RunCell:
    """Run a cell that ends by itself, and return the result that the model reads."""

    async def cell(code: str, seconds: float = 120) -> str:
        outcome = await python.run("python", code, seconds)
        assert outcome.error is None, outcome
        return outcome.result

    return cell
