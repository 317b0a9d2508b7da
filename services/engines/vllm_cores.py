"""vLLM's engine cores for several server processes, by the mechanism of ``vllm serve --api-server-count``.

One process, the supervisor, starts the cores and the servers.  Each server reaches the cores through two sockets, whose
listeners the supervisor keeps: so a server that has died can be started again.  Written against vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from penstock.services.engines.workers import mark_workers
from penstock.stages.models.vllm_private import Greeting

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

ENDING = 5.0
"""Seconds that the cores get to end."""

IMPORTED = ("vllm.v1.engine.async_llm",)
"""Modules that a process imports to use the cores, which takes seconds."""

ANSWER = 2.0
"""Seconds to wait for the cores to answer a process that has come back, before it asks again."""


@dataclass(frozen=True)
class CoreClient:
    """One of ``count`` processes that use the cores, and its way to them; it can be sent to a process that starts."""

    index: int
    count: int
    addresses: dict[str, Any] = field(default_factory=dict)
    """vLLM's ``client_addresses``: listening sockets, and memory that all processes share."""
    greetings: Sequence[Greeting] = ()
    """The first message of each core, if a process before this one has received them."""


class Cores:
    """Running engine cores, and the way of each process to them."""

    def __init__(self, clients: Sequence[CoreClient], manager: Any, coordinator: Any) -> None:
        self._clients = list(clients)
        self._managers = [each for each in (manager, coordinator) if each is not None]

    def client(self, index: int) -> CoreClient:
        """Return the way of a process to the cores."""
        return self._clients[index]

    def greeted(self, index: int, greetings: Sequence[Greeting]) -> None:
        """Keep the first messages of the cores for the process that may follow: they are sent only once."""
        self._clients[index] = replace(self._clients[index], greetings=greetings)

    @property
    def sentinels(self) -> Sequence[int]:
        """Descriptors that are ready when a process of the cores has ended."""
        return [each.sentinel for manager in self._managers for each in getattr(manager, "processes", ())]

    def close(self, seconds: float) -> None:
        """End the cores, after at most ``seconds`` for what they do."""
        for manager in self._managers:
            manager.shutdown(timeout=seconds)


StartProcess = Callable[[CoreClient], "BaseProcess"]


@contextmanager
def launched(config: VllmConfig, count: int, start: StartProcess, *, counts_statistics: bool) -> Iterator[Cores]:
    """Start the engine cores and ``count`` processes that use them, for the length of a block.

    The cores have loaded the model when the block begins.  Call it in the main thread, as the cores end with it.
    Raises `RuntimeError` if a core or a process ends meanwhile.
    """
    from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
    from vllm.v1.executor import Executor

    mark_workers()
    listeners = bind_engine_zmq_listeners(config, count)
    executor = Executor.get_class(config)
    with launch_core_engines(config, executor, counts_statistics, listeners.addresses) as launch:
        shared = _shared(config, count, launch)
        clients = [
            CoreClient(
                index,
                count,
                {
                    "input_address": to_cores.address,
                    "output_address": from_cores.address,
                    "input_listener": to_cores.socket,
                    "output_listener": from_cores.socket,
                    **shared,
                },
            )
            for index, (to_cores, from_cores) in enumerate(zip(listeners.inputs, listeners.outputs, strict=True))
        ]
        cores = Cores(clients, launch.engine_manager, launch.coordinator)
        launch.watched_frontend_processes = [start(client) for client in clients]
    try:
        yield cores
    finally:
        cores.close(ENDING)
        for listener in (*listeners.inputs, *listeners.outputs):
            listener.cleanup()


def _shared(config: VllmConfig, count: int, launch: Any) -> dict[str, Any]:
    """Return what vLLM's clients of the same cores share."""
    shared: dict[str, Any] = {}
    if config.scheduler_config.max_num_queued_reqs is not None:
        from vllm.v1.engine.admission_control import SharedAdmissionStats

        counters = SharedAdmissionStats.num_counters(count)
        shared["mp_admission_counters"] = multiprocessing.get_context("spawn").RawArray("q", counters)
    if launch.coordinator is not None:
        shared["stats_update_address"] = launch.coordinator.get_stats_publish_address()
    if launch.tensor_queue is not None:
        shared["tensor_queue"] = launch.tensor_queue
    return shared


async def reached(llm: AsyncLLM) -> None:
    """Wait until all cores answer: they connect again to the sockets of a process that has died."""
    while True:
        try:
            async with asyncio.timeout(ANSWER):
                await llm.engine_core.is_scheduler_paused_async()
        except TimeoutError:  # a core that has not connected again never got the question
            continue
        return
