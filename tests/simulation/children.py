"""The processes of a simulated server's models: they take time to start, to sleep, to wake and to end."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from penstock.api.start.assembly import RunningEngine
from penstock.extensions.models import life, start
from penstock.extensions.models.catalogue import Model
from penstock.stages.models.harmony.vocabulary import load_encoding
from penstock.stages.responses import harmony_stages
from tests.simulation.engine import CountingEngine

MODEL_NAMES = ("tiny", "other")
"""The models of servers of several: all have the first one."""

SECONDS = 2.0
"""The most seconds that a process takes to start, to sleep, to wake or to end."""


@dataclass
class Children:
    """The processes of the models of one server, and their engines."""

    made: Callable[[str], CountingEngine]
    """Makes the engine of a model."""
    is_wrong: Callable[[str], None]
    """Called with what a process does that it should not."""
    names: set[str] = field(default_factory=set)
    """The models whose processes run."""
    engines: dict[str, CountingEngine] = field(default_factory=dict)

    def yields(self, name: str) -> None:
        """Check that no response runs on a model whose process sleeps or ends."""
        if name in self.engines and self.engines[name].running:
            self.is_wrong(f"the model {name} is swapped under a running response")


OF_SERVER: ContextVar[Children] = ContextVar("OF_SERVER")


def models_file(folder: Path, number: int) -> Path:
    """Write the models of a server: each second server has only the first one."""
    names = MODEL_NAMES[: 1 + number % 2]
    file = folder / f"models-{number}.toml"
    file.write_text(
        "\n".join(
            f"[{name}]\ncommand = '{sys.executable}'\ngroups = ['gpu']\nsleep = {level}"
            for level, name in enumerate(names)
        )
    )
    return file


class _Port:
    _numbers = count(20_000)

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{next(self._numbers)}"

    def close(self) -> None:
        """Do nothing: it is only a number."""


class _Child:
    pid = 1
    end_reason: str | None = None
    lines = ()

    async def end(self) -> None:
        """Do nothing: it ends with its block."""


@asynccontextmanager
async def _running_child(name: str, *_: Any) -> AsyncGenerator[_Child, None]:
    children = OF_SERVER.get()
    children.names.add(name)
    try:
        yield _Child()
    finally:
        children.yields(name)
        await _takes_time()
        children.names.discard(name)


async def _takes_time(*_: Any) -> None:
    await asyncio.sleep(random.uniform(0.0, SECONDS))


async def _post(model: life.OnDemand[Any], path: str, _: object = None) -> None:
    if path.startswith("/sleep"):
        OF_SERVER.get().yields(model.name)
    await _takes_time()


def _running(_: start.House, model: Model, __: str | None) -> AbstractAsyncContextManager[RunningEngine]:
    children = OF_SERVER.get()
    engine = children.engines[model.name] = children.made(model.name)
    return nullcontext(RunningEngine(engine, harmony_stages(load_encoding())))


for owner, name, simulated in (
    (life, "Port", _Port),
    (life, "running_child", _running_child),
    (life.OnDemand, "_answers", _takes_time),
    (life.OnDemand, "_post", _post),
    (start.House, "_running", _running),
):
    setattr(owner, name, simulated)
