"""Servers that write what penstock writes, and do less: the steps from a bare server to penstock.

    sent     one task writes to the transports of all streams
    bare     a task of each stream waits for its tokens, and writes them with aiohttp
    engine   the same, with vLLM's `AsyncLLM` and penstock's `VllmEngine` in between
    stages   the same, with the stages of penstock from the engine to the events, which are encoded

All are above the same engine core.  Their bytes are those of penstock's pipeline for as many tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from types import SimpleNamespace
from typing import Any, TypeAlias

from aiohttp import web

from penstock.api.http.sse import SSE_HEADERS
from penstock.api.settings import Settings
from penstock.api.start.backends import in_this_process
from penstock.pipeline.core import source_of
from penstock.pipeline.frames import TokenChunk, replace, with_facts
from penstock.pipeline.protocol.events import Event, OutputTextDelta, to_sse
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.engine import Engine
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.engines.vllm import VllmEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.bench.core import MARK, SteppedCore
from tests.support.engine_requests import prompt
from tests.support.event_streams import harmony_pipeline

DELTAS = 1_000
"""Deltas whose bytes are written, again and again."""

Source: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[int]]]
"""Opens a stream, which yields the number of tokens that have come."""


async def deltas() -> list[bytes]:
    """Return what penstock writes for each token of a text."""
    markup, text = load_encoding().encode_markup, load_encoding().encode(MARK)
    script = Script((*markup("<|channel|>final<|message|>"), *text * DELTAS, *markup("<|return|>")))
    async with harmony_pipeline(ScriptedEngine(script)).open(
        source_of([CreateResponse(input="Hi", stream=True)])
    ) as events:
        return [to_sse(event) async for event in events if isinstance(event, OutputTextDelta)]


@dataclass
class Stream:
    """A request of the core, without vLLM: its tokens are counted, or written by ``write`` as they come."""

    request_id: str
    write: Callable[[], None] | None
    unread: int = 0
    is_ended: bool = False
    ready: asyncio.Event = field(default_factory=asyncio.Event)

    async def tokens(self) -> AsyncGenerator[int, None]:
        while not self.is_ended:
            await self.ready.wait()
            self.ready.clear()
            new, self.unread = self.unread, 0
            yield new


class Direct:
    """The requests of an engine core, without vLLM."""

    def __init__(self, core: SteppedCore) -> None:
        self._core = core
        self._streams: dict[str, Stream] = {}
        self._states: dict[str, Any] = {}
        self._numbers = count()
        core.states = self._states

    @asynccontextmanager
    async def open(self, write: Callable[[], None] | None = None) -> AsyncGenerator[AsyncIterator[int], None]:
        """Add a request for the length of a block."""
        stream = Stream(f"r{next(self._numbers)}", write)
        self._streams[stream.request_id] = stream
        self._states[stream.request_id] = SimpleNamespace(queue=stream)
        await self._core.add_request_async(stream)
        try:
            yield stream.tokens()
        finally:
            del self._streams[stream.request_id], self._states[stream.request_id]

    async def run(self) -> None:
        """Pass the core's outputs on to their streams."""
        while True:
            batch = await self._core.get_output_async()
            for output in batch.outputs:
                stream = self._streams[output.request_id]
                if output.finish_reason is not None:
                    stream.is_ended = True
                elif stream.write:
                    stream.write()
                    continue
                stream.unread += 1
                stream.ready.set()


def over(engine: Engine) -> Source:
    """Return a source of requests to an engine of penstock."""
    numbers, asked = count(), prompt("Hi", max_tokens=None)

    @asynccontextmanager
    async def opened() -> AsyncGenerator[AsyncIterator[int], None]:
        response = replace(asked.facts.response, id=f"resp_{next(numbers)}")
        async with engine.open(with_facts(asked, response=response)) as frames:
            yield (len(frame.token_ids) async for frame in frames if isinstance(frame, TokenChunk))

    return opened


def staged(engine: Engine) -> Callable[[web.Request], Any]:
    """Return a handler that writes the events of penstock's stages, without a run that keeps them."""
    pipeline = harmony_pipeline(engine).through("emit")

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = await begun(request)
        async with pipeline.open(source_of([CreateResponse(input="Hi", stream=True)])) as events:
            async for event in events:
                if isinstance(event, Event):
                    await answer.write(to_sse(event))
        await answer.write_eof()
        return answer

    return handle


def writing(source: Source, events: list[bytes]) -> Callable[[web.Request], Any]:
    """Return a handler that writes one event for each token of a source, those that come together at once."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer, rest = await begun(request), cycle(events)
        async with source() as tokens:
            async for new in tokens:
                await answer.write(b"".join(islice(rest, new)))
        await answer.write_eof()
        return answer

    return handle


def sending(direct: Direct, events: list[bytes]) -> Callable[[web.Request], Any]:
    """Return a handler that leaves the writing to the task that reads the core's outputs."""
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in events]

    async def handle(request: web.Request) -> web.StreamResponse:
        answer, rest = await begun(request), cycle(chunks)
        write = request.transport.write  # type: ignore[union-attr] # the client waits
        async with direct.open(lambda: write(next(rest))) as tokens:
            async for _ in tokens:
                pass
        await answer.write_eof()
        return answer

    return handle


async def healthy(_: web.Request) -> web.Response:
    return web.Response()


async def begun(request: web.Request) -> web.StreamResponse:
    await request.read()
    answer = web.StreamResponse(headers=SSE_HEADERS)
    await answer.prepare(request)
    return answer


async def serve_bare(which: str, settings: Settings, cores: list[SteppedCore]) -> None:
    """Serve the streams of an engine core until the task is cancelled.

    The core joins ``cores`` when clients can connect.
    """
    async with AsyncExitStack() as closing:
        events = await deltas()
        core = None if which in ("engine", "stages") else SteppedCore()
        if core is None:
            engine = (await closing.enter_async_context(in_this_process(settings))).engine
            assert isinstance(engine, VllmEngine)
            handle = writing(over(engine), events) if which == "engine" else staged(engine)
        else:
            direct = Direct(core)
            closing.callback(asyncio.create_task(direct.run()).cancel)
            handle = sending(direct, events) if which == "sent" else writing(direct.open, events)
        app = web.Application()
        app.router.add_post("/v1/responses", handle)
        app.router.add_get("/health", healthy)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        closing.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", settings.port).start()
        if core is not None:
            cores.append(core)
        await asyncio.Event().wait()
