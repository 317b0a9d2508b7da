"""The aiohttp application: all routes, and the middleware that they share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from aiohttp import web
from msgspec.structs import replace

from penstock.api.dialect import Dialect, Edge
from penstock.api.dialects.named import spoken
from penstock.api.http.access_log import add_request_id, log_requests, note_status
from penstock.api.http.auth import OWNER, Keys, is_open
from penstock.api.http.bodies import Health, Load, OpenApi, Ready, Version
from penstock.api.http.conventions import SPOKEN, SpokenByRoute, dialect_of
from penstock.api.http.errors import REFUSALS, Handler, answer_expectation, as_json, errors_as_json
from penstock.api.http.front.front import Front
from penstock.api.http.held_bytes import HeldBytes
from penstock.api.http.openapi import Operation, describe, operation, takes_body
from penstock.api.http.origins import Origins
from penstock.api.http.prefix import DESCRIPTION, DESCRIPTION_NAME, prefix_of
from penstock.api.http.proxied import ProxiedRequests
from penstock.api.http.proxies import PROXIES, Proxies
from penstock.api.http.request_body import HELD, release
from penstock.api.http.sse import break_off_begun
from penstock.api.http.trace import trace_requests
from penstock.api.metrics.sampler import Sampler
from penstock.api.metrics.scrape import PATH, Metrics
from penstock.api.open_sockets import OpenSockets
from penstock.api.peers import Peers
from penstock.api.routes.tokenization import Tokenization
from penstock.api.runs.scheduler import Scheduler
from penstock.pipeline.distribution import own_version
from penstock.pipeline.errors import ContainerElsewhere
from penstock.pipeline.logs import Seldom
from penstock.pipeline.recordings.sampling import ALWAYS, Condition


@dataclass(frozen=True)
class Api:
    """The routes of the ``dialects`` over the runs of one pipeline."""

    scheduler: Scheduler
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
    dialects: tuple[Dialect, ...] = field(default_factory=spoken)
    resources: tuple[web.RouteDef, ...] = ()
    """The routes of the resources."""
    proxies: Proxies = field(default_factory=Proxies)

    def app(self, max_body_bytes: int) -> web.Application:
        """Create the aiohttp application; it answers larger bodies than ``max_body_bytes`` with status 413."""
        proxied = ProxiedRequests(self.proxies)
        # The outermost comes first: errors are logged too.
        shared = [
            proxied.identify,
            trace_requests,
            log_requests,
            errors_as_json,
            break_off_begun,
            proxied.limit,
            self.admit,
        ]
        app = web.Application(middlewares=shared, client_max_size=max_body_bytes)
        app[PROXIES] = self.proxies
        app[HELD] = self.held
        app[REFUSALS] = Seldom()
        app.cleanup_ctx.append(self.sampler.run)
        app[SPOKEN] = SpokenByRoute()
        app.add_routes(self.house_routes)
        for dialect, routes in self.dialect_routes.items():
            app[SPOKEN].add(dialect.spoken_on(routes), app.add_routes(routes))
        app.on_response_prepare.append(note_status)
        app.on_response_prepare.append(add_request_id)
        app.on_response_prepare.append(self.add_limits)
        app.on_response_prepare.append(self.close_if_leaving)
        app.on_response_prepare.append(self.origins.add_headers)
        app.on_shutdown.append(self.sockets.close)
        app.on_cleanup.append(self.peers.close)
        return app

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let requests pass that no foreign page sends, that have a key, and that are not too many.

        One that may have a body is counted before the body is received, and releases it when it has been answered.  If
        another server has its container, that answers.  It is one step: an open stream would hold the frame of each.
        """
        if (preflight := self.origins.check(request)) is not None:
            return preflight
        await self.keys.authenticate(request)
        if takes_body(request):
            await self.scheduler.admission.admit(request[OWNER])
        try:
            return await handler(request)
        except ContainerElsewhere as error:
            return await self.peers.follow(request, error)
        finally:
            release(request)

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
    def house_routes(self) -> list[web.RouteDef]:
        """The routes of the server itself."""
        routes = [
            web.get("/", Front(self.keys.have_operator).answer),
            web.get("/health", self.health),
            web.get("/ready", self.ready),
            web.get("/ping", self.health),
            web.post("/ping", self.health),
            web.get("/version", self.version),
            web.get("/load", self.load),
            web.get(DESCRIPTION, self.describe, name=DESCRIPTION_NAME),
        ]
        routes += self.resources
        routes += [route for edge in self._chat for route in Tokenization(edge).routes]
        if self.serves_metrics:
            metrics = Metrics(self.sampler, self.metrics_key, needs_key=self.keys.are_needed)
            routes += [web.get(PATH, metrics.scrape)]
        return _expecting(routes)

    @cached_property
    def dialect_routes(self) -> dict[Dialect, list[web.RouteDef]]:
        """The routes of each dialect."""
        return {dialect: _expecting(dialect.routes(self.edge(dialect))) for dialect in self.dialects}

    def edge(self, dialect: Dialect) -> Edge:
        """Return the runs of the server for the routes of a dialect."""
        return Edge(
            dialect,
            scheduler=self.scheduler,
            peers=self.peers,
            sockets=self.sockets,
            keep_alive=self.keep_alive,
            recorded_if=self.recorded_if,
        )

    @property
    def _chat(self) -> Iterator[Edge]:
        """The edge of Chat Completions, in whose form a request may ask for the tokens of a prompt."""
        return (self.edge(dialect) for dialect in self.dialects if dialect.name == "chat")

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

    @operation(Operation(Version))
    async def version(self, request: web.Request) -> web.Response:
        """Return the version of this server."""
        return as_json(Version(own_version()))

    @operation(Operation(Load))
    async def load(self, request: web.Request) -> web.Response:
        """Return the number of responses that run in this process."""
        return as_json(Load(len(self.scheduler.runs.running)))

    @operation(Operation(OpenApi))
    async def describe(self, request: web.Request) -> web.Response:
        """Return the OpenAPI description of this server."""
        description = await asyncio.to_thread(lambda: self.description)
        return as_json(replace(description, servers=({"url": prefix_of(request) or "/"},)))

    @cached_property
    def description(self) -> OpenApi:
        """The OpenAPI document of all routes and of every type that they read and write."""
        named = {dialect.name: dialect for dialect in self.dialects}
        of_resources = [
            (named[name], route) for route in self.resources if (name := dialect_of(route.handler)) in named
        ]
        of_dialects = [(dialect, route) for dialect, routes in self.dialect_routes.items() for route in routes]
        forms = {route.path: (dialect.wire, dialect.conventions) for dialect, route in [*of_resources, *of_dialects]}
        return describe([*self.house_routes, *chain.from_iterable(self.dialect_routes.values())], forms)


def _expecting(routes: Sequence[web.RouteDef]) -> list[web.RouteDef]:
    """Return the routes, each of which lets a client send its body that waits for it."""
    for route in routes:
        route.kwargs["expect_handler"] = answer_expectation
    return list(routes)
