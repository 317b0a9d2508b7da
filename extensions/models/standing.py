"""A model whose engine others start and end: its servers, or a function of the operator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context
from typing import Generic, TypeVar

from penstock.extensions.models.life import Lease, Pause, log_unusable, measure_change
from penstock.pipeline.errors import CannotStart, ModelUnavailable, ServerStopping, StageError
from penstock.pipeline.foreign_errors import named_error
from penstock.services.engines.engine import ModelState

T = TypeVar("T")


class Standing(Generic[T]):
    """A model that ``opened`` opens at its first use or at `begin`, and that stays open until it is closed."""

    def __init__(self, name: str, opened: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self.name = name
        self.state: ModelState = "stopped"
        self.reason = ""
        """Why it could not be opened, in words for clients; empty if the latest attempt has not failed."""
        self.changed_at = time.time()
        """The time of the change to the state."""
        self.running = 0
        """The leases that are held."""
        self.waiting = 0
        """The requests that wait for a lease."""
        self._opened = opened
        self._value: asyncio.Future[T] | None = None
        self._closing = asyncio.Event()
        self._unused = asyncio.Event()
        self._unused.set()
        self._task: asyncio.Task[None] | None = None
        self._pause = Pause()

    async def acquire(self, wait: float | None) -> Lease[T]:
        """Return a lease as soon as the model is open.

        Raises `ModelUnavailable` after ``wait`` seconds, if it cannot be opened, and if that has just failed.
        """
        if self._closing.is_set():
            raise ServerStopping
        if self._value is None:
            self.begin()
        assert self._value is not None
        self.waiting += 1
        self._look_at_use()
        try:
            async with asyncio.timeout(wait):
                value = await asyncio.shield(self._value)  # others wait for it, too
        except TimeoutError:
            raise ModelUnavailable(self.name, "it is starting") from None
        finally:
            self.waiting -= 1
            self._look_at_use()
        self.running += 1
        self._look_at_use()
        return Lease(value, self._release)

    def _release(self) -> None:
        self.running -= 1
        self._look_at_use()

    def _look_at_use(self) -> None:
        if self.running or self.waiting:
            self._unused.clear()
        else:
            self._unused.set()

    def begin(self) -> None:
        """Open it now, before its first use.  Raises `ModelUnavailable` if that has just failed."""
        if (pause := self._pause.left) > 0:
            raise ModelUnavailable(self.name, self.reason, pause)
        self._value = given = asyncio.get_running_loop().create_future()
        # its engine lives longer than the response for which it is opened, and logs nothing in its name
        self._task = asyncio.create_task(self._stay(given), context=Context())
        self._task.add_done_callback(lambda _: _refuse(given, ServerStopping()))  # if none has a reason yet

    async def _stay(self, given: asyncio.Future[T]) -> None:
        """Open the model, and keep it open until it is closed."""
        self._turn("starting")
        try:
            async with self._opened() as value:
                self._turn("ready")
                self.reason = ""
                self._pause.reset()
                given.set_result(value)
                await self._closing.wait()
        except (StageError, CannotStart) as error:
            log_unusable(self.name, error)
            self._fail(given, type(error).__name__)
        except Exception as error:  # noqa: BLE001 - it is logged
            log_unusable(self.name, error)
            self._fail(given, named_error(error))
        finally:
            self._value = None

    def _fail(self, given: asyncio.Future[T], error: str) -> None:
        self.reason = f"it cannot be used ({error})"
        self._turn("failed")
        _refuse(given, ModelUnavailable(self.name, self.reason, self._pause.begin()))

    def _turn(self, state: ModelState) -> None:
        measure_change(self.name, self.state, self.changed_at, state)
        self.state, self.changed_at = state, time.time()

    async def retire(self) -> None:
        """Close when no request waits, and no lease is held."""
        while self.running or self.waiting:
            await self._unused.wait()
        await self.close()

    async def close(self) -> None:
        """Close the model, and refuse requests from now on."""
        self._closing.set()
        if self._task is not None:
            if self._value is not None and not self._value.done():
                self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._turn("stopped")


def _refuse(given: asyncio.Future[T], error: StageError) -> None:
    """Refuse those that wait for a value, unless they have it or an error already."""
    if not given.done():
        given.set_exception(error)
        given.exception()  # those that waited may have left
