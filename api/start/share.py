"""The part of one frontend in what all frontends of a server have together, and the memory that they share.

Each frontend writes only its own state, and reads the others: no lock is needed, and none can be left behind by a
process that dies.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.services.slots import LINES, Load, Slots, Weigh

LOOK = 0.02
"""Seconds between two looks at the slots of the other frontends, while prompts wait here."""


class FrontendState(ctypes.Structure):
    """The state of one frontend; the counts of connections and responses are those at its last sign of life."""

    _fields_ = (
        ("seen_at", ctypes.c_double),
        ("received", ctypes.c_longlong),
        ("open", ctypes.c_longlong),
        ("running", ctypes.c_longlong),
        ("slots_used", ctypes.c_longlong),
        ("slots_waiting", ctypes.c_longlong),
        ("slots_of_lines", ctypes.c_longlong),
    )
    seen_at: float
    received: int
    open: int
    running: int
    slots_used: int
    slots_waiting: int
    slots_of_lines: int


def shared_states(count: int) -> Sequence[FrontendState]:
    """Return a state for each frontend, in memory that can be given to processes when they start."""
    states: Any = multiprocessing.get_context("spawn").RawArray(FrontendState, count)
    return states  # type: ignore[no-any-return]


def part(total: int, count: int, index: int) -> int:
    """Return the part of one of ``count`` frontends in a total; the parts add up to it."""
    return total // count + (index < total % count)


@dataclass(frozen=True)
class Share:
    """The part of one server process: of a server alone, all."""

    index: int = 0
    count: int = 1
    states: Sequence[FrontendState] = ()
    counts: Path | None = None
    """The database in which frontends count together, if the server stores no responses."""

    def of(self, total: int) -> int:
        """Return the part of this process in a total."""
        return part(total, self.count, self.index)

    def slots(self, total: int, weigh: Weigh) -> Slots:
        """Return the slots of this process."""
        return SharedSlots(total, self.states, self.index, weigh) if self.states else Slots(total, weigh=weigh)


ALONE = Share()


class SharedSlots(Slots):
    """Slots that several frontends share: each has its part, and may use those that the others do not need.

    While requests wait at another frontend, this one takes no more than its part.  As slots in use are not taken away,
    more than ``total`` may be in use for a while; the engine queues these.
    """

    def __init__(self, total: int, states: Sequence[FrontendState], index: int, weigh: Weigh) -> None:
        super().__init__(total, weigh=weigh)
        self._total = total
        self._own = states[index]
        self._others = [state for at, state in enumerate(states) if at != index]
        self._index, self._count = index, len(states)
        self._part = self.part(total)
        self._next_look: asyncio.TimerHandle | None = None
        self._publish()

    def part(self, total: int) -> int:
        """Return the part of this frontend in a total."""
        return part(total, self._count, self._index)

    @property
    def load(self) -> Load:
        """The use of the slots of all frontends."""
        lines = sum(state.slots_of_lines for state in self._others)
        others = sum(state.slots_used + state.slots_waiting for state in self._others) - lines
        return Load(super().load.others + others, lines)

    @property
    def available(self) -> int:
        """The number of slots that this frontend may hold at the moment."""
        if any(state.slots_waiting for state in self._others):
            return max(1, self._part)
        return max(1, self._part, self._total - sum(state.slots_used for state in self._others))

    def grant(self) -> None:
        """Give the free slots to those that wait, and look again while some wait."""
        super().grant()
        self._publish()
        if self.waiting and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        self._next_look = None
        self.grant()

    def _publish(self) -> None:
        self._own.slots_used, self._own.slots_waiting = self.in_use, self.waiting
        self._own.slots_of_lines = self.held[LINES]
