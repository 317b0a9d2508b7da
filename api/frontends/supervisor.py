"""Supervisor: starts the frontends of a server, spreads the connections among them, and starts those that die again.

It accepts every connection, and passes it on to the frontend that has the fewest.  So a frontend that is stopped, or
whose event loop is held, gets none, and a new one is used at once.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client.multiprocess import mark_process_dead

from penstock.api.frontends.frontend_config import FrontendConfig
from penstock.api.frontends.link import (
    Draining,
    EngineLost,
    Failed,
    FromFrontend,
    FrontendLost,
    LastConnectionSent,
    Link,
    Received,
    RequestBegun,
    RequestEnded,
    Serving,
    Stop,
    new_link,
)
from penstock.api.http.connections import bind, listen
from penstock.api.runs.store_settings import NO_STORE
from penstock.api.settings import Settings
from penstock.api.start.serving import ENDED_WITH_ENGINE
from penstock.api.start.share import FrontendState, Share, shared_states
from penstock.pipeline.errors import CannotStart, EngineDead
from penstock.pipeline.logs import counted
from penstock.services.engines.vllm import VllmPlan
from penstock.services.engines.vllm_cores import IMPORTED, CoreClient, Cores
from penstock.services.engines.workers import mark_workers

logger = logging.getLogger(__name__)

SEEN = 0.6
"""Seconds without a sign of life after which a frontend gets no connections, while others do better."""

AT_ONCE = 64
"""The most connections that are accepted in one step of the event loop."""

SOON = 10.0
"""Seconds that a frontend has to live, so that it is started again at once if it dies."""

LONGEST = 30.0
"""The most seconds between the end of a frontend and its next start."""

AFTER_DRAIN = 30.0
"""Seconds that frontends get to stop, besides ``--drain-timeout``."""

Target = Callable[[FrontendConfig], None]
"""The function that a frontend runs; it is given to a process by its name."""


@dataclass
class FrontendProcess:
    """A frontend as the supervisor knows it."""

    config: FrontendConfig
    state: FrontendState
    process: BaseProcess
    link: Link
    started: float = field(default_factory=time.monotonic)
    given: int = 0
    """Connections that were sent to it."""
    in_transit: deque[socket.socket] = field(default_factory=deque)
    """The connections that were sent, and that it has not received yet."""
    takes: bool = False
    """True if it serves, and does not leave."""
    requests: dict[str, None] = field(default_factory=dict)
    """Requests that the engine works on for it."""

    @property
    def connections(self) -> int:
        """The number of its connections."""
        return self.state.open + self.given - self.state.received

    @property
    def load(self) -> tuple[bool, int, int]:
        """Its precedence for a new connection, the lowest first."""
        return time.monotonic() - self.state.seen_at > SEEN, self.connections, self.given


class Supervisor:
    """The frontends of one server, which ``bound`` listens for."""

    def __init__(self, settings: Settings, count: int, target: Target, bound: socket.socket) -> None:
        self._settings = settings
        self._count = count
        self._target = target
        self._bound = bound
        self._states = shared_states(count)
        self._frontends: dict[int, FrontendProcess] = {}
        self._configs: list[FrontendConfig] = []
        self._cores: Cores | None = None
        self._pauses = [0.0] * count
        self._stopping = False
        self._has_engine = True
        self._ended = asyncio.Event()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Open what the frontends share, for the length of a block; kill those that still run at its end."""
        with ExitStack() as closing:
            folder = Path(closing.enter_context(TemporaryDirectory(prefix="penstock-")))
            if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
                (folder / "metrics").mkdir()
                os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder / "metrics")
                closing.callback(os.environ.pop, "PROMETHEUS_MULTIPROC_DIR")
            self._prepare(folder, closing)
            closing.callback(self._kill)
            yield

    def _prepare(self, folder: Path, closing: ExitStack) -> None:
        settings = self._settings
        counts = folder / "counts.sqlite3" if settings.store == NO_STORE else None
        output = closing.enter_context(_copy(1)), closing.enter_context(_copy(2))
        metrics = None
        if settings.metrics_port is not None:
            metrics = closing.enter_context(bind(settings.host, settings.metrics_port))
            listen(metrics)
        host = settings.host if settings.peer_url else "127.0.0.1"
        listening = [closing.enter_context(bind(host, 0)) for _ in range(self._count)]
        for each in listening:
            listen(each)
        urls = [settings.frontend_at(each.getsockname()[1]) for each in listening]
        for index, (own, url) in enumerate(zip(listening, urls, strict=True)):
            share = Share(index, self._count, self._states, counts)
            siblings = [each for each in urls if each != url]
            self._configs.append(
                FrontendConfig(
                    settings=settings,
                    share=share,
                    link=own,
                    listening=own,
                    siblings=siblings,
                    url=url,
                    output=output,
                    metrics=metrics,
                )
            )

    def start(self, client: CoreClient) -> BaseProcess:
        """Start a frontend, by a process that has imported what frontends import: the first start waits for that."""
        index = client.index
        mark_workers()
        link, theirs = new_link()
        state = self._states[index]
        state.received = state.open = state.running = 0
        state.slots_used = state.slots_waiting = state.slots_of_lines = 0
        state.seen_at = time.monotonic()
        config = self._configs[index]
        output = DupFd(config.output[0]), DupFd(config.output[1])
        given = replace(
            config,
            link=theirs,
            output=output,
            environment=dict(os.environ),
            client=client if client.addresses else None,
        )
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload([self._target.__module__, *(IMPORTED if given.client else ())])
        with theirs:
            process = forks.Process(target=self._target, args=(given,))
            process.start()
        self._frontends[index] = FrontendProcess(config, state, process, link)
        return process

    def start_all(self) -> None:
        """Start all frontends of an engine elsewhere."""
        for index in range(self._count):
            self.start(CoreClient(index, self._count))

    @contextmanager
    def launched(self, plan: VllmPlan) -> Iterator[None]:
        """Start the engine of a plan and all frontends, for the length of a block."""
        try:
            with plan.launch(self._count, self.start) as self._cores:
                yield
        except RuntimeError as error:  # vLLM's, if a frontend ends while the model loads
            if failure := self._failure():
                raise failure from error
            raise

    def wait(self) -> Serving:
        """Wait until all frontends serve, and return what one of them says; raise `CannotStart` if one does not."""
        ready: dict[int, Serving] = {}
        while len(ready) < self._count:
            waiting = [each for index, each in self._frontends.items() if index not in ready]
            links: list[Any] = [each.link for each in waiting]
            wait([*links, *(each.process.sentinel for each in waiting)], 1.0)
            for each in waiting:
                for message in each.link.messages():
                    if isinstance(message, Failed):
                        raise CannotStart(message.message)
                    self._take(each, message)
                    if isinstance(message, Serving):
                        ready[each.config.share.index] = message
                if not each.process.is_alive():
                    raise CannotStart(f"{each.config.name} ended with status {each.process.exitcode}")
        return ready[0]

    def _failure(self) -> CannotStart | None:
        """Return the reason for which a frontend could not start, if one says so."""
        for each in self._frontends.values():
            for message in each.link.messages():
                if isinstance(message, Failed):
                    return CannotStart(message.message)
        return None

    # While they serve

    async def run(self) -> None:
        """Spread the connections and watch the frontends, until a signal stops the server.

        With --exit-with-engine, raise `EngineDead` when the engine has died.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        for number in (signal.SIGHUP, signal.SIGUSR1):
            loop.add_signal_handler(number, self._forward, number)
        for each in self._frontends.values():
            self._watch(each)
        for sentinel in self._cores.sentinels if self._cores else ():
            loop.add_reader(sentinel, self._lose_engine)
        self._bound.setblocking(False)
        self._listen()
        await self._ended.wait()
        loop.remove_reader(self._bound)
        if self._settings.exit_with_engine and not self._has_engine:
            raise EngineDead(ENDED_WITH_ENGINE)

    def _listen(self) -> None:
        """Accept connections while a frontend takes them; the others wait in the queue of the socket."""
        loop = asyncio.get_running_loop()
        if self._taking:
            loop.add_reader(self._bound, self._accept)
        else:
            loop.remove_reader(self._bound)

    def _watch(self, frontend: FrontendProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(frontend.link, self._read, frontend)
        loop.add_reader(frontend.process.sentinel, self._end, frontend)

    def _read(self, frontend: FrontendProcess) -> None:
        for message in frontend.link.messages():
            self._take(frontend, message)
        self._listen()

    def _take(self, frontend: FrontendProcess, message: FromFrontend) -> None:
        match message:
            case RequestBegun(request_id):
                frontend.requests[request_id] = None
            case RequestEnded(request_id):
                frontend.requests.pop(request_id, None)
            case Serving(_, _, greetings):
                frontend.takes = True
                logger.info("%s serves, as process %d", frontend.config.name, frontend.process.pid)
                if self._cores:
                    self._cores.greeted(frontend.config.share.index, greetings)
            case Failed(text):
                logger.error("%s cannot start: %s", frontend.config.name, text)
            case Received(count):
                while len(frontend.in_transit) > frontend.given - count:
                    frontend.in_transit.popleft().close()
            case Draining():
                frontend.takes = False
                frontend.link.send(LastConnectionSent())

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._bound.accept()
            except OSError:  # no connection waits any more, or its client has left
                return
            self._pass_on(connection)

    def _pass_on(self, connection: socket.socket) -> None:
        """Give a connection to the frontend with the fewest; without one that takes it, it is closed."""
        for frontend in sorted(self._taking, key=lambda each: each.load):
            if frontend.link.pass_on(connection):
                frontend.given += 1
                frontend.in_transit.append(connection)
                return
        connection.close()

    @property
    def _taking(self) -> Sequence[FrontendProcess]:
        return [each for each in self._frontends.values() if each.takes]

    # Ends

    def _lose_engine(self) -> None:
        """Tell the frontends that the engine has died: their responses end, and ``/health`` says so."""
        assert self._cores
        for sentinel in self._cores.sentinels:
            asyncio.get_running_loop().remove_reader(sentinel)
        self._has_engine = False
        logger.error("A process of the engine has ended")
        for each in self._frontends.values():
            each.link.send(EngineLost())
        if self._settings.exit_with_engine:
            self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for each in self._frontends.values():
            each.link.send(Stop())
        if not self._frontends:
            self._ended.set()
        asyncio.get_running_loop().call_later(self._settings.drain_timeout + AFTER_DRAIN, self._kill)

    def _forward(self, number: int) -> None:
        for each in self._frontends.values():
            with suppress(ProcessLookupError):  # it has died, and `_end` is about to be called
                os.kill(each.process.pid or 0, number)

    def _end(self, frontend: FrontendProcess) -> None:
        """Clean up after a frontend that has ended, and start it again unless the server stops."""
        loop, index = asyncio.get_running_loop(), frontend.config.share.index
        self._read(frontend)  # its last messages
        loop.remove_reader(frontend.link)
        loop.remove_reader(frontend.process.sentinel)
        frontend.link.end.close()
        frontend.process.join()
        del self._frontends[index]
        state = frontend.state
        state.slots_used = state.slots_waiting = state.slots_of_lines = 0
        mark_process_dead(frontend.process.pid)  # type: ignore[no-untyped-call]
        self._listen()
        if self._stopping:
            if not self._frontends:
                self._ended.set()
            return
        status, running = frontend.process.exitcode, counted(state.running, "running response")
        logger.log(
            logging.ERROR if status else logging.INFO,
            "%s has ended with status %s and %s; it is started again",
            *(frontend.config.name, status, running),
        )
        if others := self._taking:
            others[0].link.abort(tuple(frontend.requests))
            others[0].link.send(FrontendLost(frontend.config.url))
        for connection in frontend.in_transit:  # of which it has read nothing
            self._pass_on(connection)
        loop.call_later(self._pause(frontend), self._start_again, index)

    def _pause(self, frontend: FrontendProcess) -> float:
        """Return the seconds until a frontend is started again: more each time, if it always dies soon."""
        index = frontend.config.share.index
        lived = time.monotonic() - frontend.started
        before = self._pauses[index]
        self._pauses[index] = 0.0 if lived > SOON + before else min(LONGEST, max(1.0, 2 * before))
        return self._pauses[index]

    def _start_again(self, index: int) -> None:
        if self._stopping or not self._has_engine:
            return
        self.start(self._cores.client(index) if self._cores else CoreClient(index, self._count))
        self._watch(self._frontends[index])

    def _kill(self) -> None:
        for each in self._frontends.values():
            each.process.kill()
        for each in self._frontends.values():
            each.process.join()


@contextmanager
def _copy(descriptor: int) -> Iterator[int]:
    """Yield a copy of a descriptor, for the length of a block."""
    copy = os.dup(descriptor)
    try:
        yield copy
    finally:
        os.close(copy)
