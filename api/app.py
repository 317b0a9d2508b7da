"""The aiohttp application: all routes, and the middleware that they share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

from aiohttp import web
from msgspec.structs import replace

from penstock.api.conversations import Conversations
from penstock.api.http.access_log import add_request_id, log_requests
from penstock.api.http.auth import OWNER, Keys, is_open
from penstock.api.http.bodies import Health, Model, Models, OpenApi, Ready
from penstock.api.http.errors import REFUSALS, Handler, answer_expectation, as_json, errors_as_json
from penstock.api.http.front.front import front
from penstock.api.http.held_bytes import HeldBytes
from penstock.api.http.openapi import Operation, describe, operation, takes_body
from penstock.api.http.origins import Origins
from penstock.api.http.prefix import DESCRIPTION, DESCRIPTION_NAME, prefix_of
from penstock.api.http.request_body import HELD, release_bodies
from penstock.api.http.trace import trace_requests
from penstock.api.metrics.sampler import Sampler
from penstock.api.metrics.scrape import PATH, Metrics
from penstock.api.peers import Peers
from penstock.api.responses import Responses
from penstock.api.runs.scheduler import Scheduler
from penstock.api.socket.socket import OpenSockets, Sockets
from penstock.pipeline.core import Pipeline
from penstock.pipeline.errors import ModelNotFound
from penstock.pipeline.logs import Seldom
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from penstock.stages.optional.openresponses import open_responses

DIALECTS: dict[str, Pipeline[ResponseEvent, Any] | None] = {
    "/v1": None,
    "/openresponses/v1": Pipeline.start("open_responses", open_responses),
}
"""Each base URL, with the stages that rewrite its outgoing events; None if the events go out unchanged."""


@dataclass(frozen=True)
class Api:
    """The routes over the runs of one pipeline; ``models`` are the names under which its model is served."""

    scheduler: Scheduler
    models: tuple[str, ...]
    keep_alive: float = 15.0
    """Seconds of silence on a stream before a keep-alive comment is sent."""
    keys: Keys = field(default_factory=Keys)
    peers: Peers = field(default_factory=Peers)
    recorded_if: Condition = ALWAYS
    origins: Origins = field(default_factory=Origins)
    sockets: OpenSockets = field(default_factory=OpenSockets)
    held: HeldBytes = field(default_factory=HeldBytes)
    serves_metrics: bool = True
    metrics_key: str = ""

    def app(self, max_body_bytes: int) -> web.Application:
        """Create the aiohttp application; it answers larger bodies than ``max_body_bytes`` with status 413."""
        # The outermost comes first: errors are logged too.
        shared = [
            trace_requests,
            log_requests,
            errors_as_json,
            self.origins.check,
            self.keys.authenticate,
            self.count,
            release_bodies,
        ]
        app = web.Application(middlewares=shared, client_max_size=max_body_bytes)
        app[HELD] = self.held
        app[REFUSALS] = Seldom()
        app.cleanup_ctx.append(self.sampler.run)
        app.add_routes(self.routes)
        app.on_response_prepare.append(add_request_id)
        app.on_response_prepare.append(self.add_limits)
        app.on_response_prepare.append(self.close_if_leaving)
        app.on_response_prepare.append(self.origins.add_headers)
        app.on_shutdown.append(self.sockets.close)
        app.on_cleanup.append(self.peers.close)
        return app

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count each request that may have a body, before the body is received; raise `LimitReached` for too many."""
        if takes_body(request):
            await self.scheduler.admission.admit(request[OWNER])
        return await handler(request)

    async def close_if_leaving(self, _: web.Request, answer: web.StreamResponse) -> None:
        """Have the client open a new connection for its next request, if this frontend leaves."""
        if self.scheduler.in_flight.leaving and not isinstance(answer, web.WebSocketResponse):
            answer.force_close()
            answer.headers["Connection"] = "close"

    async def add_limits(self, request: web.Request, answer: web.StreamResponse) -> None:
        """Add the headers about the limits of the client's key to an answer, before the headers are sent."""
        if OWNER in request and not is_open(request):
            answer.headers.update(self.scheduler.admission.headers(request[OWNER]))

    @cached_property
    def sampler(self) -> Sampler:
        """The sampler of the gauges that mirror the state of this server."""
        return Sampler(self.scheduler, self.held)

    @cached_property
    def routes(self) -> list[web.RouteDef]:
        """All routes, those of the two APIs once under each base URL."""
        routes = [
            web.get("/", front),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get(DESCRIPTION, self.describe, name=DESCRIPTION_NAME),
        ]
        if self.serves_metrics:
            metrics = Metrics(self.sampler, self.metrics_key, needs_key=self.keys.are_needed)
            routes += [web.get(PATH, metrics.scrape)]
        for base, outgoing in DIALECTS.items():
            routes += Responses(self.scheduler, self.peers, outgoing, self.keep_alive, self.recorded_if).routes(base)
            sockets = Sockets(self.scheduler, outgoing, self.keep_alive, self.sockets, self.recorded_if)
            routes += sockets.routes(base)
            routes += Conversations(self.scheduler.store, self.scheduler.admission).routes(base)
            routes += [web.get(f"{base}/models", self.list_models)]
            routes += [web.get(f"{base}/models/{{model:.+}}", self.retrieve_model)]
        for route in routes:
            route.kwargs["expect_handler"] = answer_expectation
        return routes

    @operation(Operation(Models))
    async def list_models(self, request: web.Request) -> web.Response:
        """List the models."""
        return as_json(Models(tuple(map(self._model, self.models))))

    @operation(Operation(Model, refusals=(ModelNotFound,)))
    async def retrieve_model(self, request: web.Request) -> web.Response:
        """Retrieve a model by its name, if it is served here."""
        name = request.match_info["model"]
        if name not in self.models:
            raise ModelNotFound(f"This server does not serve {shortened(name)!r}.", param="model")
        return as_json(self._model(name))

    def _model(self, name: str) -> Model:
        return Model(name, self.scheduler.engine.context_length)

    @operation(Operation(Health, statuses=(200, 503)))
    async def health(self, request: web.Request) -> web.Response:
        """Report whether the engine is alive, and whether the store can write to its database."""
        if not self.scheduler.engine.is_alive:
            return as_json(Health("engine dead"), status=503)
        return as_json(Health("degraded" if self.scheduler.store.is_degraded else "ok"))

    @operation(Operation(Ready, statuses=(200, 503)))
    async def ready(self, request: web.Request) -> web.Response:
        """Report whether this server takes new responses: its engine is up, its store takes writes, and it goes on."""
        scheduler = self.scheduler
        states = {
            "The engine has died.": not scheduler.engine.is_alive,
            "The store cannot be written.": scheduler.store.is_degraded,
            "The server is stopping.": scheduler.in_flight.stopping,
        }
        reasons = tuple(reason for reason, holds in states.items() if holds)
        return as_json(Ready("not ready", reasons), status=503) if reasons else as_json(Ready("ready"))

    @operation(Operation(OpenApi))
    async def describe(self, request: web.Request) -> web.Response:
        """Return the OpenAPI description of this server."""
        description = await asyncio.to_thread(lambda: self.description)
        return as_json(replace(description, servers=({"url": prefix_of(request) or "/"},)))

    @cached_property
    def description(self) -> OpenApi:
        """The OpenAPI document of all routes and of every type that they read and write."""
        events = {
            base: outgoing.emits().frames if outgoing else frozenset(get_args(ResponseEvent))
            for base, outgoing in DIALECTS.items()
        }
        return describe(self.routes, events)
