"""A real PostgreSQL for the servers of a simulation, whose own code of the store runs on it.

asyncpg's connections are replaced where the store opens them.  What the store sends reaches a real session after a
virtual delay, and the answer arrives after another one.  In between no virtual time passes: the simulation stands still
until the statement is done.  If it would wait for a lock of another session, it is undone, and done again when a
transaction has ended.  So PostgreSQL does one thing at a time, and a seed decides what; what a transaction locks and
what others see of it is PostgreSQL's own.  Within a statement that waits, locks are not held: a deadlock of two such
statements does not show.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar
from unittest.mock import patch

import asyncpg
from asyncpg import connect

from penstock.services.store.database import NOW
from tests.simulation.determinism import real_seconds
from tests.simulation.loop import Process, SimulatedLoop, WorkFault

T = TypeVar("T")

LATENCY = 1e-3
"""The most virtual seconds until a statement or an answer arrives."""

LOOK = 0.005
"""The real seconds after which a statement that is not done may wait for a lock."""


class RealLoop(asyncio.SelectorEventLoop):
    """A loop on the clock of the machine."""

    def time(self) -> float:
        return real_seconds()


@dataclass(eq=False)
class Work:
    """The work of a session, and the future of the simulation that gets its outcome."""

    session: Session
    begin: Callable[[], Awaitable[Any]]
    outcome: asyncio.Future[Any]
    blockers: frozenset[int] = frozenset()
    """The sessions, by their processes in PostgreSQL, that hold a lock that it waits for."""


class SimulatedPostgres:
    """A database of its own in the PostgreSQL at ``url``, and the sessions of all simulated processes."""

    def __init__(self, url: str, loop: SimulatedLoop, seed: str) -> None:
        self.url = url
        self.loop = loop
        self.draw = random.Random(f"{seed} postgres")
        self._name = f"simulation_{os.getpid()}"
        self._sessions: dict[Session, None] = {}
        self._waiting: list[Work] = []
        self._real = RealLoop()
        self._thread = Thread(target=self._real.run_forever, daemon=True)

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """Take the place of asyncpg's connections for the length of a block."""
        self._thread.start()
        outside = self._run(connect(self.url))
        self._run(outside.execute(f"create database {self._name}"))
        self._own = self._run(connect(self.url, database=self._name))
        try:
            with patch.object(asyncpg, "connect", self._connect), patch.object(asyncpg, "create_pool", self._pool):
                yield
        finally:
            for session in list(self._sessions):
                session.terminate()
            self._run(self._own.close())
            self._run(outside.execute(f"drop database {self._name}"))
            self._run(outside.close())
            self._real.call_soon_threadsafe(self._real.stop)
            self._thread.join()
            self._real.close()

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query, as another process reads them."""
        return [tuple(row) for row in self._run(self._own.fetch(sql))]

    def kill(self, process: Process, _: object) -> None:
        """End the sessions of a process that has died: what they have not committed is undone."""
        for session in [each for each in self._sessions if each.process is process]:
            session.terminate()

    def full(self) -> Exception:
        error: Exception = asyncpg.DiskFullError("could not extend file: No space left on device")
        return error

    def lost(self) -> Exception:
        error: Exception = asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")
        return error

    # For the sessions

    def begin(self, session: Session, work: Callable[[], Awaitable[T]], *, ends: bool) -> asyncio.Future[T]:
        """Begin what a session does, and perhaps ends its transaction with; return the future of its outcome."""
        outcome: asyncio.Future[T] = self.loop.create_future()
        self._try(Work(session, work, outcome))
        if ends:
            self._try_again()
        return outcome

    def end(self, session: Session) -> None:
        """End a session, and wait until it holds no lock."""
        del self._sessions[session]
        self._run(self._own.execute("select pg_terminate_backend($1, 60000)", session.pid))
        self._real.call_soon_threadsafe(session.real.terminate)
        self._try_again()

    def _try(self, work: Work) -> None:
        """Do the work, unless another session holds a lock that it needs: then it waits, and nothing of it is done."""
        session = work.session
        if session.is_in_transaction:
            self._run(session.real.execute("savepoint attempt"))
        attempt = asyncio.run_coroutine_threadsafe(_awaited(work.begin), self._real)
        work.blockers = self._blockers(session, attempt)
        if work.blockers:
            self._run(self._own.execute("select pg_cancel_backend($1)", session.pid))
            concurrent.futures.wait([attempt])
            if session.is_in_transaction:
                self._run(session.real.execute("rollback to savepoint attempt"))
            if self._is_deadlock(work):
                work.outcome.set_exception(asyncpg.DeadlockDetectedError("deadlock detected"))
            else:
                self._waiting.append(work)
        elif error := attempt.exception():
            work.outcome.set_exception(error)
        else:
            work.outcome.set_result(attempt.result())

    def _try_again(self) -> None:
        """Do what waits for a lock, the oldest first, as a transaction has ended."""
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            if not work.outcome.done() and not work.session.is_closed():
                self._try(work)

    def _blockers(self, session: Session, attempt: concurrent.futures.Future[Any]) -> frozenset[int]:
        """Return the sessions that an attempt waits for, or none when it is over."""
        while concurrent.futures.wait([attempt], LOOK).not_done:
            if blockers := self._run(self._own.fetchval("select pg_blocking_pids($1)", session.pid)):
                return frozenset(blockers)
        return frozenset()

    def _is_deadlock(self, work: Work) -> bool:
        """Return True if a session waits for one that waits for it."""
        waits_for = {each.session.pid: each.blockers for each in self._waiting}
        seen, left = set[int](), [*work.blockers]
        while left:
            if (pid := left.pop()) not in seen:
                seen.add(pid)
                left += waits_for.get(pid, ())
        return work.session.pid in seen

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._real).result()

    # In place of asyncpg

    async def _connect(
        self,
        url: str,
        *,
        timeout: float,  # noqa: ASYNC109
        command_timeout: float,
        server_settings: dict[str, str],
    ) -> Session:
        del timeout
        await asyncio.sleep(self.draw.random() * LATENCY)
        real = self._run(connect(url, database=self._name, server_settings=server_settings))
        session = Session(self, real, self.loop.process, command_timeout)
        self._sessions[session] = None
        return session

    async def _pool(self, url: str, *, min_size: int, max_size: int, **options: Any) -> Pool:
        del min_size
        return Pool(lambda: self._connect(url, **options), asyncio.Semaphore(max_size))


@dataclass(eq=False)
class Session:
    """A connection of a simulated process, with what the store uses of asyncpg's."""

    postgres: SimulatedPostgres
    real: Any
    process: Process
    seconds: float
    """Virtual seconds after which a statement is given up."""

    is_in_transaction: bool = False

    @property
    def pid(self) -> int:
        """Its process in PostgreSQL."""
        return int(self.real.get_server_pid())

    def is_closed(self) -> bool:
        return self not in self.postgres._sessions

    def terminate(self) -> None:
        if not self.is_closed():
            self.postgres.end(self)

    async def execute(self, sql: str, *arguments: Any) -> Any:
        return await self._ask(lambda: self.real.execute(_timed(sql), *arguments))

    async def executemany(self, sql: str, arguments: Any) -> Any:
        return await self._ask(lambda: self.real.executemany(_timed(sql), arguments))

    async def fetchval(self, sql: str) -> Any:
        return await self._ask(lambda: self.real.fetchval(sql))

    async def fetch(self, sql: str, *arguments: Any) -> Any:
        return await self._at_risk("store-read", lambda: self.real.fetch(_timed(sql), *arguments))

    @asynccontextmanager
    async def transaction(self) -> AsyncGenerator[None, None]:
        await self.execute("begin")
        self.is_in_transaction = True
        try:
            yield
        except BaseException:
            self.is_in_transaction = False
            if not self.is_closed():
                await self._ask(lambda: self.real.execute("rollback"), ends=True)
            raise
        self.is_in_transaction = False
        await self._at_risk("store-write", lambda: self.real.execute("commit"), ends=True)

    async def _at_risk(self, kind: str, work: Callable[[], Awaitable[T]], *, ends: bool = False) -> T:
        """Do what a fault of the simulation may delay, prevent, or leave without an answer."""
        try:
            await asyncio.sleep(self.process.delay(kind))
        except WorkFault as fault:
            if fault.is_late:
                await self._ask(work, ends=ends)
            self.terminate()
            raise fault.error from None
        return await self._ask(work, ends=ends)

    async def _ask(self, work: Callable[[], Awaitable[T]], *, ends: bool = False) -> T:
        try:
            async with asyncio.timeout(self.seconds):
                await asyncio.sleep(self.postgres.draw.random() * LATENCY)
                if self.is_closed():
                    raise asyncpg.InterfaceError("connection is closed")
                answer = await self.postgres.begin(self, work, ends=ends)
                await asyncio.sleep(self.postgres.draw.random() * LATENCY)
                return answer
        except (TimeoutError, asyncio.CancelledError):
            self.terminate()
            raise


@dataclass(eq=False)
class Pool:
    """As many connections as there are places."""

    connect: Callable[[], Awaitable[Session]]
    places: asyncio.Semaphore
    all: list[Session] = field(default_factory=list)
    idle: list[Session] = field(default_factory=list)

    @asynccontextmanager
    async def acquire(self, *, timeout: float) -> AsyncGenerator[Session, None]:  # noqa: ASYNC109
        async with asyncio.timeout(timeout):
            await self.places.acquire()
        try:
            async with asyncio.timeout(timeout):
                session = await self._session()
            yield session
            self.idle.append(session)
        finally:
            self.places.release()

    async def _session(self) -> Session:
        while self.idle:
            if not (session := self.idle.pop()).is_closed():
                return session
        self.all.append(session := await self.connect())
        return session

    def terminate(self) -> None:
        for session in self.all:
            session.terminate()


async def _awaited(work: Callable[[], Awaitable[T]]) -> T:
    return await work()


def _timed(sql: str) -> str:
    """Return a statement whose clock is that of the simulation."""
    return sql.replace(NOW, f"cast({time.time()!r} as double precision)")
