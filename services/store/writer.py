"""Access to the database, shared by all parts of the store: reads, and the queue of writes.

Changes are committed in order, in groups, and wait in memory during an outage.  The next flush commits all queued
changes in one transaction, so that the cost of a durable commit is paid once for many changes.  There are two kinds of
changes.  A *lasting* change belongs to a run, which never waits for it: while the database is unavailable it stays in
the queue and is retried.  An *urgent* change is awaited by a request: it is attempted at once, and withdrawn if the
database is unavailable.  A writer belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import TypeAlias

import msgspec

from penstock.pipeline import metrics
from penstock.pipeline.errors import DiskFull, StoreFailed
from penstock.services.listeners import tell
from penstock.services.store.database import (
    Database,
    DatabaseRefused,
    DatabaseUnavailable,
    HasRoom,
    Row,
    Statement,
    Unit,
    Value,
    size_of,
)
from penstock.services.tracing import store_span

GROUP = 500
"""Maximum number of changes in one transaction."""

LIMIT = 64 * 2**20
"""Bytes in the queue above which new responses are refused."""

UNKNOWN = 2**14
"""Assumed size in bytes of a change whose statements are not built yet."""

PAUSES = (0.1, 2.0)
"""Shortest and longest pause in seconds between attempts during an outage.  Each pause is twice the one before."""

SLOW = 1.0
"""Seconds after which an unfinished attempt counts as degraded."""

TICK = SLOW / 10
"""Seconds between two ticks of `_Wait`."""

RESERVE = 8 * 2**20
"""Bytes of the disk that uploads and the chunks of vector stores leave free."""

BULK = 2**20
"""Bytes of a body for which there must be room beside the reserve."""

READ_WAIT = 3.0
"""Seconds that a read waits for the changes that it must see."""

Statements: TypeAlias = Iterable[Statement] | Callable[[], Iterable[Statement]]
"""The statements of a change, or a function that builds them in a thread, as a large response takes long."""

_WRITE_SECONDS, _READ_SECONDS = metrics.STORE_SECONDS.labels("write"), metrics.STORE_SECONDS.labels("read")
_WRITE_ERRORS, _READ_ERRORS = metrics.STORE_ERRORS.labels("write"), metrics.STORE_ERRORS.labels("read")

_log = logging.getLogger(__name__)


class _Change(msgspec.Struct, eq=False):
    """A change on its way to disk.

    ``keys`` are the ids of the objects that it changes; logs name it by the first.  Until its statements are built,
    ``unit`` is None and ``size`` is a guess.
    """

    statements: Statements
    keys: tuple[str, ...]
    is_urgent: bool
    done: asyncio.Future[None]
    is_fenced: bool = False
    unit: Unit | None = None
    size: int = UNKNOWN
    rows_changed: tuple[int, ...] = ()

    def built(self) -> Unit:
        if self.unit is None:
            statements = self.statements() if callable(self.statements) else self.statements
            self.unit = Unit(tuple(statements), counted=self.is_urgent, fenced=self.is_fenced)
        return self.unit


class _Wait:
    """The time that an attempt waits for the database, without that in which the event loop was held.

    A tick that comes late shows that the loop was held.  The database may have answered in that time, and the loop may
    have missed a timeout of the driver: neither is a fault of the database.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Seconds of waiting on a free loop."""
        self.held = 0.0
        """Seconds for which the loop was held."""
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Measure from now on."""
        self.end()
        self.seconds = self.held = 0.0
        self._schedule()

    def end(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        self._due = loop.time() + TICK
        self._timer = loop.call_at(self._due, self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        late = loop.time() - self._due
        if late > TICK:
            self.held += late
        else:
            self.seconds += TICK
        self._schedule()


class Writer:
    """Writes changes to the database, one group after another."""

    def __init__(self, database: Database) -> None:
        self.backlog = 0
        """Bytes in the queue."""
        self._database = database
        self._queue: deque[_Change] = deque()
        self._last: dict[str | None, _Change] = {}  # latest lasting change by key; under None, of all keys
        self._one_by_one = 0  # changes to write one by one, after the database refused their group
        self._flushing: asyncio.Task[None] | None = None
        self._wakened = asyncio.Event()
        self._wait = _Wait()  # of the current attempt
        self._outage_began: float | None = None
        self._closed = False

    @property
    def is_degraded(self) -> bool:
        """True if the last attempt found the database unavailable, or the current one takes longer than `SLOW`."""
        is_slow = self._flushing is not None and self._wait.seconds > SLOW - TICK / 2
        return is_slow or self._outage_began is not None

    def check(self) -> None:
        """Raise `StoreFailed` if the queue is over `LIMIT` or closed."""
        self.check_open()
        if self.backlog > LIMIT:
            raise StoreFailed("The store cannot keep up: too many changes wait to be written.")

    def check_available(self) -> None:
        """Raise `StoreFailed` if the database is unavailable or slow; callers that can go on without it do not wait."""
        if self.is_degraded:
            raise StoreFailed("The store cannot be reached at the moment.")

    def queue(self, statements: Statements, *keys: str) -> asyncio.Future[None]:
        """Queue a lasting change.  The returned future may be ignored."""
        return self._queued(statements, keys).done

    async def carry_out(
        self, statements: Statements, *keys: str, is_first: bool = False, is_fenced: bool = False
    ) -> tuple[int, ...]:
        """Write an urgent change; return the number of rows changed by each of its statements.

        Raises `StoreFailed` if it was not written.  If ``is_first``, it goes to the front of the queue.  If it
        ``is_fenced``, it has no effect unless its first statement changes a row.  If the caller is cancelled, the
        change is still written.
        """
        change = self._queued(statements, keys, is_urgent=True, is_first=is_first, is_fenced=is_fenced)
        self._wakened.set()
        with store_span("store write"):
            await asyncio.shield(change.done)  # a caller that leaves must not cancel what `_write_group` sets
        return change.rows_changed

    def _queued(
        self,
        statements: Statements,
        keys: tuple[str, ...],
        *,
        is_urgent: bool = False,
        is_first: bool = False,
        is_fenced: bool = False,
    ) -> _Change:
        self.check_open()
        done = asyncio.get_running_loop().create_future()
        change = _Change(statements, keys, is_urgent=is_urgent, done=done, is_fenced=is_fenced)
        if not callable(statements):
            change.size = _size(change.built())
        if is_first:
            self._queue.appendleft(change)
        else:
            self._queue.append(change)
        if not change.is_urgent:
            self._last.update(dict.fromkeys((None, *keys), change))
        self.backlog += change.size
        if self._flushing is None:
            self._wait.begin()
            self._flushing = asyncio.create_task(self._flush())
        return change

    async def flushed(self, key: str | None = None) -> None:
        """Wait until all lasting changes of an id, or of all ids, are written.

        Raises `StoreFailed` after `READ_WAIT` seconds.  Urgent changes are left out, because their callers wait
        for them already.
        """
        change = self._last.get(key)
        if change is None:
            return
        await asyncio.wait([change.done], timeout=READ_WAIT)
        if not change.done.done():
            raise StoreFailed("The store has not yet written the changes that this read must see.")

    async def close(self) -> None:
        """Try once more to write the queued changes, and log any that are lost.  Closing twice is harmless."""
        self._closed = True
        self._wakened.set()
        if self._flushing is not None:
            await asyncio.shield(self._flushing)

    def check_open(self) -> None:
        """Raise `StoreFailed` after `close`."""
        if self._closed:
            raise StoreFailed("The store is closed.")

    async def _flush(self) -> None:
        """Write groups until the queue is empty.

        This task starts one turn of the event loop after the first change, so all changes of that turn form one group.
        Changes that arrive during its commit form the next group.
        """
        pause, longest = PAUSES
        try:
            while self._queue:
                if await self._write_group():
                    pause = PAUSES[0]
                elif self._closed:
                    self._fail_queued()
                else:
                    await self._rest(pause)
                    pause = min(2 * pause, longest)
        finally:
            self._wait.end()
            self._flushing = None

    async def _write_group(self) -> bool:
        """Write the next group; False if the database is unavailable.

        If the database refuses a group, its changes are retried one by one, so that a bad one does not harm the others.
        """
        group = list(islice(self._queue, 1 if self._one_by_one else GROUP))
        self._wakened.clear()
        self._wait.begin()
        try:
            units = await self._units(group)
            with _WRITE_SECONDS.time():
                counts = await self._database.write(units)
        except DatabaseUnavailable as exc:
            _WRITE_ERRORS.inc()
            self._outage(exc)
            return False
        except Exception as exc:  # noqa: BLE001 - any other error belongs to this group
            _WRITE_ERRORS.inc()
            if len(group) > 1:
                self._one_by_one = len(group)
                return True
            _log.exception("the store refuses a change of %s", group[0].keys[:1])
            _fail(self._take_out(group[0]), _failed("The store refuses this.", exc))
        else:
            for change, rows_changed in zip(group, counts, strict=True):
                change.rows_changed = rows_changed
                self._take_out(change).set_result(None)
        self._one_by_one = max(0, self._one_by_one - 1)
        self._over()
        return True

    async def _units(self, group: Sequence[_Change]) -> list[Unit]:
        """Return the units of a group; those not built yet are built in a thread."""
        unbuilt = [change for change in group if change.unit is None]
        if unbuilt:
            sizes = await asyncio.to_thread(lambda: [_size(change.built()) for change in unbuilt])
            for change, size in zip(unbuilt, sizes, strict=True):
                self.backlog += size - change.size
                change.size = size
        return [change.built() for change in group]

    def _take_out(self, change: _Change) -> asyncio.Future[None]:
        if self._queue[0] is change:
            self._queue.popleft()
        else:  # a heartbeat may have come to the front during the commit
            self._queue.remove(change)
        self.backlog -= change.size
        for key in (None, *change.keys):
            if self._last.get(key) is change:
                del self._last[key]
        return change.done

    def _outage(self, error: DatabaseUnavailable) -> None:
        """Log the first failure of an outage, and withdraw the urgent changes.

        After a failure on a loop that was held, the next attempt decides if there is an outage.
        """
        if self._outage_began is None and self._wait.held < SLOW:
            self._outage_began = time.monotonic()
            _log.error("the store cannot be written, and changes wait in memory: %s", error)
        self._one_by_one = 0
        for change in [change for change in self._queue if change.is_urgent]:
            _fail(self._take_out(change), _failed("The store cannot be reached.", error))

    def _over(self) -> None:
        if self._outage_began is not None:
            _log.warning("the store is back after %.1f s", time.monotonic() - self._outage_began)
            self._outage_began = None

    async def _rest(self, seconds: float) -> None:
        """Pause before the next attempt; an urgent change ends the pause early."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):  # `wait_for` of Python 3.11 may lose a cancellation
                await self._wakened.wait()

    def _fail_queued(self) -> None:
        changes = tuple(self._queue)
        _log.error("never stored: %s", ", ".join(_names(changes)))
        for change in changes:
            _fail(self._take_out(change), StoreFailed("The store was closed before it could be reached."))


class StoreContext:
    """One server's access to the database.  A server without a heartbeat for ``stale`` seconds is dead."""

    def __init__(self, database: Database, stale: float) -> None:
        self.database = database
        self.arriving = 0
        """Bytes of uploads and chunks that are about to be stored, for which there is room."""
        self.writer = Writer(database)
        self.server_id = secrets.token_hex(8)
        self.stale = stale
        self.at_deletion: list[Callable[[str], None]] = []
        """Called with the id of each response or conversation that has been deleted."""

    def deleted(self, deleted_id: str, counts: Sequence[int]) -> bool:
        """Return True if a first statement has deleted a response or a conversation, and say so to all who listen."""
        if counts[0] > 0:
            tell(self.at_deletion, deleted_id)
        return counts[0] > 0

    async def read(self, sql: str, *arguments: Value) -> Sequence[Row]:
        """Return the rows of a query; raises `StoreFailed` if the database cannot be read."""
        self.writer.check_open()
        try:
            with _READ_SECONDS.time(), store_span("store read"):
                return await self.database.read(sql, *arguments)
        except (DatabaseUnavailable, DatabaseRefused) as exc:
            _READ_ERRORS.inc()
            raise StoreFailed("The store cannot be read.") from exc

    @asynccontextmanager
    async def room_for(self, count: int) -> AsyncGenerator[None, None]:
        """Keep room for so many bytes for the length of a block.  Raises `DiskFull` if less than `RESERVE` were left.

        The reserve is for deletions, which first make the file larger, and for the responses that run.
        """
        self.arriving += count  # at once, as others ask for room while the database answers
        try:
            if isinstance(self.database, HasRoom) and await self._room(self.database) - self.arriving < RESERVE:
                raise DiskFull
            yield
        finally:
            self.arriving -= count

    async def _room(self, database: HasRoom) -> int:
        try:
            return await database.room()
        except (DatabaseUnavailable, DatabaseRefused, OSError) as exc:  # a folder that is gone has no room
            raise StoreFailed("The store cannot be read.") from exc

    async def size(self) -> int:
        """Return the size on disk in bytes; raises `StoreFailed` if the database cannot be read."""
        try:
            return await self.database.size()
        except (DatabaseUnavailable, DatabaseRefused) as exc:
            raise StoreFailed("The store cannot be read.") from exc


def _size(unit: Unit) -> int:
    return sum(size_of(statement.arguments) for statement in unit.statements)


def _names(changes: Iterable[_Change]) -> Iterable[str]:
    return dict.fromkeys(change.keys[0] for change in changes if change.keys)


def _failed(message: str, cause: Exception) -> StoreFailed:
    error = StoreFailed(message)
    error.__cause__ = cause
    return error


def _fail(done: asyncio.Future[None], error: StoreFailed) -> None:
    """Fail a change's future, without a warning from asyncio if no caller awaits it."""
    done.set_exception(error)
    done.exception()  # marks the exception as retrieved
