"""The routes of the live page, for the operator alone: a response with its frames, and the recordings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import msgspec
from aiohttp import web
from pydantic import Field

from penstock.api.dialect import REFUSALS, Edge
from penstock.api.dialects.responses.dialect import RESPONSES
from penstock.api.dialects.responses.form import PLAIN, ResponseBody
from penstock.api.http.auth import for_operators
from penstock.api.http.errors import as_json
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.request_body import receive, release
from penstock.api.http.sse import send
from penstock.api.http.wire import EVENT_STREAM, Reading
from penstock.api.open_sockets import OpenSockets
from penstock.api.resources.resources import ServerParts
from penstock.api.runs.scheduler import Scheduler
from penstock.extensions.workbench.live.go_on import GoOn
from penstock.extensions.workbench.live.models_now import ModelsNow, ModelsView
from penstock.extensions.workbench.live.page import live_page
from penstock.extensions.workbench.live.saved import Saved, find, frames_of, header_of, listed
from penstock.extensions.workbench.live.spelling import Spelling
from penstock.extensions.workbench.live.watch import AT_ONCE, Watch
from penstock.pipeline.core import Pipeline
from penstock.pipeline.distribution import own_version
from penstock.pipeline.errors import InvalidRequest, ResponseNotFound, ServerBusy, UnsupportedParameter
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.validation import read_body
from penstock.pipeline.tasks import in_thread
from penstock.stages.parse.parser import vocabulary_of

BASE = "/live"

MOST_WATCHED = 8
"""The most responses and recordings that this process shows at once."""

WIRE = replace(PLAIN, encode=bytes, end=b"", fault=None)

_Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, min_length=1)]


class Begun(Body):
    """A turn that has begun elsewhere: the tokens of its prompt, and those that the model has written."""

    required = "prompt"

    prompt: _Tokens
    tokens: _Tokens


class WatchBody(ResponseBody):
    """The body of a request for a response that is watched; with ``go_on``, its first turn has begun."""

    go_on: Begun | None = None
    """The tokens of a prompt, and of an answer to it that has begun, which goes on."""


class LiveServer(msgspec.Struct, frozen=True):
    """The abilities of this server for the live page."""

    version: str
    models: tuple[str, ...]
    is_alive: bool
    goes_on: bool
    """True if an answer can go on from its middle: an engine generates here, from tokens."""
    records: bool
    """True if this server has a folder of recordings."""


class SavedList(msgspec.Struct, frozen=True):
    """The latest recordings of this server."""

    data: tuple[Saved, ...]


@dataclass
class _Reader:
    """Reads one body as one of the Responses API, and keeps its ``go_on``."""

    go_on: Begun | None = None

    def __call__(self, body: bytes) -> Reading:
        given = read_body(body, WatchBody)
        if given.background:
            raise UnsupportedParameter("A response that is watched runs in the foreground.", param="background")
        self.go_on = given.go_on
        return Reading(given.create_request, PLAIN, streams=True, as_sent=body)


@dataclass
class Live:
    """The routes over the runs of this process; ``folder`` has its recordings, if it records."""

    edge: Edge
    folder: Path | None = None
    goes_on: bool = True
    running: int = 0
    watch: Any = field(default=Watch)

    def __post_init__(self) -> None:
        self.view = ModelsView(self.scheduler)

    @property
    def scheduler(self) -> Scheduler:
        """The runs of this process."""
        return self.edge.scheduler

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes."""
        return (
            web.get(f"{BASE}/server", self.server),
            web.get(f"{BASE}/models", self.models),
            web.post(f"{BASE}/watch", self.create),
            web.get(f"{BASE}/recordings", self.list_recordings),
            web.get(f"{BASE}/recordings/{{name}}", self.read_recording),
        )

    @for_operators
    @operation(Operation(LiveServer))
    async def server(self, request: web.Request) -> web.Response:
        """Describe what the live page can do with this server."""
        engine = self.scheduler.engine
        has_folder = self.folder is not None
        return as_json(
            LiveServer(
                own_version(),
                models=tuple(engine.models),
                is_alive=engine.is_alive,
                goes_on=self.goes_on,
                records=has_folder,
            )
        )

    @for_operators
    @operation(Operation(ModelsNow))
    async def models(self, request: web.Request) -> web.Response:
        """Describe how the models of this server are now."""
        return as_json(await self.view.now())

    @for_operators
    @operation(Operation(bytes, body=WatchBody, refusals=(*REFUSALS, ServerBusy), answer_type=EVENT_STREAM))
    async def create(self, request: web.Request) -> web.StreamResponse:
        """Create a response, and stream the frames of each junction as they pass."""
        body = await receive(request)
        with self._counted(), self.scheduler.in_flight:
            read = _Reader()
            one = await self.edge.prepared_from(request, body, read)
            del body
            async with one as (prepared,):
                release(request)
                watch = self.watch()
                events = self.scheduler.run_edited(prepared.opened, partial(self._edited, watch, read.go_on))
                return await self._shown(request, watch, events, prepared.resolved.facts.model)

    async def _shown(
        self, request: web.Request, watch: Watch, events: AsyncGenerator[ResponseEvent, None], served: str
    ) -> web.StreamResponse:
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        driving = asyncio.create_task(watch.drive(events, begun))
        try:
            await begun
            spelling = Spelling(vocabulary_of(self.scheduler.pipeline, served))
            return await send(request, watch.lines(spelling), WIRE, self.edge.keep_alive)
        finally:
            driving.cancel()
            with suppress(asyncio.CancelledError):
                await driving

    @for_operators
    @operation(Operation(SavedList))
    async def list_recordings(self, request: web.Request) -> web.Response:
        """List the latest recordings of this server."""
        return as_json(SavedList(tuple(await in_thread(listed, self.folder) if self.folder else ())))

    @for_operators
    @operation(Operation(bytes, refusals=(InvalidRequest, ResponseNotFound, ServerBusy), answer_type=EVENT_STREAM))
    async def read_recording(self, request: web.Request) -> web.StreamResponse:
        """Stream the frames of a recording, in the order in which they came."""
        name = request.match_info["name"]
        if self.folder is None:
            raise ResponseNotFound(name[:200])
        path = await in_thread(find, self.folder, name)
        with self._counted():
            header = await in_thread(header_of, path)
            is_known = header.model in self.scheduler.engine.models
            spelling = Spelling(vocabulary_of(self.scheduler.pipeline, header.model) if is_known else None)
            frames = frames_of(path, header, spelling, goes_on=is_known and self.goes_on)
            first = await in_thread(_next, frames)
            return await send(request, _batches(first, frames), WIRE, self.edge.keep_alive)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        if self.running >= MOST_WATCHED:
            raise ServerBusy(f"This server already shows {MOST_WATCHED} responses and recordings.")
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    def _edited(self, watch: Watch, go_on: Begun | None, pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
        """Return the stages of one response, with the taps of its watch."""
        if go_on is not None:
            if not self.goes_on:
                raise UnsupportedParameter("No engine generates here from tokens, so no answer goes on.", param="go_on")
            stage = GoOn(pipeline.stage("generate"), tuple(go_on.prompt), tuple(go_on.tokens))
            pipeline = pipeline.replace("generate", stage)
        return watch.install(pipeline)


def _next(frames: Iterator[bytes]) -> bytes:
    return b"".join(islice(frames, AT_ONCE))


async def _batches(first: bytes, frames: Iterator[bytes]) -> AsyncIterator[bytes]:
    while first:
        yield first
        first = await in_thread(_next, frames)


@asynccontextmanager
async def live(parts: ServerParts) -> AsyncGenerator[Sequence[web.RouteDef], None]:
    """Open the routes of the live page for the length of a block: without a key of the operator, only the page."""
    settings, scheduler, page = parts.settings, parts.scheduler, web.get(BASE, live_page)
    if settings.operator_key is None:
        yield (page,)
        return
    edge = Edge(
        RESPONSES,
        scheduler=scheduler,
        peers=parts.peers,
        sockets=OpenSockets(),
        keep_alive=settings.keep_alive,
        recorded_if=settings.recorded_if,
    )
    generates = settings.recordings is None and "generate" in scheduler.pipeline.names()
    yield (page, *Live(edge, settings.record, goes_on=generates).routes())
