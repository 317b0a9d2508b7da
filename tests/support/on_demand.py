"""Models that start on demand, for a test: their processes are scripted, and none may be left at its end."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.models.child import ChildSpec
from penstock.extensions.models.life import OnDemand
from penstock.extensions.models.turns import Groups
from tests.support.scripted_model import MARK, MODEL, marked


class Scene:
    """Models of one test, whose processes have a mark, and log what happens to them."""

    def __init__(self, mark: str, folder: Path) -> None:
        self.mark = mark
        self.log = folder / "log"
        self.groups = Groups()
        self.opened: list[str] = []
        """What was opened and left."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._closing = AsyncExitStack()

    def model(self, name: str = "model", options: str = "", **spec: Any) -> OnDemand[str]:
        """Return a model whose task runs."""
        command = spec.pop("command", f"{MODEL} --log {self.log} {options}")
        grace, opens = spec.pop("grace", 5.0), spec.pop("opens", self._opener(name))
        model = OnDemand(
            name,
            ChildSpec(command, **spec),
            self.groups,
            opens,
            grace=grace,
        )
        self.tasks[name] = asyncio.create_task(model.run())
        self._closing.push_async_callback(model.close)
        return model

    def _opener(self, name: str) -> Callable[[str], AbstractAsyncContextManager[str]]:
        @asynccontextmanager
        async def opened(url: str) -> AsyncIterator[str]:
            self.opened.append(f"open {name}")
            yield url
            self.opened.append(f"leave {name}")

        return opened

    @property
    def events(self) -> list[str]:
        """The starts, and the POST requests, of all processes."""
        return self.log.read_text().splitlines() if self.log.exists() else []

    @property
    def processes(self) -> set[int]:
        return marked(self.mark)

    async def close(self) -> None:
        await self._closing.aclose()


@pytest.fixture
async def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    scene = Scene(mark, tmp_path)
    yield scene
    await scene.close()
    assert not scene.processes
