"""One engine of each tiny model for all tests that call an engine directly, because a start takes half a minute."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import Any, cast

import pytest
import pytest_asyncio

from penstock.services.engines.vllm import VllmEngine, plan_vllm
from penstock.stages.models.chat.load import ChatOptions, load_chat_model
from penstock.stages.models.harmony.vocabulary import THOUGHT
from penstock.stages.render.harmony.grammar import WARM_UP
from tests.support.engine_requests import ChatEngine, EngineStats
from tests.support.paths import TINY_QWEN
from tests.support.serve_command import Command, running
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT, LORA_ARGUMENTS, QUEUE, write_adapter, write_plugin

AS_BY_DEFAULT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "last(step): ends an engine or a server of others, so it runs after them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run tests that end a shared engine or server last, in the order of their ``last`` markers."""
    steps = {item: marker.args[0] for item in items if (marker := item.get_closest_marker("last"))}
    items.sort(key=lambda item: steps.get(item, 0))


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[VllmEngine, None]:
    adapter = write_adapter(tmp_path_factory.mktemp("lora") / "adapter")
    arguments = [*ARGUMENTS, *LORA_ARGUMENTS, f"--lora-modules=nonsense={adapter}", f"--max-num-queued-reqs={QUEUE}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(write_plugin(tmp_path_factory.mktemp("plugin")))
        plan = plan_vllm(str(CHECKPOINT), arguments)
        plan.bound_thoughts(THOUGHT)
        engine = plan.start()
        await engine.warm_up(WARM_UP)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stats(engine: VllmEngine) -> EngineStats:
    stats, llm = EngineStats(), cast("Any", engine.llm)
    llm.logger_manager.stat_loggers.append(stats)
    return stats


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def model(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ChatEngine, None]:
    adapter = write_adapter(tmp_path_factory.mktemp("lora") / "adapter")
    named = ("--served-model-name=tiny-qwen", f"--lora-modules=nonsense={adapter}")
    plan = plan_vllm(str(TINY_QWEN), [*ARGUMENTS, *LORA_ARGUMENTS, *named])
    assert not plan.speaks_harmony
    chat = load_chat_model(plan.config, ChatOptions())
    plan.bound_thoughts(chat.parsers.thinking)
    engine = plan.start()
    await engine.warm_up()
    yield ChatEngine(engine, chat)
    await engine.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Command, None, None]:
    """A ``penstock serve`` that records its responses, with vLLM's default processes."""
    folder = tmp_path_factory.mktemp("serve")
    with running(folder / "responses.sqlite3", "--record", str(folder / "recorded"), **AS_BY_DEFAULT) as server:
        yield server
