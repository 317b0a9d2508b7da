"""The queue before the database: changes are committed in groups, in their order, and survive an outage in memory.

A change joins the queue, and the next flush commits all that wait there in one transaction, so that a durable commit
is paid for once and not sixty-four times.  There are two kinds.  A *lasting* change belongs to a run, which never waits
for it: while the database cannot be reached it stays in the queue and is tried again.  An *urgent* one is awaited by a
request: it is tried at once, and withdrawn if that fails.  A writer belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from penstock.pipeline.errors import StoreFailed
from penstock.stages.services.store.database import Database, Statement, Unavailable, Unit

GROUP = 500
"""How many changes one transaction holds at most."""

LIMIT = 64 * 2**20
"""Bytes that may wait for the database before new responses are refused."""

UNKNOWN = 2**14
"""What a change is taken to weigh, in bytes, until its statements are made."""

PAUSES = (0.1, 2.0)
"""Seconds between two tries while the database cannot be reached: each twice the one before, from, to."""

SLOW = 1.0
"""Seconds after which a try that goes on shows that something is wrong."""

READ_PATIENCE = 3.0
"""Seconds that a read waits for the changes it has to see."""

Statements: TypeAlias = Iterable[Statement] | Callable[[], Iterable[Statement]]
"""What a change says, or how to make that in a thread: of a large response it takes long."""

_SIZED = (str, bytes)

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Change:
    """A unit on its way to disk; ``keys`` are the ids of what it changes, the first one names it in logs.

    Of statements that are still to be made, ``unit`` knows nothing yet, and ``size`` is a guess.
    """

    statements: Statements
    keys: tuple[str, ...]
    is_urgent: bool
    done: asyncio.Future[None]
    unit: Unit | None = None
    size: int = UNKNOWN
    rows_changed: tuple[int, ...] = ()

    def made(self) -> Unit:
        """The unit, made of its statements where that was not done before."""
        if self.unit is None:
            statements = self.statements() if callable(self.statements) else self.statements
            self.unit = Unit(tuple(statements), counted=self.is_urgent)
        return self.unit


class Writer:
    """Carries changes to the database, one group after the other."""

    def __init__(self, database: Database) -> None:
        self.backlog = 0
        """Bytes that wait."""
        self._database = database
        self._queue: deque[_Change] = deque()
        self._last: dict[str | None, _Change] = {}  # the last lasting change of each key, and under None of all
        self._alone = 0
        self._flushing: asyncio.Task[None] | None = None
        self._wakened = asyncio.Event()
        self._try_began = 0.0
        self._outage_began: float | None = None
        self._closed = False

    @property
    def is_degraded(self) -> bool:
        """Whether the last try found no database, or the present one takes suspiciously long."""
        is_slow = self._flushing is not None and time.monotonic() - self._try_began > SLOW
        return is_slow or self._outage_began is not None

    def check(self) -> None:
        """Raise `StoreFailed` when too much waits already, or nothing more is taken."""
        self.check_open()
        if self.backlog > LIMIT:
            raise StoreFailed("The store cannot keep up: too much waits to be written.")

    def queue(self, statements: Statements, *keys: str) -> asyncio.Future[None]:
        """Have a lasting change carried out behind those that wait; nobody needs to look at the future."""
        return self._queued(statements, keys).done

    async def carry_out(self, statements: Statements, *keys: str, is_first: bool = False) -> tuple[int, ...]:
        """Carry out an urgent change: how many rows each of its statements changed; `StoreFailed` if it was not.

        One that ``is_first`` goes ahead of all that waits.  A change whose caller is cancelled is carried out all the
        same.
        """
        change = self._queued(statements, keys, is_urgent=True, is_first=is_first)
        self._wakened.set()
        await asyncio.shield(change.done)
        return change.rows_changed

    def _queued(
        self, statements: Statements, keys: tuple[str, ...], *, is_urgent: bool = False, is_first: bool = False
    ) -> _Change:
        self.check_open()
        change = _Change(statements, keys, is_urgent, asyncio.get_running_loop().create_future())
        if not callable(statements):
            change.size = _size(change.made())
        if is_first:
            self._queue.appendleft(change)
        else:
            self._queue.append(change)
        if not change.is_urgent:
            self._last.update(dict.fromkeys((None, *keys), change))
        self.backlog += change.size
        if self._flushing is None:
            self._try_began = time.monotonic()
            self._flushing = asyncio.create_task(self._flush())
        return change

    async def settled(self, key: str | None = None) -> None:
        """Wait until what lasts for that id, or at all, is in; `StoreFailed` when it takes too long.

        An urgent change is not waited for: whoever made it knows when it is in.
        """
        change = self._last.get(key)
        if change is None:
            return
        await asyncio.wait([change.done], timeout=READ_PATIENCE)
        if not change.done.done():
            raise StoreFailed("The store has not yet taken what is to be read.")

    async def close(self) -> None:
        """Try once more what waits; what is lost is logged.  Closing twice is harmless."""
        self._closed = True
        self._wakened.set()
        if self._flushing is not None:
            await asyncio.shield(self._flushing)

    def check_open(self) -> None:
        """Raise `StoreFailed` behind `close`."""
        if self._closed:
            raise StoreFailed("The store is closed.")

    async def _flush(self) -> None:
        """Commit in groups until no change waits.

        The task starts a turn of the loop after the first change, so that all the changes of that turn make one group;
        those that come while it is being committed make the next.
        """
        pause, longest = PAUSES
        try:
            while self._queue:
                if await self._write_group():
                    pause = PAUSES[0]
                elif self._closed:
                    self._lose_the_rest()
                else:
                    await self._rest(pause)
                    pause = min(2 * pause, longest)
        finally:
            self._flushing = None

    async def _write_group(self) -> bool:
        """Commit the next group; False if there is no database.

        A group that the database refuses is tried again one by one: a bad change never harms its neighbours.
        """
        group = list(islice(self._queue, 1 if self._alone else GROUP))
        self._wakened.clear()
        self._try_began = time.monotonic()
        try:
            counts = await self._database.write(await self._units(group))
        except Unavailable as exc:
            self._outage(exc)
            return False
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is this group's
            if len(group) > 1:
                self._alone = len(group)
                return True
            _log.exception("the store refuses a change of %s", group[0].keys[:1])
            _fail(self._take_out(group[0]), _failed("The store refuses this.", exc))
        else:
            for change, rows_changed in zip(group, counts, strict=True):
                change.rows_changed = rows_changed
                self._take_out(change).set_result(None)
        self._alone = max(0, self._alone - 1)
        self._over()
        return True

    async def _units(self, group: Sequence[_Change]) -> list[Unit]:
        """The units of a group, made in a thread where they are still to be made."""
        unmade = [change for change in group if change.unit is None]
        if unmade:
            await asyncio.to_thread(lambda: [change.made() for change in unmade])
        for change in unmade:
            size = _size(change.made())
            self.backlog += size - change.size
            change.size = size
        return [change.made() for change in group]

    def _take_out(self, change: _Change) -> asyncio.Future[None]:
        """The future of a change that no longer waits."""
        if self._queue[0] is change:
            self._queue.popleft()
        else:
            self._queue.remove(change)
        self.backlog -= change.size
        for key in (None, *change.keys):
            if self._last.get(key) is change:
                del self._last[key]
        return change.done

    def _outage(self, error: Unavailable) -> None:
        """Log the first failure of an outage, and withdraw what does not wait for its end."""
        if self._outage_began is None:
            self._outage_began = time.monotonic()
            _log.error("the store cannot be written, and what is missing there waits in memory: %s", error)
        self._alone = 0
        for change in [change for change in self._queue if change.is_urgent]:
            _fail(self._take_out(change), _failed("The store cannot be reached.", error))

    def _over(self) -> None:
        if self._outage_began is not None:
            _log.warning("the store is back after %.1f s", time.monotonic() - self._outage_began)
            self._outage_began = None

    async def _rest(self, seconds: float) -> None:
        """Wait before the next try, which an urgent change brings forward."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._wakened.wait(), seconds)

    def _lose_the_rest(self) -> None:
        lost = tuple(self._queue)
        _log.error("lost to the store: %s", ", ".join(_names(lost)))
        for change in lost:
            _fail(self._take_out(change), StoreFailed("The store was closed before it could be reached."))


def _size(unit: Unit) -> int:
    """About how many bytes a unit takes."""
    size = 0
    for statement in unit.statements:
        for value in statement.arguments:
            size += len(value) if isinstance(value, _SIZED) else 8
    return size


def _names(changes: Iterable[_Change]) -> Iterable[str]:
    return dict.fromkeys(change.keys[0] for change in changes if change.keys)


def _failed(message: str, cause: Exception) -> StoreFailed:
    error = StoreFailed(message)
    error.__cause__ = cause
    return error


def _fail(done: asyncio.Future[None], error: StoreFailed) -> None:
    """Tell those that wait, and nobody else."""
    done.set_exception(error)
    done.exception()  # seen: a future that nobody awaits is not a bug
