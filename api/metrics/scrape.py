"""The route ``/metrics``, on the port of the API or on one of its own."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass

from aiohttp import hdrs, web
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from penstock.api.http.api_key import digest_of
from penstock.api.http.auth import any_opens, authorizations
from penstock.api.http.connections import bind
from penstock.api.metrics.sampler import Sampler
from penstock.pipeline.errors import Unauthorized

PATH = "/metrics"


@dataclass(frozen=True)
class Metrics:
    """Answers scrapes; a ``key``, if there is one, is that of the operator's Prometheus.

    With ``needs_key`` and without a key, every scrape is refused.
    """

    sampler: Sampler
    key: str = ""
    needs_key: bool = False

    async def scrape(self, request: web.Request) -> web.Response:
        """Report the metrics of this server, of its engine, and of the other processes of the server."""
        self._check_key(request)
        self.sampler.sample()
        # Not OpenMetrics, in which prometheus_client 0.26 writes vllm_ in place of vllm:
        text = await asyncio.to_thread(lambda: generate_latest(_registry()))
        answer = web.Response(body=text, headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_PLAIN_0_0_4})
        answer.enable_compression()
        return answer

    def _check_key(self, request: web.Request) -> None:
        """Raise `Unauthorized` unless a header has the key, or no key is needed."""
        if not self.needs_key and not self.key:
            return
        if not self.key or not any_opens(authorizations(request), digest_of(self.key)):
            raise Unauthorized(variable="PENSTOCK_METRICS_KEY", is_set=bool(self.key))


def _registry() -> CollectorRegistry:
    """Return the metrics of this process, or those of all processes that write into ``PROMETHEUS_MULTIPROC_DIR``."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        return REGISTRY
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # prometheus_client types only a part of itself
    return registry


@asynccontextmanager
async def serving_metrics(sampler: Sampler, bound: socket.socket | None) -> AsyncGenerator[None, None]:
    """Serve the metrics on a socket of their own, if there is one, for the length of a block."""
    if bound is None:
        yield
        return
    app = web.Application()
    app.add_routes([web.get(PATH, Metrics(sampler).scrape)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()


def bound_for_metrics(host: str, port: int | None) -> AbstractContextManager[socket.socket | None]:
    """Bind the port of the metrics, if they have one of their own, for the length of a block."""
    return nullcontext() if port is None else bind(host, port)
