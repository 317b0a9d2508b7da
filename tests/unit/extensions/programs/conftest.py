from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from penstock.extensions.programs.host import ProgramHost, ProgramSession
from penstock.extensions.tools.sandbox.plan import MODES, Mode
from penstock.extensions.tools.sandbox.probe import Sandbox
from tests.support.programs import host_of, request
from tests.support.sandboxes import available


@pytest.fixture(scope="session", params=MODES)
def program_sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return asyncio.run(available("program", (cast("Mode", request.param),)))


@pytest.fixture
async def host(program_sandbox: Sandbox) -> AsyncIterator[ProgramHost]:
    async with host_of(program_sandbox) as opened:
        yield opened


@pytest.fixture
async def session(host: ProgramHost) -> AsyncIterator[ProgramSession]:
    opened = host.session(request())
    yield opened
    await opened.close()
