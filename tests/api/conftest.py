from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import openai
import pytest

from stages.generate.scripted import ScriptedEngine
from stages.harmony import HarmonyEncoding
from tests.api.scripts import Scripted, script
from tests.serving import serving


@pytest.fixture
def models() -> tuple[str, ...]:
    """What the server calls its model."""
    return ("tiny",)


@pytest.fixture
def where(tmp_path: Path) -> Path | str:
    """Where the server's store is."""
    return tmp_path


@pytest.fixture
async def served(
    encoding: HarmonyEncoding, where: Path | str, models: tuple[str, ...]
) -> AsyncGenerator[Scripted, None]:
    """A server whose engine says hello."""
    async with serving(ScriptedEngine(script(encoding)), encoding, where, models=models) as served:
        yield served


@pytest.fixture
async def sdk(served: Scripted) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    """openai-python as its client."""
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
