"""Answering: the answers to lines of batches, each as HTTP would give it to the same body.

A line takes the way of a request, from its handler on, so that no dialect knows of batches.  Only the run of its
response is another one: it yields, and it is not among those that its owner may have at once.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass
from functools import cached_property
from secrets import token_hex
from typing import Any

from aiohttp import ClientConnectorError, ConnectionTimeoutError, web
from msgspec.structs import replace

from penstock.api.app import Api
from penstock.api.dialect import Dialect, Edge, Prepared
from penstock.api.http.access_log import STARTED
from penstock.api.http.auth import OWNER
from penstock.api.http.conventions import REQUEST_ID
from penstock.api.http.errors import PASSING, answer_to
from penstock.api.http.held_bytes import HeldBody, HeldBytes, Pool
from penstock.api.http.lines import LINE, USE
from penstock.api.http.request_body import release
from penstock.api.http.wire import Reading
from penstock.api.peers import Peers
from penstock.api.resources.resources import ServerParts
from penstock.extensions.batches.batch import LineAnswer
from penstock.extensions.batches.inner_request import InnerRequest, no_connection
from penstock.extensions.batches.line_runs import LineRequest
from penstock.extensions.batches.yielding import Yielding
from penstock.pipeline import errors
from penstock.pipeline.core import Pipeline
from penstock.pipeline.plugins import Edit
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.services.engines.engine import engine_of
from penstock.services.engines.http_generation import FULL
from penstock.services.runs.run import Mode, Run
from penstock.services.use import SUMMED, Use, use_of

ENDPOINTS = frozenset(
    {
        "/v1/responses",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/messages",
        "/v1/decisions",
        "/v1/embeddings",
        "/v2/embed",
        "/v1/score",
        "/score",
        "/v1/rerank",
        "/v2/rerank",
        "/rerank",
        "/classify",
        "/pooling",
    }
)
"""The paths to which a line may be a request, if they are served: each has one body of JSON, and one answer."""

MAY_PASS = (*PASSING, errors.BudgetSpent, errors.EngineDead, errors.LimitReached, errors.ModelUnavailable)
"""The errors that may be over when a line runs again."""

_CALL: web.RequestKey[LineRequest] = web.RequestKey("call", LineRequest)

_RUNS = web.RequestKey("runs", list[Run])
"""The runs of the responses that an answer is made of."""


class Answering:
    """Answers lines, whose responses run through the stages of ``yielding`` if it is given."""

    def __init__(self, parts: ServerParts, yielding: Yielding | None) -> None:
        self._parts = parts
        self._yielding = yielding

    @property
    def paths(self) -> frozenset[str]:
        """The paths to which a line may be a request: of the resources, those that are open by now."""
        return ENDPOINTS & {*self._of_dialects, *(route.path for route in self._parts.routes)}

    async def answer(self, line: LineRequest) -> LineAnswer:
        """Answer a line; a wrong one gets the error that it would get over HTTP.

        Raises `ServerStopping` if this server stops before the line has an answer: it runs again elsewhere.
        """
        request = InnerRequest(line.path, line.body, self._connection, self._parts.settings.max_body_bytes)
        request[OWNER], request[LINE], request[_CALL] = line.owner, line.id, line
        runs = request[_RUNS] = list[Run]()
        request[REQUEST_ID], request[STARTED] = f"req_{token_hex(16)}", asyncio.get_running_loop().time()
        may_pass = False
        with self._yielding.present() if self._yielding else nullcontext():
            try:
                answer = await self._handled(request)
                body = await request.whole(answer)
                may_pass = answer.status in FULL
            except errors.ServerStopping:
                raise
            except Exception as error:  # noqa: BLE001 - each has an answer
                may_pass = isinstance(error, MAY_PASS) or _is_unreachable(error)
                answer = answer_to(request, error)
                body = await request.whole(answer)
            except asyncio.CancelledError:
                line.used.extend(filter(None, [_used(line, request)]))
                raise
            finally:
                release(request)
        scheduler = self._parts.scheduler
        failed = [run for run in runs if run.response.status == "failed"]
        if failed and scheduler.in_flight.stopping:
            raise errors.ServerStopping
        engine = scheduler.engine
        is_up = all(run.model in engine.models and engine_of(engine, run.model).is_alive for run in failed)
        return LineAnswer(
            answer.status,
            body=body,
            request_id=request[REQUEST_ID],
            use=_used(line, request),
            has_failed=bool(failed),
            may_pass=may_pass or not is_up,
        )

    async def _handled(self, request: InnerRequest) -> web.StreamResponse:
        line = request[_CALL]
        match = await self._app.router.resolve(request)
        request.matched(match, self._app)
        await self._parts.scheduler.admission.check_gates(line.owner)
        if self._yielding and line.path not in self._of_dialects:
            async with self._yielding.passing():
                return await match.handler(request)
        return await match.handler(request)

    @cached_property
    def _api(self) -> Api:
        parts = self._parts
        return LineApi(
            parts.scheduler,
            peers=Alone(),
            held=room_for_all(),
            recorded_if=parts.settings.recorded_if,
            dialects=parts.dialects,
            yielding=self._yielding,
        )

    @cached_property
    def _app(self) -> web.Application:
        whole = dataclasses.replace(self._api, resources=tuple(self._parts.routes))
        app = whole.app(self._parts.settings.max_body_bytes)
        app.freeze()
        return app

    @cached_property
    def _of_dialects(self) -> frozenset[str]:
        return frozenset(route.path for routes in self._api.dialect_routes.values() for route in routes)

    @cached_property
    def _connection(self) -> web.RequestHandler:
        return no_connection()


@dataclass(frozen=True, kw_only=True)
class LineApi(Api):
    """The routes of the dialects, for lines."""

    yielding: Yielding | None

    def edge(self, dialect: Dialect) -> Edge:
        """Return the runs of lines for the routes of a dialect."""
        return LineEdge(**vars(super().edge(dialect)), yielding=self.yielding)


@dataclass(frozen=True, kw_only=True)
class LineEdge(Edge):
    """The runs of lines for the routes of one dialect."""

    yielding: Yielding | None

    def enveloped(self, request: web.Request, reading: Reading, *, stays: bool = False) -> Reading:
        """Put the request of a line into an envelope; raise `UnsupportedParameter` for one that a batch cannot have."""
        if reading.streams:
            raise errors.UnsupportedParameter(
                "A line of a batch has one answer, which cannot be a stream.", param="stream"
            )
        if reading.request.background:
            message = "A line of a batch runs when its turn comes, and cannot run in the background beside."
            raise errors.UnsupportedParameter(message, param="background")
        line = request[_CALL]
        reading = super().enveloped(request, reading, stays=True)
        named = dataclasses.replace(reading.request.envelope, key_name=line.key_name, team=line.team, line=line.id)
        return reading.asking(*(each.inside(named) for each in (reading.request, *reading.others)))

    async def running(
        self, request: web.Request, prepared: Prepared, mode: Mode
    ) -> AsyncGenerator[ResponseEvent, None]:
        """Yield the events of a line that runs, and keep its run."""
        edit: Edit = self.yielding.edit if self.yielding else unedited
        events = self.scheduler.run_edited(prepared.opened, edit, mode, counts=False)
        async with aclosing(events):
            first = await anext(events)
            if run := self.scheduler.runs.get(prepared.resolved.facts.response_id, request[OWNER]):
                request[_RUNS].append(run)
            yield first
            async for event in events:
                yield event


class Boundless(Pool):
    """The bytes of lines, which are held already: their number is bounded."""

    def take(self, body: HeldBody, count: int, most: int) -> None:
        """Count bytes of a body, for which there is room."""
        super().take(body, count, sys.maxsize)


def room_for_all() -> HeldBytes:
    """Return what counts the bytes of lines."""
    held = HeldBytes()
    held.bodies, held.large = Boundless(0.0), Boundless(0.0)
    return held


class Alone(Peers):
    """No other servers: a line has no key with which it could be passed on."""

    async def serves(self, request: web.Request, url: str, model: str) -> bool:
        """Return False: the line stays here."""
        return False


def unedited(pipeline: Pipeline[Any, Any]) -> Pipeline[Any, Any]:
    """Return the pipeline as it is."""
    return pipeline


def _is_unreachable(error: Exception) -> bool:
    """True if another server took no connection: a line that such a server dies of is not sent again."""
    refused = ClientConnectorError | ConnectionTimeoutError
    return isinstance(error, errors.UpstreamFailed) and isinstance(error.__cause__, refused)


def _used(line: LineRequest, request: web.Request) -> Use | None:
    runs: list[Run] = request[_RUNS]
    use = whole_use((*map(use_of, runs), *filter(None, [request.get(USE)])))
    return use and replace(use, id=line.id, key_name=line.key_name, team=line.team, is_line=True)


def whole_use(uses: Sequence[Use]) -> Use | None:
    """Return what the responses of one answer have used together; None if there is none."""
    if not uses:
        return None
    return replace(uses[0], **{name: sum(getattr(use, name) for use in uses) for name in SUMMED})
