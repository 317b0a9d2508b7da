"""Servers that write what penstock writes, and do less: the steps from a bare server to penstock.

    python -m tests.bench.bare sent|bare|engine|stages PORT HANDSHAKE [options of vLLM]

    sent     one task writes to the transports of all streams
    bare     a task of each stream waits for its tokens, and writes them with aiohttp
    engine   vLLM's `AsyncLLM` and penstock's `VllmEngine` write to the transports, over hot paths
    stages   the same, with the stages of penstock from the engine to the events, which are encoded

All are above an engine core that dials the port HANDSHAKE.  Their bytes are those of penstock for as many tokens.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import aiohttp
import uvloop
from aiohttp import web

from penstock.api.cli.command_line import read_settings
from penstock.api.http.sse import SSE_HEADERS
from penstock.api.runs.housekeeping import forget_generators, tune_gc
from penstock.api.start.backends import in_this_process
from penstock.pipeline import hot_path
from penstock.pipeline.core import source_of
from penstock.pipeline.frames import ItemDelta, TokenChunk, replace, with_facts
from penstock.pipeline.protocol.events import Event, OutputTextDelta, to_sse
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.services.engines.scripted import Script, ScriptedEngine
from penstock.services.engines.vllm import VllmEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.bench.apis import APIS, Api
from tests.bench.engine_protocol import Frontend
from tests.bench.loopback import MODEL, NAME
from tests.bench.readers import MARK
from tests.support.engine_requests import prompt
from tests.support.event_streams import harmony_pipeline
from tests.support.server import running_server

DELTAS = 1_000
"""Deltas whose bytes are written, again and again."""

(MEASURED,) = load_encoding().encode(MARK.decode())
"""The token that the servers write.  They drop those before it, which are no text of an answer."""

Source: TypeAlias = Callable[[], AbstractAsyncContextManager[AsyncIterator[int]]]
"""Opens a stream, which yields the number of tokens that have come."""


async def deltas(apis: Mapping[str, Api] = APIS) -> dict[str, list[bytes]]:
    """Return what penstock writes for each token of a text, by the path of each API."""
    markup, text = load_encoding().encode_markup, (MEASURED,)
    script = Script((*markup("<|channel|>final<|message|>"), *text * DELTAS, *markup("<|return|>")))
    found = {}
    with TemporaryDirectory() as folder:
        async with (
            running_server(ScriptedEngine(script, models=(NAME,)), Path(folder)) as server,
            aiohttp.ClientSession(raise_for_status=True) as client,
        ):
            for api in apis.values():
                asked = {"model": NAME, "stream": True, **api.asking("Hi")}
                async with client.post(f"{server.url}{api.path}", json=asked) as answer:
                    events = (await answer.read()).split(b"\n\n")
                found[api.path] = [event + b"\n\n" for event in events if event.count(MARK) == 1]
    return found


@dataclass
class Stream:
    """A request of the core, without vLLM: its tokens are counted, or written by ``write`` as they come."""

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

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._streams: dict[str, Stream] = {}
        self._numbers = count()

    @asynccontextmanager
    async def open(self, write: Callable[[], None] | None = None) -> AsyncGenerator[AsyncIterator[int], None]:
        """Add a request for the length of a block."""
        stream, request_id = Stream(write), f"r{next(self._numbers)}"
        self._streams[request_id] = stream
        await self._frontend.add(request_id)
        try:
            yield stream.tokens()
        finally:
            del self._streams[request_id]

    async def run(self) -> None:
        """Pass the core's outputs on to their streams."""
        async for outputs in self._frontend.steps():
            for output in outputs:
                stream = self._streams[output.request_id]
                if output.finish_reason is not None:
                    stream.is_ended = True
                new = output.tokens.count(MEASURED)
                if stream.write:
                    for _ in range(new):
                        stream.write()
                elif new:
                    stream.unread += new
                if stream.is_ended or stream.unread:
                    stream.ready.set()


@dataclass
class Outlet:
    """The outlet of a hot path: a connection, to which each event is written at once, as `encode` returns it."""

    transport: Any
    encode: Callable[[Any], bytes]
    is_ready: bool = True

    def put(self, event: Any) -> None:
        data = self.encode(event)
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Nothing:
    """A stand-in on a hot path for the stages and a run: its events are the tokens."""

    is_plain, ended = True, False

    def read(self, chunk: TokenChunk) -> ItemDelta | None:
        measured = chunk.token_ids.count(MEASURED)
        return ItemDelta("." * measured) if measured else None

    def take_text(self, _: str) -> None:
        pass

    def feed_text(self, delta: ItemDelta) -> OutputTextDelta:
        return OutputTextDelta(0, "", 0, 0, delta.text)

    def append(self, _: Any) -> bool:
        return True


