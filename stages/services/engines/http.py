"""vLLM servers over HTTP: token ids in, token ids out, with neither vLLM nor PyTorch in this process.

A prompt goes to the server with the least to do.  A stream may be silent for as long as its server says that it is
well: prompts queue, and long ones take their time.
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
"""Seconds between two looks at the servers."""

SAYING = 15.0
"""Seconds between two lines of the log on what is waited for."""

_ANY_ID = 2**31
"""One more than the highest id, where nobody knows the vocabulary: a vLLM server refuses ids that it does not know."""


@dataclass(frozen=True)
class HttpEngine:
    """An engine that is one vLLM server, or several that serve the same."""

    models: tuple[str, ...]
    context_length: int
    vocabulary_size: int
    root: str
    """The model, as the servers were told it: a Hugging Face id, or a folder of theirs."""
    speaks_harmony: bool | None
    """None where the servers have no tokenizer to ask."""

    _backends: Backends
    _session: aiohttp.ClientSession
    _checking: asyncio.Task[None]
    _running: set[Generation] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_alive(self) -> bool:
        """Whether any server answers; those that are gone may come back."""
        return any(self._backends.healthy)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        """Give the prompt to a server, and close the connection on the way out."""
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
        """Close the connection; what has come over it by now is still read, and then the end."""
        found = [generation for generation in self._running if generation.is_for(response_id)]
        for generation in found:
            generation.finish("cancelled")
        return bool(found)

    async def stop(self) -> None:
        """Break off what runs, and what is on its way."""
        self._stopping.set()
        for generation in self._running:
            generation.finish("stopped")

    async def close(self) -> None:
        """Ask the servers nothing any more."""
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
    """The vLLM servers at ``urls``, as soon as one of them answers; those that come later join it.

    ``model`` is one of the names that they serve, by default the first.  They are looked at every ``interval`` seconds.
    Raises `UnusableServer` where none answers for
    ``wait`` seconds, and where they serve nothing that can be used, or not the same.
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
    """What the servers serve, once they answer; all that are up by then have to serve the same."""
    urls = " and ".join(backend.url for backend in backends.all)
    deadline = said = time.monotonic()
    while True:
        found = await asyncio.gather(*(_served(backend, model) for backend in backends.all))
        answering = {backend: one for backend, one in zip(backends.all, found, strict=True) if one}
        if len(set(answering.values())) > 1:
            told = ", ".join(f"{backend.url}: {one}" for backend, one in answering.items())
            raise UnusableServer(f"The engines do not serve the same ({told}).")
        for backend in answering:
            backend.take_in()
        for served in answering.values():
            return served
        if time.monotonic() - deadline >= wait:
            raise UnusableServer(f"No engine answers at {urls}.")
        if time.monotonic() >= said:
            logger.info("Waiting for an engine at %s", urls)
            said += SAYING
        await asyncio.sleep(min(1.0, wait))


async def _served(backend: Backend, model: str | None) -> Served | None:
    """What a server serves, if it answers; raises `UnusableServer`."""
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
    """Leave a server out that is not well, and take in one that is."""
    if not await backend.check():
        backend.leave_out(f"The engine at {backend.url} does not say that it is well.")
    elif not backend.is_healthy:
        try:
            found = await _served(backend, model)
        except UnusableServer as error:
            backend.leave_out(str(error))
            return
        if found == served:
            backend.take_in()
        elif found:
            backend.leave_out(f"The engine at {backend.url} does not serve what the others do: {found}.")
