"""An event loop on a virtual clock.  It runs the tasks of several simulated processes, in an order that a seed decides.

Each `Process` has the order of asyncio: its callbacks run in the order in which they were scheduled.  Between processes
there is no order.  So the loop takes the next callback of a process that the seed chooses.  The clock moves a little
with each callback, and jumps to the next timer if no process has anything to do.

Work for threads runs in the loop's thread, as one callback, after a delay that the seed decides.  Its result arrives
later.  A process may die between any two callbacks: from then on none of its callbacks runs.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeVar

from tests.simulation.network import Network

T = TypeVar("T")

CALLBACK_SECONDS = 20e-6
"""The most seconds that a callback takes."""

THREAD_SECONDS = 2e-3
"""The most seconds that work takes in a thread."""


LONGEST_SECONDS = 3600.0
"""The virtual seconds after which a simulation has failed to end."""


class Stuck(Exception):
    """Nothing is left to run, and the simulation has not ended."""


class WorkFault(Exception):
    """A fault of the work in a thread, with the ``error`` that its caller gets.

    If ``is_late``, the work is done all the same.
    """

    def __init__(self, error: Exception, *, is_late: bool) -> None:
        super().__init__(str(error))
        self.error, self.is_late = error, is_late


@dataclass(eq=False)
class Process:
    """A server, a client, or the simulation itself."""

    name: str
    is_dead: bool = False
    paused_until: float = 0.0
    """The time until which none of its callbacks runs."""
    ready: deque[asyncio.Handle] = field(default_factory=deque)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    threads: dict[int, float] = field(default_factory=dict)
    """The time at which each thread of one worker is free."""
    delay: Callable[[str], float] = lambda _: 0.0
    """Returns the seconds that the next work takes in addition, by the name of its threads; raises `WorkFault`."""
    steps_left: int = -1
    """Callbacks until ``at_step`` is called; negative for never."""
    at_step: Callable[[], None] = lambda: None


PROCESS: ContextVar[Process] = ContextVar("PROCESS")


class SimulatedTask(asyncio.Task[T]):
    """A task with a hash that does not depend on memory, as sets of tasks are iterated."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class SimulatedFuture(asyncio.Future[T]):
    """A future with a hash that does not depend on memory."""

    def __init__(self, number: int, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self.number = number

    def __hash__(self) -> int:
        return self.number


class SimulatedLoop(asyncio.AbstractEventLoop):
    """The loop of one simulation, which makes its choices by ``seed``."""

    def __init__(self, seed: str) -> None:
        self.now = 0.0
        self.steps = 0
        self.network = Network(self, seed)
        self.errors: list[dict[str, Any]] = []
        """The contexts of errors that nothing handles."""
        self.is_silent = False
        """True while what is left of dead processes is freed."""
        self._random = random.Random(f"{seed} order")
        self._trace = blake2b(digest_size=8)
        self._timers: list[tuple[float, float, int, Process, asyncio.TimerHandle]] = []
        self._runnable: list[Process] = []
        self._numbers = itertools.count()
        self._graves: list[object] = []
        self._world = Process("world")
        """The process of the simulation itself."""

    @property
    def trace(self) -> str:
        """A hash of all callbacks so far, with their times and processes."""
        return self._trace.hexdigest()

    @property
    def process(self) -> Process:
        """The process that runs."""
        return PROCESS.get(self._world)

    def note(self, text: str) -> None:
        """Add a line to the trace."""
        self._trace.update(text.encode())

    # Running

    def run_until_complete(self, future: Coroutine[Any, Any, T]) -> T:  # type: ignore[override]
        """Run a coroutine to its end, in the process of the simulation itself."""
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finalize)
        asyncio._set_running_loop(self)
        try:
            context = copy_context()
            context.run(PROCESS.set, self._world)
            task: asyncio.Task[T] = self.create_task(future, context=context)
            while not task.done():
                self._step()
            return task.result()
        finally:
            asyncio._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)

    def _step(self) -> None:
        while self._timers and self._timers[0][0] <= self.now:
            *_, owner, timer = heapq.heappop(self._timers)
            self._enqueue(owner, timer)
        process = self._chosen()
        if process is None:
            self._jump()
            return
        handle = process.ready.popleft()
        if not process.ready:
            self._runnable.remove(process)
        if handle.cancelled():
            return
        self.steps += 1
        self.now += self._random.random() * CALLBACK_SECONDS
        self.note(f"{self.now:.6f} {process.name} {_name(handle)}\n")
        handle._run()
        process.steps_left -= 1
        if process.steps_left == 0:
            process.at_step()

    def _chosen(self) -> Process | None:
        able = [process for process in self._runnable if process.paused_until <= self.now]
        if len(able) < 2:
            return able[0] if able else None
        return able[int(self._random.random() * len(able))]

    def _jump(self) -> None:
        times = [process.paused_until for process in self._runnable]
        if self._timers:
            times.append(self._timers[0][0])
        if not times:
            raise Stuck("Nothing is left to run")
        self.now = max(self.now, min(times))
        if self.now > LONGEST_SECONDS:
            raise Stuck("The simulation does not end")

    def _enqueue(self, process: Process, handle: asyncio.Handle) -> None:
        if process.is_dead:
            self._graves.append(handle)
            return
        if not process.ready:
            self._runnable.append(process)
        process.ready.append(handle)

    def kill(self, process: Process) -> None:
        """Let none of a process's callbacks run any more; keep what it holds, so that nothing of it is finalized."""
        process.is_dead = True
        self._graves += [*process.ready, *process.tasks]
        if process.ready:
            process.ready.clear()
            self._runnable.remove(process)

    def bury(self) -> None:
        """Free what is left of the processes; what it does at its end is without effect."""
        self.is_silent = True
        self._graves.clear()
        self._timers.clear()
        self._runnable.clear()
        self.network.close()

    def _process_of(self, context: Context | None) -> Process:
        return self.process if context is None else context.get(PROCESS, self._world)

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self.is_silent and not self.process.is_dead:
            self.call_soon(self.create_task, generator.aclose())

    # Scheduling

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        handle = asyncio.Handle(callback, args, self, context or copy_context())
        self._enqueue(self._process_of(context), handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment] # typeshed checks the arguments of the callback

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context or copy_context())
        entry = when, self._random.random(), next(self._numbers), self._process_of(context), timer
        heapq.heappush(self._timers, entry)
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled timer is left out when its time has come."""

    def create_future(self) -> asyncio.Future[Any]:
        return SimulatedFuture(next(self._numbers), loop=self)

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, T], *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[T]:
        number = next(self._numbers)
        SimulatedTask.number = number  # for the hash that the constructor of tasks computes
        task = SimulatedTask(coro, loop=self, name=name or f"Task-{number}", context=context)
        task.number = number
        tasks = self._process_of(context).tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run work as one callback after a delay; a thread of one worker does one work after another."""
        process, future = self.process, self.create_future()
        fault: WorkFault | None = None
        try:
            extra = process.delay(getattr(executor, "_thread_name_prefix", ""))
        except WorkFault as injected:
            extra, fault = 0.0, injected
        free_at = self.now if executor is None else max(self.now, process.threads.get(id(executor), 0.0))
        seconds = extra + self._random.random() * THREAD_SECONDS
        done_at = free_at + seconds
        process.threads[id(executor)] = done_at
        self.call_at(free_at + self._random.random() * seconds, _work, self, future, fault, done_at, func, args)
        return future

    # The rest of asyncio's protocol

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return self.is_silent

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.is_silent:
            self.errors.append(context)

    default_exception_handler = call_exception_handler

    async def sock_connect(self, sock: Any, address: Any) -> None:
        await self.network.connect(sock, address)

    async def create_connection(self, protocol_factory: Callable[[], Any], *_: Any, **options: Any) -> Any:
        return self.network.joined(protocol_factory, options["sock"])

    async def create_server(
        self, protocol_factory: Callable[[], Any], host: Any = None, port: Any = None, **_: Any
    ) -> Any:
        return self.network.listen(protocol_factory, host, port)


def _work(
    loop: SimulatedLoop,
    future: asyncio.Future[Any],
    fault: WorkFault | None,
    done_at: float,
    func: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    if future.cancelled():
        return
    error: Exception | None = None if fault is None else fault.error
    result = None
    if fault is None or fault.is_late:
        try:
            result = func(*args)
        except Exception as raised:  # noqa: BLE001 - the caller gets it
            error = raised
    if error:
        loop.call_at(done_at, _settle, future.set_exception, future, error)
    else:
        loop.call_at(done_at, _settle, future.set_result, future, result)


def _settle(settle: Callable[[Any], None], future: asyncio.Future[Any], value: Any) -> None:
    if not future.cancelled():
        settle(value)


def _name(handle: asyncio.Handle) -> str:
    callback = handle._callback  # type: ignore[attr-defined]
    owner = getattr(callback, "__self__", None)
    name = getattr(callback, "__qualname__", type(callback).__name__)
    return f"{name} {owner.get_name()}" if isinstance(owner, asyncio.Task) else name