def over(engine: VllmEngine, events: Mapping[str, Sequence[bytes]]) -> Callable[[web.Request], Any]:
    """Return a handler that writes one event for each token of an engine of penstock."""
    numbers, asked, nothing, pipeline = count(), prompt("Hi", max_tokens=None), Nothing(), harmony_pipeline(engine)

    async def handle(request: web.Request) -> web.StreamResponse:
        answer, rest = await begun(request), cycle(events[request.path])
        response = replace(asked.facts.response, id=f"resp_{next(numbers)}")
        outlet = Outlet(request.transport, lambda event: b"".join(islice(rest, len(event.delta))))
        hot_path.begin(pipeline)
        hot_path.lead_through(None)
        hot_path.join(read=nothing.read, turn=nothing, writer=nothing, log=nothing, outlet=outlet, has_begun=True)
        async with engine.open(with_facts(asked, response=response)) as frames:
            async for frame in frames:
                if isinstance(frame, TokenChunk) and (delta := nothing.read(frame)):
                    outlet.put(nothing.feed_text(delta))
        await answer.write_eof()
        return answer

    return handle


def staged(engine: VllmEngine) -> Callable[[web.Request], Any]:
    """Return a handler that writes the events of penstock's stages, without a run that keeps them."""
    pipeline, nothing = harmony_pipeline(engine).through("emit"), Nothing()

    async def handle(request: web.Request) -> web.StreamResponse:
        answer, outlet = await begun(request), Outlet(request.transport, to_sse)
        hot_path.begin(pipeline)
        hot_path.lead_through(None)
        hot_path.join(log=nothing, outlet=outlet)
        async with pipeline.open(source_of([CreateResponse(input="Hi", stream=True)])) as events:
            async for event in events:
                if isinstance(event, Event):
                    outlet.put(event)
                    hot_path.join(has_begun=isinstance(event, OutputTextDelta))
        await answer.write_eof()
        return answer

    return handle


def writing(source: Source, events: Mapping[str, Sequence[bytes]]) -> Callable[[web.Request], Any]:
    """Return a handler that writes one event for each token of a source, those that come together at once."""

    async def handle(request: web.Request) -> web.StreamResponse:
        answer, rest = await begun(request), cycle(events[request.path])
        async with source() as tokens:
            async for new in tokens:  # none may have been of the answer
                await answer.write(b"".join(islice(rest, new)))
        await answer.write_eof()
        return answer

    return handle


def sending(direct: Direct, events: Mapping[str, Sequence[bytes]]) -> Callable[[web.Request], Any]:
    """Return a handler that leaves the writing to the task that reads the core's outputs."""
    chunks = {path: [b"%x\r\n%b\r\n" % (len(event), event) for event in each] for path, each in events.items()}

    async def handle(request: web.Request) -> web.StreamResponse:
        answer, rest = await begun(request), cycle(chunks[request.path])
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


@asynccontextmanager
async def handler(
    which: str, handshake: int, options: Sequence[str]
) -> AsyncGenerator[Callable[[web.Request], Any], None]:
    """Yield the handler of a kind of server once its engine core is there."""
    events = await deltas()
    async with AsyncExitStack() as closing:
        if which in ("engine", "stages"):
            settings = read_settings([MODEL, *options])
            engine = (await closing.enter_async_context(in_this_process(settings))).engine
            assert isinstance(engine, VllmEngine)
            yield over(engine, events) if which == "engine" else staged(engine)
            return
        frontend = Frontend(f"tcp://127.0.0.1:{handshake}")
        closing.callback(frontend.close)
        await frontend.accept()
        direct = Direct(frontend)
        passing = asyncio.create_task(direct.run())
        closing.callback(passing.cancel)
        yield sending(direct, events) if which == "sent" else writing(direct.open, events)


async def serve_bare(which: str, port: int, handshake: int, options: Sequence[str] = ()) -> None:
    """Serve the streams of an engine core until the task is cancelled."""
    async with AsyncExitStack() as closing:
        handle = await closing.enter_async_context(handler(which, handshake, options))
        app = web.Application(client_max_size=2**24)
        for api in APIS.values():
            app.router.add_post(api.path, handle)
        app.router.add_get("/health", healthy)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        closing.push_async_callback(runner.cleanup)
        forget_generators()
        tune_gc()  # as penstock does
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(serve_bare(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:]))
