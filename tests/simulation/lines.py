"""A watch over the lines of batches that run: each at one server, and none after its end."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from tests.simulation.loop import PROCESS, Process

if TYPE_CHECKING:
    from tests.simulation.world import World

LATE = 2.0
"""Seconds after the answer to a cancel in which a line may begin that its server had claimed before."""

SWAP_SECONDS = 100.0
"""The same for a line that waits for its model, which takes turns with another one."""

_RESULT = "select kind from batch_lines where batch_id = '{0}' and number = {1} and kind is not null"


class LineWatch:
    """The lines that run, by the processes of their servers."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._running = defaultdict[str, list[Process]](list)
        self.begun = 0
        """The generations that have begun."""

    def begins(self, line: str) -> None:
        """Take note that a generation of a line begins in this process, and of what is wrong with that."""
        world, process = self._world, PROCESS.get()
        batch_id, _, number = line.rpartition(":")
        self.begun += 1
        if not world.plan.has("disk", "pauses"):  # then a server may seem dead, and not know it yet
            if others := [each.name for each in self._running[line] if each is not process and not each.is_dead]:
                world.wrongs.append(f"{line} begins at {process.name}, and runs at {others}")
            if results := world.store.rows(_RESULT.format(batch_id, number)):
                world.wrongs.append(f"{line} begins at {process.name}, and is {results}")
            known = world.ledger.batches.get(batch_id)
            late = LATE + (SWAP_SECONDS if world.plan.has_models else 0.0)
            if known and known.cancelled_at is not None and world.loop.time() > known.cancelled_at + late:
                world.wrongs.append(f"{line} begins at {world.loop.time()}, and was cancelled at {known.cancelled_at}")
        self._running[line].append(process)

    def ends(self, line: str) -> None:
        """Take note that a generation of a line has ended in this process."""
        self._running[line].remove(PROCESS.get())
