"""The trace of a request over HTTP: its span, and what became of its answer.

A WebSocket connection is one such request, until it is closed.  Each of its responses has a trace of its own, with a
link to the connection.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import contextmanager

from aiohttp import hdrs, web
from opentelemetry.trace import SpanKind

from penstock.api.http.errors import PROBLEM, STREAMING, Handler
from penstock.api.http.prefix import is_probe
from penstock.pipeline.protocol.params.request import trace_headers
from penstock.services import tracing


@web.middleware
def trace_requests(request: web.Request, handler: Handler) -> Awaitable[web.StreamResponse]:
    """Trace a request; the trace is that of the client, if its headers name one."""
    return _traced(request, handler) if tracing.is_on() and not is_probe(request) else handler(request)


async def _traced(request: web.Request, handler: Handler) -> web.StreamResponse:
    resource = request.match_info.route.resource
    method = request.method if request.method in hdrs.METH_ALL else "_OTHER"
    route = resource.canonical if resource else "unknown"
    parent = tracing.context_of(trace_headers(request.headers))
    attributes: tracing.Attributes = {"http.request.method": method, "http.route": route}
    with tracing.span(f"{method} {route}", attributes, SpanKind.SERVER, parent=parent) as span, tracing.current(span):
        try:
            answer = await handler(request)
        except BaseException:
            has_begun = request.get(STREAMING) or _is_upgraded(request)
            tracing.note(span, {"penstock.delivery.outcome": "disconnected" if has_begun else "not_started"})
            raise
        delivery: tracing.Delivery = "disconnected" if _is_cut(request) else "delivered"
        tracing.note(span, {"http.response.status_code": answer.status, "penstock.delivery.outcome": delivery})
        if problem := answer.get(PROBLEM):
            tracing.note(span, {"error.type": problem.code or problem.type})
        if answer.status >= 500 or (problem and request.get(STREAMING)):
            tracing.fail(span, (problem and problem.code) or str(answer.status))
        return answer


def _is_upgraded(request: web.Request) -> bool:
    return request.headers.get(hdrs.UPGRADE, "").lower() == "websocket"


def _is_cut(request: web.Request) -> bool:
    """Return True if the connection was closed before the end of a stream."""
    if _is_upgraded(request):  # a connection over which all was sent is closed, too
        return False
    return request.transport is None or request.transport.is_closing()


@contextmanager
def trace_exchange(socket: web.WebSocketResponse) -> Iterator[None]:
    """Trace a response over a WebSocket connection, in a coroutine; it has a trace of its own."""
    if not tracing.is_on():
        yield
        return
    links = tracing.links_to(tracing.current_headers({}))
    root = tracing.span("response.create", {}, SpanKind.SERVER, parent=tracing.ROOT, links=links)
    with root as span, tracing.current(span):
        delivery: tracing.Delivery = "disconnected"
        try:
            yield
            delivery = "disconnected" if socket.closed else "delivered"
        finally:
            tracing.note(span, {"penstock.delivery.outcome": delivery})
