"""Traces of OpenTelemetry, off unless its standard variables name a collector.

A span never becomes the current one in an async generator, as its context would leak to the reader.  There its context
travels in the headers of W3C Trace Context, which the engine gets as well.  Only coroutines make a span the current
one, with `current`; work that they await finds its parent there.

A span holds the attributes of `Attribute` and no others: no prompt, argument, key, header or text of an error.  The
provider is not the global one, so that no library adds spans of its own.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from time import monotonic
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from msgspec.structs import replace
from opentelemetry.context import Context
from opentelemetry.trace import (
    INVALID_SPAN,
    Link,
    Span,
    SpanKind,
    StatusCode,
    Tracer,
    get_current_span,
    set_span_in_context,
    use_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.pipeline.distribution import own_version
from penstock.pipeline.errors import CannotStart, StageError
from penstock.pipeline.frames import (
    GenerationStarted,
    ParsedFrame,
    ResolvedRequest,
    Scheduling,
    TurnFinished,
    with_facts,
)
from penstock.services.runs.turns import turn_came_at

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute: TypeAlias = Literal[
    "error.type",
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.finish_reasons",
    "gen_ai.response.id",
    "gen_ai.response.time_to_first_chunk",
    "gen_ai.tool.name",
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "gen_ai.usage.reasoning.output_tokens",
    "http.request.method",
    "http.response.status_code",
    "http.route",
    "mcp.method.name",
    "penstock.delivery.outcome",
    "penstock.response.mode",
    "penstock.response.outcome",
]
"""The attributes that spans may have; their values are numbers, ids and names of this server."""

Attributes: TypeAlias = Mapping[Attribute, str | int | float | Sequence[str]]

Delivery: TypeAlias = Literal["delivered", "disconnected", "not_started"]
"""The outcome of an answer: the client got it, left in the middle of it, or left before it began."""

SHUTDOWN = 3.0
"""Seconds that the last spans get to reach the collector when the server stops."""

_CONTEXT = TraceContextTextMapPropagator()

ROOT = Context()
"""The parent of the first span of a new trace."""

_tracer: Tracer | None = None


def is_on() -> bool:
    """Return True if spans are exported."""
    return _tracer is not None


# Setting up


def is_wanted(environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if the standard variables ask for traces; raise `CannotStart` if they ask for what there is not."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if exporter == "none":
        return False
    if exporter not in ("", "otlp"):
        raise CannotStart(f"OTEL_TRACES_EXPORTER={exporter}: traces are exported with otlp, or not at all (none)")
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if not exporter and not any(environ.get(name, "").strip() for name in names):
        return False
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if protocol := environ.get(name, "").strip():
            if protocol != "http/protobuf":
                raise CannotStart(f"{name}={protocol}: traces are exported with http/protobuf")
            break
    return True


def wanted_exporter() -> SpanExporter | None:
    """Return the exporter that the standard variables ask for, if they do: ``OTEL_EXPORTER_OTLP_...``.

    Call it before vLLM starts, which sets one of them by itself if it exports traces of its own.
    """
    if not is_wanted():
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    os.environ.setdefault("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")  # vLLM would speak gRPC by default
    return OTLPSpanExporter()


@asynccontextmanager
async def exporting(exporter: SpanExporter | None) -> AsyncGenerator[None, None]:
    """Export spans for the length of a block, if there is an exporter.

    OpenTelemetry's variables set the rest: the batches (``OTEL_BSP_...``), the sampler (``OTEL_TRACES_SAMPLER``), and
    the resource (``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``).
    """
    global _tracer  # noqa: PLW0603 - one for the process, as the metrics
    if exporter is None:
        yield
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.version": own_version()})
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "penstock"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    _tracer = provider.get_tracer("penstock", own_version())
    try:
        yield
    finally:
        _tracer = None
        ending = threading.Thread(target=provider.shutdown, daemon=True)  # the collector may be down
        ending.start()
        await asyncio.to_thread(ending.join, SHUTDOWN)


# Spans


@contextmanager
def span(
    name: str,
    attributes: Attributes,
    kind: SpanKind = SpanKind.INTERNAL,
    *,
    parent: Context | None = None,
    links: Sequence[Link] = (),
) -> Iterator[Span]:
    """Trace the block; ``parent`` is the context of the parent, by default the current one.

    An error of the block marks the span as failed, with its code or the name of its class.
    """
    if _tracer is None:
        yield INVALID_SPAN
        return
    traced = _tracer.start_span(name, parent, kind, links=links)
    note(traced, attributes)
    try:
        yield traced
    except Exception as error:
        fail(traced, cause_of(error))
        raise
    finally:
        traced.end()


def current(traced: Span) -> AbstractContextManager[Span]:
    """Make a span the current one for the length of a block, which has to be in a coroutine."""
    if traced is INVALID_SPAN:  # without traces, the program around this server may have a span of its own
        return nullcontext(traced)
    return use_span(traced, record_exception=False, set_status_on_exception=False)


def note(traced: Span, attributes: Attributes) -> None:
    """Set attributes of a span."""
    for name, value in attributes.items():
        traced.set_attribute(name, value)


def fail(traced: Span, cause: str) -> None:
    """Mark a span as failed for a ``cause``, which is a code or the name of a class."""
    traced.set_status(StatusCode.ERROR)
    note(traced, {"error.type": cause})


def cause_of(error: Exception) -> str:
    """Return the code of an error, or the name of its class; not its text, which may quote the client."""
    code = error.code if isinstance(error, StageError) else None
    return code or type(error).__name__


# Contexts


def context_of(headers: Mapping[str, str]) -> Context:
    """Return the context that the headers of W3C Trace Context name; without them, that of a new trace."""
    return _CONTEXT.extract(headers, ROOT)


def headers_of(traced: Span) -> dict[str, str]:
    """Return the headers of W3C Trace Context that name a span."""
    headers: dict[str, str] = {}
    _CONTEXT.inject(headers, set_span_in_context(traced, ROOT))
    return headers


def current_headers(sent: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers that name the current span; without traces, those that the client has ``sent``."""
    return headers_of(get_current_span()) if is_on() else sent


