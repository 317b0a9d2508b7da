"""vLLM servers over HTTP: token ids in, token ids out, with neither vLLM nor PyTorch in this process.

A prompt goes to the server of its conversation, unless that one is busy.  A stream may be silent as long as its server
passes health checks, because prompts wait in the queue and long ones take time to process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from penstock.pipeline.errors import ServerStopping
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.frames import EngineFrame, Prompt
from penstock.pipeline.tasks import cancelled
from penstock.services.engines.engine import CacheHint
from penstock.services.engines.http_endpoints import ENDPOINTS, Endpoint, RequestRefused
from penstock.services.engines.http_generation import HttpGeneration
from penstock.services.engines.replicas import (
    CONNECT_TIMEOUT,
    PrefixCaches,
    Replica,
    Replicas,
    ServedModel,
    UnusableServer,
    connector,
)
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE

logger = logging.getLogger(__name__)

CHECK_INTERVAL = 3.0
"""Seconds between two health checks."""

POLL_INTERVAL = 1.0
"""Seconds between two looks at the load of a server.  With 3, agents wait half as long again at p99 (`make fleet`)."""

ALONE_INTERVAL = 10.0
"""Seconds between two looks at the only server, if it has shown one engine core: those without requests show late."""

LOG_INTERVAL = 15.0
"""Seconds between two log messages about waiting for a server to start."""

_ANY_ID = 2**31
"""Vocabulary size if the real one is unknown.  That is safe, as a vLLM server refuses ids outside its vocabulary."""


@dataclass(frozen=True, kw_only=True)
class VllmHttpEngine:
    """An engine of one vLLM server, or of several that serve the same model."""

    models: tuple[str, ...]
    context_length: int
    vocabulary_size: int
    root: str
    """The model as given on the servers' command line: a Hugging Face id, or a folder on their machine."""
    speaks_harmony: bool | None
    """None if the servers tokenize no text, as servers without a tokenizer."""

    replicas: Replicas
    _session: aiohttp.ClientSession
    _tasks: Sequence[asyncio.Task[None]]
    """The tasks that check the servers and read their loads."""
    _running: set[HttpGeneration] = field(default_factory=set)
    _stopping: asyncio.Event = field(default_factory=asyncio.Event)
    scores_prompts: Literal[True] = True
    scores_tokens: Literal[True] = True

    @property
    def is_alive(self) -> bool:
        return any(self.replicas.healthy)

    @property
    def holds_grammars(self) -> bool:
        return not any(replica.grammar_fault for replica in self.replicas.healthy)

    @asynccontextmanager
    async def open(self, prompt: Prompt) -> AsyncGenerator[AsyncIterator[EngineFrame], None]:
        if self._stopping.is_set():
            raise ServerStopping
        generation = HttpGeneration(self.replicas, prompt, time.monotonic())
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
        generations = [generation for generation in self._running if generation.is_for(response_id)]
        for generation in generations:
            generation.finish("cancelled")
        return bool(generations)

    async def ask_for_hints(self) -> None:
        """Ask the servers whether their schedulers take hints, now and whenever they come back."""
        await asyncio.gather(*(replica.ask_for_hints(self.models[0]) for replica in self.replicas.all))

    def hint(self, hint: CacheHint) -> bool:
        """Tell the server that has a conversation that it is over; that a prompt waits, the server knows by itself."""
        return hint.action == "let_go" and self.replicas.let_go(hint.session)

    async def stop(self) -> None:
        self._stopping.set()
        for generation in self._running:
            generation.finish("stopped")

    def follow(self, caches: PrefixCaches) -> None:
        """Choose servers by what their prefix caches hold from now on."""
        self.replicas.caches = caches

    async def close(self) -> None:
        await cancelled(self._tasks)
        await self._session.close()


