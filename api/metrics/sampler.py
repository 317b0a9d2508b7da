"""The gauges that mirror the state of a server, and the delay of its event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator

from aiohttp import web

from penstock.api.http.held_bytes import HeldBytes
from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline import metrics
from penstock.pipeline.distribution import own_version
from penstock.services.engines.engine import MODEL_STATES, Backend, SeveralEngines
from penstock.services.engines.vllm_http import VllmHttpEngine
from penstock.services.runs.run import Mode
from penstock.stages.models.vllm_private import installed_vllm

logger = logging.getLogger(__name__)

PERIOD = 0.25
"""Seconds between two timers that measure the delay of the event loop."""

EVERY = 4
"""Timers between two samples of the gauges."""


class Sampler:
    """Sets the gauges from the runs of ``scheduler`` and the bodies that are ``held``."""

    def __init__(self, scheduler: Scheduler, held: HeldBytes) -> None:
        self._scheduler = scheduler
        self._held = held
        self._running: Counter[tuple[str, Mode]] = Counter()

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
        engine = self._scheduler.engine
        if not isinstance(engine, SeveralEngines):
            self._sample_engine(engine, "local")
            return
        for title in dict.fromkeys(map(engine.title, engine.models)):
            own = engine.of(title)
            self._sample_engine(own, title)
            metrics.MODEL_WAITING.labels(title).set(engine.waiting(title))
            present = engine.state(title)
            for state in MODEL_STATES:
                metrics.MODEL_STATE.labels(title, state).set(state == present)

    def _sample_engine(self, engine: Backend, title: str) -> None:
        if not isinstance(engine, VllmHttpEngine):
            metrics.ENGINE_UP.labels(title).set(engine.is_alive)
            return
        caches = engine.replicas.caches
        blocks = caches.sizes() if caches else {}
        for replica in engine.replicas.all:
            metrics.ENGINE_UP.labels(replica.address).set(replica.is_healthy)
            metrics.ENGINE_RUNNING.labels(replica.address).set(len(replica.running))
            if replica.url in blocks:
                metrics.ENGINE_CACHED_BLOCKS.labels(replica.address).set(blocks[replica.url])
