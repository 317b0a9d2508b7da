"""vLLM with the scheduler that hears hints: what its small cache holds after others have filled it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal

import pytest
import pytest_asyncio

from penstock.pipeline.frames import Prompt
from penstock.services.engines.affinity import hinted_session
from penstock.services.engines.engine import CacheHint
from penstock.services.engines.vllm import VllmEngine, plan_vllm
from tests.support.engine_requests import ON_SHARED_ENGINE, prompt, rename, scheduled
from tests.support.event_streams import generate, last
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

pytestmark = ON_SHARED_ENGINE

SCHEDULER = "penstock.extensions.hints.scheduler.Scheduler"
FEW, MANY = 3, 16
SMALL = ("--num-gpu-blocks-override=44", "--max-model-len=1024")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hearing() -> AsyncGenerator[VllmEngine, None]:
    engine = plan_vllm(str(CHECKPOINT), [*ARGUMENTS, *SMALL, f"--scheduler-cls={SCHEDULER}"]).start()
    yield engine
    await engine.close()


def turn(name: str) -> Prompt:
    """A turn of a conversation that shares nothing with others."""
    return scheduled(rename(prompt("alpha " * 400, max_tokens=4), f"resp_{name}"), session=name, cache_salt=name)


async def cached(engine: VllmEngine, name: str) -> int:
    return last(await generate(engine, turn(name))).cached_tokens


@pytest.mark.parametrize("action", [None, "fetch", "let_go"])
async def test_cache_holds_what_goes_on_and_not_what_is_over(
    hearing: VllmEngine, action: Literal["fetch", "let_go"] | None
) -> None:
    """A few turns fit beside one, and many do not: what is hinted was used least recently."""
    name = f"hinted {action}"
    assert await cached(hearing, name) == 0
    hint = action and CacheHint(action, hinted_session(turn(name).facts), f"resp_{name}", 400)
    found = []
    for others in (FEW, MANY):
        if hint:
            hearing.hint(hint)
        for number in range(others):
            assert await cached(hearing, f"{others} {number} {action}") == 0
        found.append(await cached(hearing, name) > 0)
    assert found == {None: [True, False], "fetch": [True, True], "let_go": [False, False]}[action]
