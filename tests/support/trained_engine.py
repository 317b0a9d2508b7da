"""An engine whose weights a trainer changes, without any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.pipeline.errors import EngineFailed
from penstock.services.engines.engine import PauseMode, WeightWork
from penstock.services.engines.scripted import ScriptedEngine


@dataclass
class TrainedEngine(ScriptedEngine):
    """An engine that notes what a trainer does with it."""

    version: str = "default"
    paused: bool = False
    done: list[Any] = field(default_factory=list)
    fault: EngineFailed | None = None

    async def pause(self, mode: PauseMode, *, clears_cache: bool) -> None:
        self.paused = True
        self.done.append(("pause", mode, clears_cache))

    async def resume(self) -> None:
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def present_weights(self) -> str:
        return self.version

    async def name_weights(self, version: str) -> None:
        self.version = version

    async def in_workers(self, work: WeightWork, **given: Any) -> None:
        if self.fault:
            raise self.fault
        self.done.append((work, given))

    def workers(self, *, with_replicas: bool) -> int:
        return 8 if with_replicas else 2
