"""The gauges that mirror the state of a server, and the delay of its event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import TypeAlias

from aiohttp import web
from prometheus_client import Gauge

from penstock.api.http.held_bytes import HeldBytes
from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline import metrics
from penstock.pipeline.distribution import own_version
from penstock.services.engines.engine import MODEL_STATES, Backend, NamesWeights, has_several
from penstock.services.engines.vllm_http import VllmHttpEngine
from penstock.services.runs.run import Mode
from penstock.stages.models.vllm_private import installed_vllm

logger = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds between two timers that measure the delay of the event loop."""

EVERY = 4
"""Timers between two samples of the gauges."""

Series: TypeAlias = tuple[Gauge, *tuple[str, ...]]
"""A gauge, and the values of its labels."""


class Sampler:
    """Sets the gauges from the runs of ``scheduler`` and the bodies that are ``held``."""

    def __init__(self, scheduler: Scheduler, held: HeldBytes) -> None:
        self._scheduler = scheduler
        self._held = held
        self._running: Counter[tuple[str, Mode]] = Counter()
        self._shown = set[Series]()

    async def run(self, _: web.Application) -> AsyncGenerator[None, None]:
        """Sample for the lifetime of an application."""
        metrics.BUILD_INFO.labels(own_version(), installed_vllm() or "").set(1)
        sampling = asyncio.create_task(self._sample_forever())
        yield
        sampling.cancel()
        for kind in self._running:
            metrics.RESPONSES_RUNNING.labels(*kind).set(0)

    async def _sample_forever(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.sample()
            except Exception:
                logger.exception("A bug in the gauges")
            for _ in range(EVERY):
                due = loop.time() + PERIOD
                await asyncio.sleep(PERIOD)
                metrics.LOOP_LAG.observe(max(0.0, loop.time() - due))

    def sample(self) -> None:
        """Set the gauges."""
        scheduler = self._scheduler
        metrics.HELD_BYTES.set(self._held.count)
        metrics.STORE_BACKLOG.set(scheduler.store.backlog)
        queued_since = [run.response.created_at for run in scheduler.runs.queued]
        metrics.RESPONSES_QUEUED.set(len(queued_since))
        metrics.OLDEST_QUEUED_SECONDS.set(max(0.0, time.time() - min(queued_since)) if queued_since else 0.0)
        running = Counter[tuple[str, Mode]]((run.model, run.mode) for run in scheduler.runs.running)
        for kind in self._running | running:
            metrics.RESPONSES_RUNNING.labels(*kind).set(running[kind])
        self._running = running
        self._sample_engines()

    def _sample_engines(self) -> None:
        """Set the gauges of the engines; those of models and servers that are gone end."""
        values = dict(of_engines(self._scheduler.engine))
        for gauge, *labels in self._shown - values.keys():
            if "PROMETHEUS_MULTIPROC_DIR" in os.environ:  # its files keep them
                gauge.labels(*labels).set(0)
            else:
                gauge.remove(*labels)
        for (gauge, *labels), value in values.items():
            gauge.labels(*labels).set(value)
        self._shown = set(values)


def of_engines(engine: Backend) -> Iterator[tuple[Series, float]]:
    """Yield the gauges of an engine, or of several."""
    several = engine
    if not has_several(several):
        if not isinstance(engine, VllmHttpEngine):
            yield (metrics.ENGINE_UP, "local"), engine.is_alive
            yield from _of_weights("local", engine)
            return
        for replica in engine.replicas.all:
            yield (metrics.ENGINE_UP, replica.address), replica.is_healthy
        yield from _of_servers(engine)
        return
    for model in several.statuses():
        yield (metrics.MODEL_WAITING, model.name), model.waiting
        for state in MODEL_STATES:
            yield (metrics.MODEL_STATE, model.name, state), state == model.state
        if model.name in engine.models:
            yield (metrics.ENGINE_UP, model.name), model.state == "ready"
            yield from _of_weights(model.name, several.of(model.name))
            yield from _of_servers(several.of(model.name), model.name if model.is_child else None)


def _of_servers(engine: Backend, title: str | None = None) -> Iterator[tuple[Series, float]]:
    """Yield the gauges of servers, by a ``title`` if they change their addresses."""
    if not isinstance(engine, VllmHttpEngine):
        return
    caches = engine.replicas.caches
    blocks = caches.sizes() if caches else {}
    for replica in engine.replicas.all:
        label = title or replica.address
        yield (metrics.ENGINE_RUNNING, label), len(replica.running)
        yield from _of_version(label, replica.weights.shown)
        if known := [blocks[core.name] for core in replica.cores if core.name in blocks]:
            yield (metrics.ENGINE_CACHED_BLOCKS, label), sum(known)


def _of_weights(label: str, engine: Backend) -> Iterator[tuple[Series, float]]:
    if isinstance(engine, NamesWeights):
        yield from _of_version(label, engine.weight_version)


def _of_version(label: str, version: str) -> Iterator[tuple[Series, float]]:
    if version:
        yield (metrics.ENGINE_WEIGHTS, label, version), 1
