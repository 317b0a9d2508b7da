"""vLLM servers over HTTP: token ids in, token ids out, with neither vLLM nor PyTorch in this process.

A prompt goes to the least loaded server.  A stream may be silent as long as its server passes health checks, because
prompts wait in the queue and long ones take time to process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from penstock.pipeline.errors import ServerStopping
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE
from penstock.stages.services.engines.backends import CONNECTING, Backend, Backends, Served, UnusableServer, connector
from penstock.stages.services.engines.endpoints import ENDPOINTS, Endpoint, Refused
from penstock.stages.services.engines.generation import Generation

logger = logging.getLogger(__name__)

CHECKING = 3.0
"""Seconds between two health checks."""

SAYING = 15.0
"""Seconds between two log messages about waiting for a server to start."""

_ANY_ID = 2**31
"""Vocabulary size if the real one is unknown.  That is safe, as a vLLM server refuses ids outside its vocabulary."""


@dataclass(frozen=True)
class HttpEngine:
    """An engine of one vLLM server, or of several that serve the same model."""

    models: tuple[str, ...]
    context_length: int
    vocabulary_size: int
    root: str
    """The model as given on the servers' command line: a Hugging Face id, or a folder on their machine."""
    speaks_harmony: bool | None
    """None if the servers refuse ``/tokenize``, as servers without a tokenizer do."""

    _backends: Backends
    _session: aiohttp.ClientSession
    _checking: asyncio.Task[None]
    _running: set[Generation] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_alive(self) -> bool:
        """True if at least one server is healthy.  May become True again after False."""
        return any(self._backends.healthy)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Send the prompt to a server, and close the connection on exit."""
        if self._stopping.is_set():
            raise ServerStopping
        generation = Generation(self._backends, prompt, time.monotonic())
        self._running.add(generation)
        try:
            await generation.begin()
            if generation.end == "stopped":
                raise ServerStopping
            async with aclosing(generation.frames()) as frames:
                yield frames
        finally:
            self._running.discard(generation)
            generation.leave()

    async def cancel(self, response_id: str) -> bool:
        """Close the connection.  The consumer still gets the tokens received so far, then the end."""
        generations = [generation for generation in self._running if generation.is_for(response_id)]
        for generation in generations:
            generation.finish("cancelled")
        return bool(generations)

    async def stop(self) -> None:
        """Break off all generations, including prompts not yet accepted."""
        self._stopping.set()
        for generation in self._running:
            generation.finish("stopped")

    async def close(self) -> None:
        """Stop the health checks, and close all connections."""
        self._checking.cancel()
        with suppress(asyncio.CancelledError):
            await self._checking
        await self._session.close()


async def start_http(
    urls: Sequence[str],
    model: str | None = None,
    api_key: str | None = None,
    *,
    wait: float = 600.0,
    interval: float = CHECKING,
    endpoints: tuple[Endpoint[Any], ...] = ENDPOINTS,
) -> HttpEngine:
    """Return an engine over the vLLM servers at ``urls`` as soon as one of them answers; the others may join later.

    ``model`` is one of the served names, by default the first.  Health checks run every ``interval`` seconds.  Raises
    `UnusableServer` if no server answers within ``wait`` seconds, if a server lacks something required, or if the
    servers differ in what they serve.
    """
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECTING)
    session = aiohttp.ClientSession(connector=connector(), headers=headers, timeout=timeout)
    try:
        backends = Backends(tuple(Backend(url.rstrip("/"), session, endpoints) for url in dict.fromkeys(urls)))
        served = await _first_served(backends, model, wait)
    except BaseException:
        await session.close()
        raise
    root = next(backend.root for backend in backends.healthy)
    size = VOCABULARY_SIZE if served.speaks_harmony else _ANY_ID
    checking = asyncio.create_task(_keep_checking(backends, model, served, interval))
    return HttpEngine(
        served.models, served.context_length, size, root, served.speaks_harmony, backends, session, checking
    )


async def _first_served(backends: Backends, model: str | None, wait: float) -> Served:
    """Wait for a server to answer; return what it serves.  All servers that answer by then must serve the same."""
    urls = " and ".join(backend.url for backend in backends.all)
    started = next_log = time.monotonic()
    while True:
        results = await asyncio.gather(*(_served(backend, model) for backend in backends.all))
        answering = {backend: one for backend, one in zip(backends.all, results, strict=True) if one}
        if len(set(answering.values())) > 1:
            summary = ", ".join(f"{backend.url}: {one}" for backend, one in answering.items())
            raise UnusableServer(f"The engines do not serve the same ({summary}).")
        for backend in answering:
            backend.take_in()
        for served in answering.values():
            return served
        if time.monotonic() - started >= wait:
            raise UnusableServer(f"No engine answers at {urls}.")
        if time.monotonic() >= next_log:
            logger.info("Waiting for an engine at %s", urls)
            next_log += SAYING
        await asyncio.sleep(min(1.0, wait))


async def _served(backend: Backend, model: str | None) -> Served | None:
    """Return what a server serves, or None if it does not answer; raise `UnusableServer` if it cannot be used."""
    try:
        return await backend.look(model)
    except (aiohttp.ClientError, TimeoutError) as error:
        logger.debug("The engine at %s does not answer: %r", backend.url, error)
        return None
    except Refused as error:
        if error.status == 429 or error.status >= 500:
            return None
        hint = ": set PENSTOCK_ENGINE_KEY" if error.status == 401 else ""
        raise UnusableServer(f"The engine at {backend.url} refuses this server ({error}){hint}.") from error


async def _keep_checking(backends: Backends, model: str | None, served: Served, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        await asyncio.gather(*(_check(backend, model, served) for backend in backends.all))


async def _check(backend: Backend, model: str | None, served: Served) -> None:
    """Leave an unhealthy server out, and take a recovered one in if it serves the same as the others."""
    if not await backend.check():
        backend.leave_out(f"The engine at {backend.url} does not say that it is well.")
    elif not backend.is_healthy:
        try:
            current = await _served(backend, model)
        except UnusableServer as error:
            backend.leave_out(str(error))
            return
        if current == served:
            backend.take_in()
        elif current:
            backend.leave_out(f"The engine at {backend.url} does not serve what the others do: {current}.")
