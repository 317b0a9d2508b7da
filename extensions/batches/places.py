"""The places of one engine that lines of batches may have, and the lines that hold them or wait for them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.pipeline.errors import ServerStopping
from penstock.services.slots import LINES, Slots

LOOK = 0.02
"""Seconds between two looks at what happens elsewhere, while lines run or wait here."""

AHEAD = 4
"""For so many places, one line waits with its prompt made: a place that gets free is taken at once."""

BUSY_SECONDS = 60.0
"""Seconds after which an engine counts as idle that nothing but lines has used."""


@dataclass(eq=False)
class Turn:
    """A turn of a line at an engine: it waits, runs, has to pause, and waits again."""

    response_id: str
    can_pause: bool = False
    is_asked: bool = False
    """True if it is to pause."""
    is_cancelled: bool = False
    """True if the engine ends the generation, with all tokens so far."""
    begin: asyncio.Future[None] | None = None
    """Done when it may run; None while it does."""


@dataclass(frozen=True)
class Rule:
    """A rule for the places that lines may take: a ``reserve`` stays free, and at most ``beside`` run beside others."""

    reserve: int | None = None
    """By default fifteen sixteenths, but an eighth of an engine that is idle: the first token of a request has to wait
    for the step that runs, and more lines make it longer.
    """
    beside: int | None = None

    def most(self, places: int, others: int, *, is_idle: bool) -> int:
        """Return the number of lines that may run at once while ``others`` run or wait.

        ``is_idle`` tells if nothing but lines has run lately.
        """
        reserve = self.reserve
        if reserve is None:
            reserve = max(1, places // 8 if is_idle else 15 * places // 16)
        free = places - min(reserve, places - 1) - others
        return max(0, free if self.beside is None or not others else min(free, self.beside))


@dataclass(eq=False)
class LinePlaces:
    """The lines of one engine.

    ``slots`` are the places of the engine, which others use too, or those of lines alone.  ``others`` returns how many
    others run or wait.  ``pause`` is called with a turn that is to pause, and ``is_stopping`` tells if no line may
    begin.
    """

    slots: Slots
    rule: Rule
    others: Callable[[], int]
    pause: Callable[[LinePlaces, Turn], None]
    is_stopping: Callable[[], bool]
    waiting: deque[Turn] = field(default_factory=deque)
    running: dict[Turn, None] = field(default_factory=dict)
    _next: asyncio.Handle | None = None
    _is_settling: bool = False
    _busy_until: float = 0.0

    def __post_init__(self) -> None:
        self.slots.when_changed = self.settle_soon

    @property
    def most(self) -> int:
        """The number of lines that may run here now."""
        return max(0, self._most_anywhere - self.slots.load.lines_elsewhere)

    @property
    def _most_anywhere(self) -> int:
        others = self._seen_others()
        return self.rule.most(self.slots.limit, others, is_idle=time.monotonic() >= self._busy_until)

    def _seen_others(self) -> int:
        if others := self.others():
            self._busy_until = time.monotonic() + BUSY_SECONDS
        return others

    @property
    def room(self) -> int:
        """The number of lines that may run or wait here now."""
        return 0 if self.is_stopping() else self.most + max(1, self.most // AHEAD)

    async def enter(self, turn: Turn, *, is_first: bool = False) -> None:
        """Wait for a place, and hold it until `leave`.  A turn that was paused is the first to go on.

        Raises `ServerStopping` if the server stops before.
        """
        turn.is_asked = turn.is_cancelled = False
        turn.begin = begin = asyncio.get_running_loop().create_future()
        if is_first:
            self.waiting.appendleft(turn)
        else:
            self.waiting.append(turn)
        self.settle()
        try:
            await begin
        except BaseException:
            if turn in self.running:
                self.leave(turn)
            elif turn in self.waiting:
                self.waiting.remove(turn)
            raise

    def leave(self, turn: Turn) -> None:
        """Give a place back."""
        del self.running[turn]
        self.slots.release(LINES)

    def settle_soon(self) -> None:
        """Settle when what happens now has happened."""
        self._seen_others()
        if (self.waiting or self.running) and not self._is_settling:
            self._settle_in(0)

    def settle(self) -> None:
        """Let lines begin for which there is room, or pause those for which there is none."""
        self._is_settling = True
        try:
            if self.is_stopping():
                self._refuse()
            most = self.most
            while self.waiting and len(self.running) < most and self.slots.acquire_now(LINES):
                self._begin(self.waiting.popleft())
            self._pause_beyond(max(most, self.slots.part(self._most_anywhere)))
        finally:
            self._is_settling = False
        if self.waiting or self.running:
            self._settle_in(LOOK)

    def _settle_in(self, seconds: float) -> None:
        if self._next is not None:
            self._next.cancel()
        loop = asyncio.get_running_loop()
        self._next = loop.call_later(seconds, self.settle) if seconds else loop.call_soon(self.settle)

    def _begin(self, turn: Turn) -> None:
        self.running[turn] = None
        begin, turn.begin = turn.begin, None
        if begin is not None and not begin.done():
            begin.set_result(None)

    def _pause_beyond(self, most: int) -> None:
        """Have the latest turns pause, so that no more than ``most`` go on."""
        going = [turn for turn in self.running if not turn.is_asked]
        excess = len(going) - most
        for turn in reversed(going):
            if excess <= 0:
                break
            if turn.can_pause:
                turn.is_asked = True
                self.pause(self, turn)
                excess -= 1

    def _refuse(self) -> None:
        while self.waiting:
            begin = self.waiting.popleft().begin
            if begin is not None and not begin.done():
                begin.set_exception(ServerStopping())
