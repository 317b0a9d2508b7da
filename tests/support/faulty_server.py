"""A proxy before a server that spoils its answers: the faults that ``penstock conformance`` has to find."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import Any, TypeAlias

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.support.api_clients import Json

DROPPED = {"content-length", "transfer-encoding", "connection", "date", "server"}
"""Headers that are the proxy's own."""


@dataclass
class Exchange:
    """A request and its answer, which a fault may change."""

    method: str
    path: str
    sent: Any
    """The body of the request as JSON; None if it is none."""
    status: int
    content_type: str
    headers: dict[str, str]
    body: bytes

    @property
    def is_stream(self) -> bool:
        return self.content_type.startswith("text/event-stream")


Fault: TypeAlias = Callable[[Exchange], None]
Changed: TypeAlias = Iterable[Json] | None
"""The events that take the place of others; None if they were changed in place."""


@dataclass
class Watched:
    """A fault, with the requests whose answers it changed."""

    fault: Fault
    requests: list[str] = field(default_factory=list)

    def __call__(self, exchange: Exchange) -> None:
        before = replace(exchange, headers=dict(exchange.headers))
        self.fault(exchange)
        if exchange != before:
            body = "" if exchange.sent is None else json.dumps(exchange.sent, separators=(",", ":"), ensure_ascii=False)
            self.requests.append(f"{exchange.method} {exchange.path} {body}".rstrip())


@asynccontextmanager
async def spoiled(url: str, fault: Fault) -> AsyncGenerator[str, None]:
    """Yield the address of a server that answers as the one at ``url`` does, but for the fault."""
    async with aiohttp.ClientSession() as upstream:

        async def passed_on(request: web.Request) -> web.Response:
            data = await request.read()
            headers = {name: value for name, value in request.headers.items() if name.lower() not in DROPPED | {"host"}}
            body = BytesIO(data) if data else None  # aiohttp warns of bytes that are many
            async with upstream.request(request.method, url + request.path_qs, data=body, headers=headers) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in DROPPED}
                content_type = kept.pop("Content-Type", "")
                came = await answer.read()
            exchange = Exchange(request.method, request.path_qs, _read(data), answer.status, content_type, kept, came)
            fault(exchange)
            headers = exchange.headers | {"Content-Type": exchange.content_type}
            return web.Response(status=exchange.status, headers=headers, body=exchange.body)

        app = web.Application(client_max_size=10**8)
        app.router.add_route("*", "/{path:.*}", passed_on)
        async with TestServer(app) as server:
            yield f"http://{server.host}:{server.port}"


def _read(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


# Faults


def in_body(change: Callable[[Json], object], *, path: str = "", method: str = "", refusals: bool = False) -> Fault:
    """Change the JSON of answers that are no streams: of successes, or of refusals."""

    def fault(exchange: Exchange) -> None:
        is_meant = path in exchange.path and exchange.method.endswith(method)
        if exchange.is_stream or not is_meant or (exchange.status >= 400) != refusals:
            return
        body = json.loads(exchange.body)
        changed = change(body)
        exchange.body = json.dumps(changed if isinstance(changed, dict) else body).encode()

    return fault


def in_events(change: Callable[[list[Json]], Changed]) -> Fault:
    """Change the events of streams, but for ``[DONE]``; each keeps its name, which is its type."""

    def fault(exchange: Exchange) -> None:
        if not exchange.is_stream:
            return
        named = b"event: " in exchange.body
        blocks = [block for block in exchange.body.split(b"\n\n") if b"data: " in block]
        data = [block.split(b"data: ", 1)[1] for block in blocks]
        events = [json.loads(each) for each in data if each != b"[DONE]"]
        changed = change(events)
        events = events if changed is None else list(changed)
        frames = [
            (f"event: {event.get('type')}\n" if named else "") + f"data: {json.dumps(event)}\n\n" for event in events
        ]
        exchange.body = "".join(frames).encode() + (b"data: [DONE]\n\n" if b"[DONE]" in data else b"")

    return fault


def in_bytes(change: Callable[[bytes], bytes]) -> Fault:
    """Change the bytes of streams."""

    def fault(exchange: Exchange) -> None:
        if exchange.is_stream:
            exchange.body = change(exchange.body)

    return fault


def with_status(status: int, *, when: int | None = None, path: str = "", method: str = "") -> Fault:
    """Change the status of answers: of those with the status ``when``, or of refusals."""

    def fault(exchange: Exchange) -> None:
        is_meant = exchange.status == when if when else exchange.status >= 400
        if is_meant and path in exchange.path and exchange.method.endswith(method):
            exchange.status = status

    return fault


def typed(kind: str, change: Callable[[Json], object]) -> Fault:
    """Change each event of a type."""

    def of(events: list[Json]) -> None:
        for event in events:
            if event.get("type") == kind:
                change(event)

    return in_events(of)


def put(**fields: Any) -> Callable[[Json], None]:
    """Return a change that sets fields."""
    return lambda body: body.update(fields)


def lose(*names: str) -> Callable[[Json], None]:
    """Return a change that removes fields."""

    def change(body: Json) -> None:
        for name in names:
            body.pop(name, None)

    return change


def deep(*path: str | int, value: Any) -> Callable[[Json], None]:
    """Return a change that sets what stands at a path, where there is such a place."""

    def change(body: Json) -> None:
        place: Any = body
        for key in path[:-1]:
            try:
                place = place[key]
            except (LookupError, TypeError):
                return
        place[path[-1]] = value

    return change


def both(*faults: Fault) -> Fault:
    """Return a fault with the effect of several."""

    def fault(exchange: Exchange) -> None:
        for each in faults:
            each(exchange)

    return fault


def on(path: str, fault: Fault) -> Fault:
    """Return a fault that only answers of a path have."""
    return lambda exchange: fault(exchange) if path in exchange.path else None


def refused(when: Callable[[Any], object], status: int = 400) -> Fault:
    """Refuse the requests whose body is one of those."""

    def fault(exchange: Exchange) -> None:
        if exchange.method == "POST" and exchange.sent and when(exchange.sent):
            exchange.status, exchange.content_type = status, "application/json"
            exchange.body = b'{"type": "error", "error": {"message": "No.", "type": "invalid_request_error"}}'

    return fault
