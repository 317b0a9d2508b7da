"""The life of a model whose process penstock starts: up while requests need it, asleep or ended while none does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from typing import Generic, NoReturn, TypeVar

import aiohttp

from penstock.extensions.models.child import GRACE, Child, ChildSpec, Port, running_child
from penstock.extensions.models.turns import Groups, Owner
from penstock.pipeline import metrics
from penstock.pipeline.errors import ModelUnavailable, ServerStopping
from penstock.pipeline.foreign_errors import is_own, named_error
from penstock.pipeline.logs import duration
from penstock.services.engines.engine import ModelState

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between a start that has failed and the next one: the first ones, which double, and the most."""

LOOK_SECONDS = 0.2
"""Seconds between two looks if a process that starts answers."""

SLEEP_TIMEOUT = 120.0
"""Seconds that a process has to fall asleep, or to wake: it copies its weights."""

LEAVE_TIMEOUT = 10.0
"""Seconds that responses have to notice that the process has ended under them."""

_LOOK_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None)

_WAKING: dict[int, tuple[tuple[str, object], ...]] = {
    1: (("/wake_up", None),),
    2: (
        ("/wake_up?tags=weights", None),
        ("/collective_rpc", {"method": "reload_weights"}),
        ("/wake_up?tags=kv_cache", None),
        ("/reset_prefix_cache", None),
    ),
}
"""The requests that wake vLLM from a level of sleep.  That of level 2 has forgotten its weights, and reads them again
before it takes the memory for its cache."""


class _Failed(Exception):
    """The process has not started, or has ended by itself: the message says why, in words for clients."""


class _PutDown(Exception):
    """The process is to end, and has not failed."""


class _Given(Generic[T]):
    """The value that one start of the process gives to its leases."""

    def __init__(self, value: T) -> None:
        self.value = value
        self.leases = 0
        self.none_left = asyncio.Event()
        self.none_left.set()


def measure_change(model: str, before: ModelState, since: float, state: ModelState) -> None:
    """Note in the metrics how long a model took to start or to stop, if that has ended: the time was ``since`` then."""
    if before in ("starting", "stopping") and state != before:
        metrics.MODEL_CHANGE_SECONDS.labels(model, before, state).observe(max(0.0, time.time() - since))


def log_unusable(model: str, error: Exception) -> None:
    """Log why a model cannot be opened: an own error says all in its text, and another one in its traceback."""
    logger.error("Model %s cannot be used: %s", model, named_error(error), exc_info=None if is_own(error) else error)


class Pause:
    """The pause between a start that has failed and the next one, which doubles as long as they fail."""

    def __init__(self) -> None:
        self._ends = 0.0
        self._next = FIRST_PAUSE

    @property
    def left(self) -> float:
        """The seconds until a model may start; none or less if it may."""
        return self._ends - asyncio.get_running_loop().time()

    def begin(self) -> float:
        """Begin the pause after a start that has failed, and return its seconds."""
        seconds, self._next = self._next, min(2 * self._next, LONGEST_PAUSE)
        self._ends = asyncio.get_running_loop().time() + seconds
        return seconds

    def reset(self) -> None:
        """Note that a start has not failed."""
        self._next = FIRST_PAUSE


class Lease(Generic[T]):
    """The right to use a model that is up; the model does not yield while one is held."""

    def __init__(self, value: T, release: Callable[[], None]) -> None:
        self.value = value
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give it back; a second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


