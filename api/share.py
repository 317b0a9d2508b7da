"""The part of one frontend in what all frontends of a server have together, and the memory that they share.

Each frontend writes only into its own slot, and reads the others: no lock is needed, and none can be left behind by a
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

from penstock.stages.services.fair_places import FairPlaces, Weigh

LOOK = 0.02
"""Seconds between two looks at the places of the other frontends, while prompts wait here."""


class Slot(ctypes.Structure):
    """The state of one frontend; the counts of connections and responses are those at its last sign of life."""

    _fields_ = (
        ("seen_at", ctypes.c_double),
        ("received", ctypes.c_longlong),
        ("open", ctypes.c_longlong),
        ("running", ctypes.c_longlong),
        ("places_used", ctypes.c_longlong),
        ("places_waiting", ctypes.c_longlong),
    )
    seen_at: float
    received: int
    open: int
    running: int
    places_used: int
    places_waiting: int


def new_board(count: int) -> Sequence[Slot]:
    """Return a slot for each frontend, in memory that can be given to processes when they start."""
    board: Any = multiprocessing.get_context("spawn").RawArray(Slot, count)
    return board  # type: ignore[no-any-return]


def part(total: int, count: int, index: int) -> int:
    """Return the part of one of ``count`` frontends in a total; the parts add up to it."""
    return total // count + (index < total % count)


@dataclass(frozen=True)
class Share:
    """The part of one server process: of a server alone, all."""

    index: int = 0
    count: int = 1
    board: Sequence[Slot] = ()
    counts: Path | None = None
    """The database in which frontends count together, if the server stores no responses."""

    def of(self, total: int) -> int:
        """Return the part of this process in a total."""
        return part(total, self.count, self.index)

    def places(self, total: int, weigh: Weigh) -> FairPlaces:
        """Return the places of this process."""
        return SharedPlaces(total, self.board, self.index, weigh) if self.board else FairPlaces(total, weigh=weigh)


ALONE = Share()


class SharedPlaces(FairPlaces):
    """Places that several frontends share: each has its part, and may use those that the others do not need.

    While requests wait at another frontend, this one takes no more than its part.  As places in use are not taken away,
    more than ``total`` may be in use for a while; the engine queues these.
    """

    def __init__(self, total: int, board: Sequence[Slot], index: int, weigh: Weigh) -> None:
        super().__init__(total, weigh=weigh)
        self._total = total
        self._own = board[index]
        self._others = [slot for at, slot in enumerate(board) if at != index]
        self._part = part(total, len(board), index)
        self._next_look: asyncio.TimerHandle | None = None
        self._publish()

    @property
    def bound(self) -> int:
        """The number of places that this frontend may hold at the moment."""
        if any(slot.places_waiting for slot in self._others):
            return max(1, self._part)
        return max(1, self._part, self._total - sum(slot.places_used for slot in self._others))

    def _grant(self) -> None:
        super()._grant()
        self._publish()
        if self.waiting and self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        self._next_look = None
        self._grant()

    def _publish(self) -> None:
        self._own.places_used, self._own.places_waiting = self.in_use, self.waiting
