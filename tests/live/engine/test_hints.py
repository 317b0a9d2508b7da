"""vLLM with the scheduler that hears hints: what its small cache holds after others have filled it."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from penstock.pipeline.frames import Prompt
from penstock.services.engines.affinity import hinted_session
from penstock.services.engines.engine import CacheHint
from penstock.services.engines.vllm import VllmEngine, plan_vllm
from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from tests.support.engine_requests import ON_SHARED_ENGINE, prompt, rename, scheduled
from tests.support.event_streams import generate, last
from tests.support.processes import free_port, running_process
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

pytestmark = ON_SHARED_ENGINE

SCHEDULER = "penstock.extensions.hints.scheduler.Scheduler"
FEW, MANY = 3, 16
OPEN = ("--structured-outputs-config.backend=guidance", "--enable-prompt-tokens-details", "--enable-scale-out")
SMALL = ("--num-gpu-blocks-override=44", "--max-model-len=1024")


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["here", "elsewhere"])
async def hearing(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[VllmEngine | VllmHttpEngine, None]:
    arguments = (*ARGUMENTS, *SMALL, f"--scheduler-cls={SCHEDULER}")
    if request.param == "here":
        engine = plan_vllm(str(CHECKPOINT), arguments).start()
        yield engine
        await engine.close()
        return
    url = f"http://127.0.0.1:{free_port()}"
    command: list[str | Path] = [Path(sys.executable).with_name("vllm"), "serve", CHECKPOINT, *arguments]
    command += ["--host", "127.0.0.1", "--port", url.rpartition(":")[2], *OPEN]
    with running_process(command, f"{url}/health", tmp_path_factory.mktemp("vllm") / "serve.log"):
        elsewhere = await start_vllm_http([url])
        await elsewhere.ask_for_hints()
        assert [replica.takes_hints for replica in elsewhere.replicas.all] == [True]
        yield elsewhere
        await elsewhere.close()


def turn(name: str) -> Prompt:
    """A turn of a conversation that shares nothing with others."""
    return scheduled(rename(prompt("alpha " * 400, max_tokens=4), f"resp_{name}"), session=name, cache_salt=name)


async def cached(engine: VllmEngine | VllmHttpEngine, name: str) -> int:
    return last(await generate(engine, turn(name))).cached_tokens


@pytest.mark.parametrize("action", [None, "fetch", "let_go"])
async def test_cache_holds_what_goes_on_and_not_what_is_over(
    hearing: VllmEngine | VllmHttpEngine, action: Literal["fetch", "let_go"] | None
) -> None:
    """A few turns fit beside one, and many do not: what is hinted was used least recently.

    A server elsewhere is not told what to fetch.
    """
    if action == "fetch" and isinstance(hearing, VllmHttpEngine):
        action, name = None, "fetched"
    else:
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


async def test_lines_of_batches_that_have_ended_leave_others_the_cache(hearing: VllmEngine | VllmHttpEngine) -> None:
    assert await cached(hearing, "before the lines") == 0
    for number in range(MANY):
        line = f"line {number}"
        assert await cached(hearing, line) == 0
        hearing.hint(CacheHint("let_go", hinted_session(turn(line).facts), f"resp_{line}", 400))
    assert await cached(hearing, "before the lines") > 0