class OnDemand(Generic[T]):
    """A model that starts as requests need it; ``opened`` opens what its leases give, at the URL of its process.

    ``opened`` is entered when the process is up, and left before it ends; it stays open while the process sleeps.  If
    the process ends under leases, ``opened`` is left when they are released, or after `LEAVE_TIMEOUT`.
    A model is also a group of its own: after a change of its settings it waits for the end of its former process.
    """

    def __init__(
        self,
        name: str,
        spec: ChildSpec,
        groups: Groups,
        opened: Callable[[str], AbstractAsyncContextManager[T]],
        *,
        grace: float = GRACE,
    ) -> None:
        self.name = name
        self.spec = spec
        self.state: ModelState = "stopped"
        self.reason = ""
        """Why it has failed, in words for clients; empty if the latest start has not."""
        self.changed_at = time.time()
        """The time of the change to the state."""
        self._opened = opened
        self._grace = grace
        self._groups = groups
        self._turns = groups.turns
        self._member = groups.turns.join(name, (*spec.groups, f"[models.{name}]"), spec.priority)
        groups.join(self._member, Owner(start=self._notice, give_up=self._yield, open=self._serve))
        self._port = Port()
        self._child: Child | None = None
        self._session: aiohttp.ClientSession
        self._given: _Given[T] | None = None
        self._waiters: deque[asyncio.Future[Lease[T]]] = deque()
        self._news = asyncio.Event()
        """Set when the task is to look at what it waits for."""
        self._bound: asyncio.Timeout | None = None
        self._resting: asyncio.TimerHandle | None = None
        self._pause = Pause()
        self._task: asyncio.Task[None] | None = None
        self._is_closing = False
        self._has_left = False

    @property
    def url(self) -> str:
        """The address of the process, which stays the same for all of its starts."""
        return self._port.url

    @property
    def pid(self) -> int | None:
        """The process that the command has become, if it runs."""
        return self._child.pid if self._child else None

    @property
    def running(self) -> int:
        """The leases that are held."""
        return self._given.leases if self._given else 0

    @property
    def waiting(self) -> int:
        """The requests that wait for a lease."""
        return len(self._waiters)

    async def acquire(self, wait: float | None) -> Lease[T]:
        """Return a lease, as soon as the model is up and has its turn.

        Raises `ModelUnavailable` after ``wait`` seconds, if the start fails, and if the latest one has just failed.
        """
        if self._is_closing:
            raise ServerStopping
        if self._member.is_open:
            return self._lease()
        if (pause := self._pause.left) > 0:
            raise ModelUnavailable(self.name, self.reason, pause)
        waiter: asyncio.Future[Lease[T]] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._turns.want(self._member)
        self._groups.settle()
        try:
            async with asyncio.timeout(wait):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()
            if isinstance(error, TimeoutError):
                raise ModelUnavailable(self.name, self._why_not_yet()) from None
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                if not self._waiters:
                    self._forgo()

    async def run(self) -> None:
        """Start, put down and end the process as requests need it, until this is cancelled or `close` is called."""
        if self._is_closing:  # before this has begun
            return
        self._task = asyncio.current_task()
        try:
            while True:
                await self._until(lambda: self._member.has_place)
                await self._live()
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
        finally:
            self._leave()

    async def retire(self) -> None:
        """Refuse requests from now on, and close when none is left that waits or has a lease."""
        self._is_closing = True
        while self.waiting or self.running:
            await asyncio.sleep(LOOK_SECONDS)
        await self.close()

    async def close(self) -> None:
        """End the process, and refuse requests from now on; those that wait get `ServerStopping`."""
        self._is_closing = True
        if self._task is None:
            self._leave()
        else:
            self._task.cancel()
            await asyncio.wait([self._task])

    def _leave(self) -> None:
        if self._has_left:
            return
        self._is_closing = self._has_left = True
        self._fail_waiters(ServerStopping)
        self._groups.leave(self._member)
        self._port.close()
        self._turn("stopped")

    # Leases

    def _lease(self) -> Lease[T]:
        given = self._given
        assert given is not None
        given.leases += 1
        given.none_left.clear()
        self._turns.lease(self._member)
        self._look_at_use()

        def release() -> None:
            given.leases -= 1
            if given.leases == 0:
                given.none_left.set()
            if given is self._given:
                self._turns.release(self._member)
                self._groups.settle()
                self._look_at_use()

        return Lease(given.value, release)

    def _serve(self) -> None:
        """Give leases to all that wait: the model is open."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(self._lease())
        self._forgo()

    def _fail_waiters(self, error: Callable[[], Exception]) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error())
        self._forgo()

    def _forgo(self) -> None:
        self._turns.forgo(self._member)
        self._groups.settle()
        self._look_at_use()

    def _look_at_use(self) -> None:
        """Let the model rest after its time without use."""
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        if self.spec.idle is not None and self._member.is_open and self._member.is_unused:
            self._resting = asyncio.get_running_loop().call_later(self.spec.idle, self._rest, self.spec.idle)

    def _why_not_yet(self) -> str:
        if not self._member.has_place:
            return "other models are up in its place"
        return "it is starting" if self.state == "starting" else "it yields to another model"

    # What ends a wait of the task

    def _notice(self) -> None:
        self._news.set()
        if self._bound is not None and (self._member.yields or self._has_ended):
            self._bound.reschedule(0.0)

    def _yield(self) -> None:
        waiting = (each for each in self._turns.members if each.ticket is not None and not each.has_place)
        names = [each.name for each in waiting if each.groups & self._member.groups]
        logger.info("Model %s yields, as its place is needed by %s", self.name, ", ".join(names))
        self._notice()

    def _rest(self, idle: float) -> None:
        logger.info("Model %s rests, as it was not used for %s", self.name, duration(idle))
        self._put_down()

    def _put_down(self) -> None:
        """Give no more leases, and let the process sleep or end."""
        self._turns.give_up(self._member)
        self._notice()

    @property
    def _has_ended(self) -> bool:
        return self._child is not None and self._child.end_reason is not None

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    @asynccontextmanager
    async def _within(self, seconds: float) -> AsyncGenerator[None, None]:
        """Raise `TimeoutError` in a block after ``seconds``, or when the process ends or is to yield."""
        self._bound = bound = asyncio.timeout(seconds)
        async with bound:
            try:
                yield
            finally:
                self._bound = None

    # The process

    async def _live(self) -> None:
        """Run one process, from its start to its end."""
        try:
            async with AsyncExitStack() as life:
                try:
                    await self._start(life)
                    await self._stay()
                except (_PutDown, _Failed) as error:
                    end = error  # of the process: what is open below is left as usual
                finally:
                    self._turn("stopping")
                    self._put_down()
            if isinstance(end, _Failed):
                self._fail(str(end))
            else:
                self._turn("stopped")
        except Exception as error:  # noqa: BLE001 - it is logged
            log_unusable(self.name, error)
            self._fail(f"it cannot be used ({named_error(error)})")
        finally:
            self._child = self._given = None
            self._turns.down(self._member)
            self._groups.settle()

    async def _start(self, life: AsyncExitStack) -> None:
        """Start the process; raises `_Failed`, or `_PutDown` if it has to yield."""
        self._turn("starting")
        try:
            async with self._within(self.spec.start_timeout):
                running = running_child(self.name, self.spec, self._port, self._put_down, self._grace)
                self._child = await life.enter_async_context(running)
                headers = {"Authorization": f"Bearer {self.spec.key}"} if self.spec.key else {}
                self._session = await life.enter_async_context(
                    aiohttp.ClientSession(self.url, headers=headers, timeout=_LOOK_TIMEOUT)
                )
                await self._answers("/health", 200)
                await self._answers("/v1/models", 499)
                self._given = _Given(await life.enter_async_context(self._opened(self.url)))
        except TimeoutError:
            self._raise_end(" while it started")
            raise _Failed(f"it did not start within {duration(self.spec.start_timeout)}") from None
        self._child.is_up = True
        self.reason = ""
        self._pause.reset()

    async def _answers(self, path: str, most: int) -> None:
        """Wait until the process answers at a path with a status of at most ``most``."""
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with self._session.get(path, allow_redirects=False) as answer:
                    if answer.status <= most:
                        return
            await asyncio.sleep(LOOK_SECONDS)

    def _raise_end(self, when: str) -> None:
        """Raise the reason for which the process is to go, if there is one."""
        if self._child is not None and self._child.end_reason is not None:
            raise _Failed(f"{self._child.end_reason}{when}")
        if self._member.yields:
            raise _PutDown

    async def _stay(self) -> NoReturn:
        """Give leases and sleep, until the process is to end: with `_PutDown`, or with `_Failed` if it fails."""
        while True:
            self._turn("ready")
            self._turns.up(self._member)
            if self._member.is_open:
                self._serve()
            await self._until(lambda: self._member.yields or self._has_ended)
            self._put_down()
            if self._has_ended or self.running or not self.spec.sleep:
                await self._end()
            await self._sleep()

    async def _end(self) -> NoReturn:
        """End the process, under leases if there are any."""
        assert self._child is not None
        self._turn("stopping")
        reason = self._child.end_reason
        self.reason = reason or self.reason
        if self.running and self._given is not None:
            if reason is None:
                logger.warning("Model %s ends under its responses, as another one has a higher priority", self.name)
            await self._child.end()
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_TIMEOUT):
                    await self._given.none_left.wait()
        if reason is None:
            raise _PutDown
        raise _Failed(reason)

    async def _sleep(self) -> None:
        """Let the process sleep until the model has a place again, and wake it; a process that cannot is put down."""
        self._turn("stopping")
        try:
            async with asyncio.timeout(SLEEP_TIMEOUT):
                await self._post(f"/sleep?level={self.spec.sleep}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self._give_up_sleep("fall asleep", error)
        self._turn("asleep")
        self._turns.down(self._member)
        self._groups.settle()
        await self._until(lambda: self._member.has_place or self._has_ended)
        self._raise_end(" while it slept")
        self._turn("starting")
        try:
            async with self._within(SLEEP_TIMEOUT):
                for path, body in _WAKING[self.spec.sleep]:
                    await self._post(path, body)
                await self._answers("/health", 200)
        except (aiohttp.ClientError, TimeoutError) as error:
            self._raise_end(" while it woke")
            self._give_up_sleep("wake", error)

    def _give_up_sleep(self, what: str, error: Exception) -> NoReturn:
        logger.warning("Model %s does not %s (%s): its process ends", self.name, what, named_error(error))
        raise _PutDown

    async def _post(self, path: str, body: object = None) -> None:
        async with self._session.post(path, json=body, timeout=_NO_TIMEOUT) as answer:
            answer.raise_for_status()

    def _fail(self, reason: str) -> None:
        """Note why it has failed.  If it was not up, refuse those that wait, and pause before the next start."""
        self.reason = reason
        logger.warning("Model %s has failed: %s", self.name, reason)
        for line in self._child.lines if self._child else ():
            logger.warning("%s: %s", self.name, line)
        self._turn("failed")
        if self._given is None:
            pause = self._pause.begin()
            self._fail_waiters(lambda: ModelUnavailable(self.name, reason, pause))

    def _turn(self, state: ModelState) -> None:
        if state != self.state:
            logger.info("Model %s is %s", self.name, state)
            measure_change(self.name, self.state, self.changed_at, state)
            self.state, self.changed_at = state, time.time()
