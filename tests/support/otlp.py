"""A receiver of OpenTelemetry traces, OTLP over HTTP, and the spans that it got."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from penstock.services.tracing import exporting

FAILED = 2
"""The status of a span that failed, in OTLP."""


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it was sent; ids are hexadecimal, and ``parent`` is empty for the first span of a trace."""

    name: str
    trace: str
    id: str
    parent: str
    kind: int
    has_failed: bool
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """The ids of the spans that it is linked to."""

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace}-{self.id}-01"


@dataclass
class Receiver:
    """What the receiver at ``url`` got: the bodies of requests, and their spans in the order of their ends."""

    url: str = ""
    bodies: list[bytes] = field(default_factory=list)

    @property
    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    @property
    def resources(self) -> list[dict[str, Any]]:
        """The attributes of the processes that have sent spans."""
        resources = [each.resource for request in self.requests for each in request.resource_spans]
        return [{each.key: _value(each.value) for each in resource.attributes} for resource in resources]

    @property
    def spans(self) -> list[ReceivedSpan]:
        return [
            _read(span)
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReceivedSpan:
        (span,) = self.named(name)
        return span

    def under(self, parent: ReceivedSpan) -> list[str]:
        """The names of the spans under one, in the order of their ends."""
        return [span.name for span in self.spans if (span.trace, span.parent) == (parent.trace, parent.id)]


def _read(span: Any) -> ReceivedSpan:
    assert not span.events
    return ReceivedSpan(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.kind,
        span.status.code == FAILED,
        {each.key: _value(each.value) for each in span.attributes},
        tuple(link.span_id.hex() for link in span.links),
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    held = getattr(value, kind)
    return [_value(each) for each in held.values] if kind == "array_value" else held


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive traces for the length of the block, in a thread."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            is_right = (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
            if is_right:
                receiver.bodies.append(body)
            self.send_response(200 if is_right else 400)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@asynccontextmanager
async def collecting() -> AsyncGenerator[Receiver, None]:
    """Trace this process; the receiver has all spans after the block."""
    with receiving() as receiver:
        async with exporting(OTLPSpanExporter(f"{receiver.url}/v1/traces")):
            yield receiver
