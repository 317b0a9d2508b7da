"""The bytes of requests that this server holds while they arrive and until they are read, within bounds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.pipeline.errors import ServerBusy

SMALL = 2**20
"""Bytes of a small body, for which there is always room unless very many arrive at once."""

MOST_SMALL_BYTES = 2**28
"""The most bytes of all small bodies, and of all small messages of WebSockets."""

MOST_AT_ONCE = 4
"""Large bodies of the largest size that are held at once."""

SMALL_SECONDS, LARGE_SECONDS = 5.0, 40.0
"""Seconds after which a body that is still arriving makes room for others, if there is no other room."""


@dataclass(eq=False)
class Pool:
    """A bounded number of bytes.  A body that has been arriving for ``seconds`` makes room, the oldest first."""

    seconds: float
    clock: Callable[[], float] = time.monotonic
    counts: Counter[str] = field(default_factory=Counter)
    """The bytes that are held, by the owner of their request."""
    arriving: dict[HeldBody, float] = field(default_factory=dict)
    """The bodies that may be dropped, with the time when they came here, in this order."""

    def take(self, body: HeldBody, count: int, most: int) -> None:
        """Count bytes of a body; raise `ServerBusy` if there is no room for them, and none can be made.

        There is room for ``most`` bytes, of which one owner may hold half; clients without a key may hold all.
        """
        if body.owner:
            while self.counts[body.owner] + count > most // 2:
                self._make_room(body, [other for other in self.arriving if other.owner == body.owner])
        while self.count + count > most:
            self._make_room(body, self.arriving)
        self.counts[body.owner] += count
        if not body.has_ended:
            self.arriving.setdefault(body, self.clock())

    def _make_room(self, body: HeldBody, others: Iterable[HeldBody]) -> None:
        """Drop the oldest of the ``others`` if it has been arriving for long; raise `ServerBusy` if it has not."""
        oldest = next(iter(others), body)
        if oldest is body or self.clock() - self.arriving[oldest] < self.seconds:
            raise ServerBusy("Other requests with large bodies are being read. Try again in a moment.")
        oldest.drop()

    def give(self, body: HeldBody, count: int) -> None:
        """Stop counting bytes of a body that leaves this pool."""
        self.counts[body.owner] -= count
        if not self.counts[body.owner]:
            del self.counts[body.owner]
        self.arriving.pop(body, None)

    @property
    def count(self) -> int:
        """The bytes that are held."""
        return self.counts.total()


def _do_nothing() -> None:
    pass


@dataclass(eq=False, slots=True)
class HeldBody:
    """The bytes of one body that have arrived, which are in the pool of ``small`` ones until they are too many.

    A declared length takes no room.  ``on_drop`` is called if the body has to make room for others.
    """

    small: Pool
    large: Pool
    limit: int
    """The most bytes of a body."""
    on_drop: Callable[[], None]
    owner: str = ""
    size: int = 0
    has_ended: bool = False

    def take(self, count: int) -> None:
        """Count more bytes.  Raises `ServerBusy`, and does not count them, if there is no room."""
        before, size = self._pool, self.size + count
        if size > SMALL:
            moved = size if before is self.small else count
            self.large.take(self, moved, MOST_AT_ONCE * self.limit)
            if before is self.small:
                self.small.give(self, self.size)
        else:
            self.small.take(self, count, MOST_SMALL_BYTES)
        self.size = size

    def finish(self) -> None:
        """Note that no more bytes are awaited: the body is dropped no more."""
        self.has_ended = True
        self._pool.arriving.pop(self, None)

    def release(self) -> None:
        """Stop counting, and forget ``on_drop``: the body is needed no longer."""
        self._pool.give(self, self.size)
        self.size, self.on_drop = 0, _do_nothing

    def drop(self) -> None:
        """Make room for others."""
        on_drop = self.on_drop
        self.release()
        on_drop()

    @property
    def _pool(self) -> Pool:
        return self.large if self.size > SMALL else self.small


@dataclass
class HeldBytes:
    """The bytes of all bodies and messages that this server holds."""

    clock: Callable[[], float] = time.monotonic
    bodies: Pool = field(init=False)
    messages: Pool = field(init=False)
    """Small messages of WebSockets, which may wait for long: they leave room for bodies."""
    large: Pool = field(init=False)

    def __post_init__(self) -> None:
        self.bodies, self.messages = Pool(SMALL_SECONDS, self.clock), Pool(SMALL_SECONDS, self.clock)
        self.large = Pool(LARGE_SECONDS, self.clock)

    @property
    def count(self) -> int:
        """The bytes that are held."""
        return self.bodies.count + self.messages.count + self.large.count

    def body(self, limit: int, on_drop: Callable[[], None], owner: str = "") -> HeldBody:
        """Begin to hold the body of a request of an owner."""
        return HeldBody(self.bodies, large=self.large, limit=limit, on_drop=on_drop, owner=owner)

    def message(self, limit: int, on_drop: Callable[[], None], owner: str = "") -> HeldBody:
        """Begin to hold a message of a WebSocket of an owner."""
        return HeldBody(self.messages, large=self.large, limit=limit, on_drop=on_drop, owner=owner)