async def start_vllm_http(
    urls: Sequence[str],
    model: str | None = None,
    api_key: str | None = None,
    *,
    wait: float = 600.0,
    interval: float = CHECK_INTERVAL,
    endpoints: tuple[Endpoint[Any], ...] = ENDPOINTS,
) -> VllmHttpEngine:
    """Return an engine over the vLLM servers at ``urls`` as soon as one of them answers; the others may join later.

    ``model`` is one of the served names, by default the first.  Health checks run every ``interval`` seconds.  Raises
    `UnusableServer` if no server answers within ``wait`` seconds, if a server lacks something required, or if the
    servers differ in what they serve.
    """
    headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT)
    session = aiohttp.ClientSession(connector=connector(), headers=headers, timeout=timeout, auto_decompress=False)
    try:
        replicas = Replicas(
            tuple(Replica(url, session, endpoints) for url in dict.fromkeys(url.rstrip("/") for url in urls))
        )
        served = await _first_served(replicas, model, wait)
    except BaseException:
        await session.close()
        raise
    root = next(replica.root for replica in replicas.healthy)
    size = VOCABULARY_SIZE if served.speaks_harmony else _ANY_ID
    await asyncio.gather(*map(replicas.poll, replicas.healthy))
    tasks = [asyncio.create_task(_keep_polling(replicas, replica)) for replica in replicas.all]
    tasks.append(asyncio.create_task(_keep_checking(replicas, model, served, interval)))
    return VllmHttpEngine(
        models=served.models,
        context_length=served.context_length,
        vocabulary_size=size,
        root=root,
        speaks_harmony=served.speaks_harmony,
        replicas=replicas,
        _session=session,
        _tasks=tasks,
    )


async def _first_served(replicas: Replicas, model: str | None, wait: float) -> ServedModel:
    """Wait for a server to answer; return what it serves.  All servers that answer by then must serve the same."""
    started = next_log = time.monotonic()
    while True:
        results = await asyncio.gather(*(_served(replica, model) for replica in replicas.all))
        answers = dict(zip(replicas.all, results, strict=True))
        answering = {replica: one for replica, one in answers.items() if isinstance(one, ServedModel)}
        silent = "; ".join(f"{replica.url}: {one}" for replica, one in answers.items() if isinstance(one, str))
        if len(set(answering.values())) > 1:
            summary = ", ".join(f"{replica.url}: {one}" for replica, one in answering.items())
            raise UnusableServer(f"The engines serve different models ({summary}).")
        for replica in answering:
            replica.include()
        for served in answering.values():
            return served
        if time.monotonic() - started >= wait:
            raise UnusableServer(f"No engine answers. {silent}")
        if time.monotonic() >= next_log:
            logger.info("Waiting for an engine. %s", silent)
            next_log += LOG_INTERVAL
        await asyncio.sleep(min(1.0, wait))


async def _served(replica: Replica, model: str | None) -> ServedModel | str:
    """Return what a server serves, or why it gives no answer; raise `UnusableServer` if it cannot be used."""
    try:
        return await replica.probe(model)
    except (aiohttp.ClientError, TimeoutError) as error:
        return named_error(error)
    except RequestRefused as error:
        if error.status == 429 or error.status >= 500:
            return str(error)
        hint = ": set PENSTOCK_ENGINE_KEY" if error.status == 401 else ""
        raise UnusableServer(f"The engine at {replica.url} refuses this server ({error}){hint}.") from error


async def _keep_checking(replicas: Replicas, model: str | None, served: ServedModel, interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        await asyncio.gather(*(_check(replicas, replica, model, served) for replica in replicas.all))


async def _keep_polling(replicas: Replicas, replica: Replica) -> None:
    while True:
        await replicas.poll(replica)
        await asyncio.sleep(POLL_INTERVAL if replicas.has_choice else ALONE_INTERVAL)


async def _check(replicas: Replicas, replica: Replica, model: str | None, served: ServedModel) -> None:
    """Leave an unhealthy server out, and take a recovered one in if it serves the same as the others."""
    if not await replica.check():
        replica.exclude(f"The engine at {replica.url} fails its health check.")
    elif not replica.is_healthy:
        try:
            current = await _served(replica, model)
        except UnusableServer as error:
            replica.exclude(str(error))
            return
        if current == served:
            if replicas.caches:
                replicas.caches.forget(replica.url)
            replica.include()
            await replicas.poll(replica)
        elif isinstance(current, ServedModel):
            replica.exclude(f"The engine at {replica.url} serves other models than the other servers: {current}.")
