"""One engine for all that asks the engine itself: it takes half a minute to start."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest
import pytest_asyncio

from stages.generate.vllm import VllmEngine, plan_vllm
from stages.render.grammar import WARM_UP
from tests.engine.tiny import ARGUMENTS, CHECKPOINT, LORA_ARGUMENTS, QUEUE, write_adapter, write_plugin


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[VllmEngine, None]:
    adapter = write_adapter(tmp_path_factory.mktemp("lora") / "adapter")
    arguments = [*ARGUMENTS, *LORA_ARGUMENTS, f"--lora-modules=nonsense={adapter}", f"--max-num-queued-reqs={QUEUE}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(write_plugin(tmp_path_factory.mktemp("plugin")))
        engine = plan_vllm(str(CHECKPOINT), arguments).start()
        await engine.warm_up(WARM_UP)
    yield engine
    await engine.close()