def links_to(headers: Mapping[str, str]) -> Sequence[Link]:
    """Return the link to the span that the headers name, if they name one."""
    linked = get_current_span(context_of(headers)).get_span_context()
    return [Link(linked)] if linked.is_valid else []


def link_current(headers: Mapping[str, str]) -> None:
    """Link the current span to the one that the headers name."""
    if is_on():
        for link in links_to(headers):
            get_current_span().add_link(link.context)


def within(request: ResolvedRequest, traced: Span) -> ResolvedRequest:
    """Return the request with the context of a span, for the stages and the engine."""
    if not is_on():
        return request
    return with_facts(request, scheduling=replace(request.facts.scheduling, trace_headers=headers_of(traced)))


# Work


@contextmanager
def store_span(name: str, headers: Mapping[str, str] | None = None) -> Iterator[None]:
    """Trace work of the store for a response, which the ``headers`` name, or for the current span.

    Work of the server's own is not traced: it would make traces of one span.
    """
    parent = None if headers is None else context_of(headers)
    if _tracer is None or not get_current_span(parent).get_span_context().is_valid:
        yield
        return
    with span(name, {}, parent=parent):
        yield


@contextmanager
def tool_span(request: ResolvedRequest, tool: str, *, is_mcp: bool) -> Iterator[Span]:
    """Trace a call of a tool, in a coroutine: the client of MCP sends the current context along."""
    if _tracer is None:
        yield INVALID_SPAN
        return
    attributes = _tool_attributes(tool)
    if is_mcp:
        attributes["mcp.method.name"] = "tools/call"
    name, kind = ("tools/call", SpanKind.CLIENT) if is_mcp else ("execute_tool", SpanKind.INTERNAL)
    parent = context_of(request.facts.scheduling.trace_headers)
    with span(f"{name} {tool}", attributes, kind, parent=parent) as traced, current(traced):
        yield traced


class TracedCaller(NamedTuple):
    """The span of a call that makes others, and the request for those."""

    span: Span
    request: ResolvedRequest


@contextmanager
def caller_span(request: ResolvedRequest, tool: str) -> Iterator[TracedCaller]:
    """Trace a call that makes others, for the length of a block, which may be in a generator."""
    if _tracer is None:
        yield TracedCaller(INVALID_SPAN, request)
        return
    parent = context_of(request.facts.scheduling.trace_headers)
    with span(f"execute_tool {tool}", _tool_attributes(tool), parent=parent) as traced:
        yield TracedCaller(traced, within(request, traced))


def _tool_attributes(tool: str) -> dict[Attribute, str]:
    return {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}


class TracedTurn:
    """The span of one turn of the model."""

    __slots__ = ("_is_silent", "_prompt_tokens", "_scheduling", "_span", "_started")

    def __init__(self, traced: Span, scheduling: Scheduling) -> None:
        self._span = traced
        self._scheduling = scheduling
        self._started = monotonic()
        self._prompt_tokens = 0
        self._is_silent = traced.is_recording()

    def asking(self, request: ResolvedRequest) -> ResolvedRequest:
        """Return the request of the turn with the context of its span."""
        return within(request, self._span)

    def begin(self, frame: ParsedFrame | None) -> ParsedFrame | None:
        """Take the first frame: the engine has accepted the prompt.  What follows belongs to the response again."""
        if not is_on() or not isinstance(frame, GenerationStarted):
            return frame
        self._prompt_tokens = frame.prompt_tokens
        return with_facts(frame, scheduling=self._scheduling)

    def speak(self) -> None:
        """Note that the model writes; only the first time counts."""
        if self._is_silent:
            self._is_silent = False
            started = max(self._started, turn_came_at())  # a queued response waits within its turn
            note(self._span, {"gen_ai.response.time_to_first_chunk": monotonic() - started})

    def end(self, finished: TurnFinished | None) -> None:
        """Take the end of the turn, if it has one."""
        if finished is None or not self._span.is_recording():
            return
        prompt_tokens = self._prompt_tokens if finished.prompt_tokens is None else finished.prompt_tokens
        usage: Attributes = {
            "gen_ai.usage.input_tokens": prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": finished.cached_tokens,
            "gen_ai.usage.output_tokens": finished.output_tokens,
            "gen_ai.usage.reasoning.output_tokens": finished.reasoning_tokens,
            "gen_ai.response.finish_reasons": (finished.reason,),
        }
        note(self._span, usage)


def turn_span(request: ResolvedRequest) -> AbstractContextManager[TracedTurn]:
    """Trace a turn of the model for the length of a block, if responses are traced."""
    return _UNTRACED if _tracer is None else _turn_span(request)


@contextmanager
def _turn_span(request: ResolvedRequest) -> Iterator[TracedTurn]:
    """Trace a turn of the model, as OpenTelemetry's conventions for generative AI name it."""
    model = request.facts.model
    attributes: Attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "vllm",
        "gen_ai.request.model": model,
    }
    parent = context_of(request.facts.scheduling.trace_headers)
    with span(f"chat {model}", attributes, SpanKind.CLIENT, parent=parent) as traced:
        yield TracedTurn(traced, request.facts.scheduling)


_UNTRACED = nullcontext(TracedTurn(INVALID_SPAN, Scheduling()))
