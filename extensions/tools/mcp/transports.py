"""The transports of a connection to an MCP server.

The SDK's exceptions do not contain the status of an HTTP error.  So it is recorded in a context variable, and thus for
the right call, because a request is sent in the context of its caller.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Self, TypeAlias
from urllib.parse import urlsplit

import httpx2
from mcp import StdioServerParameters, stdio_client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client

from penstock.extensions.tools.mcp.incoming import Messages
from penstock.extensions.tools.mcp.network import READING, http_client
from penstock.services.foreign import LARGEST_BYTES
from penstock.services.mcp_config import HttpServer, ServerConfig, StdioServer
from penstock.services.web.ssrf import AllowedNetworks

# These libraries log whole URLs and messages, which contain secrets.
for name in ("httpx2", "httpcore2", "mcp"):
    logging.getLogger(name).setLevel(logging.CRITICAL)

Transport: TypeAlias = AbstractAsyncContextManager[tuple[Any, Any]]

NO_SUCH_TRANSPORT = frozenset((404, 405))
"""HTTP statuses with which a server that only knows SSE answers a POST to the URL of its stream."""

_statuses: ContextVar[list[int] | None] = ContextVar("statuses", default=None)


@contextmanager
def statuses_noted() -> Generator[list[int], None, None]:
    """Collect the HTTP error statuses of requests that are sent from within the block."""
    statuses: list[int] = []
    token = _statuses.set(statuses)
    try:
        yield statuses
    finally:
        _statuses.reset(token)


def transports(
    config: ServerConfig, allowed: AllowedNetworks | None, on_lost: Callable[[], None]
) -> Iterator[Transport]:
    """Yield the transports to try in turn; each calls ``on_lost`` when its connection breaks.

    For a URL, they are streamable HTTP and then SSE, or a single one if the configuration or the path names it.
    """
    match config:
        case StdioServer():
            yield _watched(_stdio(config), on_lost)
        case HttpServer():
            is_sse = urlsplit(config.url).path.endswith("/sse")
            if config.transport == "http" or (config.transport is None and not is_sse):
                yield _watched(_streamable(config, allowed), on_lost)
            if config.transport != "http":
                yield _watched(_sse(config, allowed, on_lost), on_lost)


async def _note(response: httpx2.Response) -> None:
    if response.is_error and (statuses := _statuses.get()) is not None:
        statuses.append(response.status_code)


def _stdio(config: StdioServer) -> Transport:
    parameters = StdioServerParameters(
        command=config.command, args=list(config.args), env=dict(config.env), cwd=config.cwd
    )
    return stdio_client(parameters, errlog=sys.stderr)


@asynccontextmanager
async def _streamable(config: HttpServer, allowed: AllowedNetworks | None) -> AsyncGenerator[tuple[Any, Any], None]:
    http = http_client(config.headers, _note, allowed)
    async with http, streamable_http_client(config.url, http_client=http, max_sse_event_size=LARGEST_BYTES) as streams:
        yield streams


def _sse(config: HttpServer, allowed: AllowedNetworks | None, on_lost: Callable[[], None]) -> Transport:
    async def note(response: httpx2.Response) -> None:
        await _note(response)
        if response.is_error:
            on_lost()  # otherwise the SDK waits for an answer that never comes

    def client(*_: Any, **__: Any) -> httpx2.AsyncClient:
        return http_client(config.headers, note, allowed)

    return sse_client(config.url, sse_read_timeout=READING, httpx_client_factory=client)


@asynccontextmanager
async def _watched(transport: Transport, on_lost: Callable[[], None]) -> AsyncGenerator[tuple[Any, Any], None]:
    async with transport as (read, write):
        yield _Watched(read, on_lost), write


class _Watched:
    """The messages of a server that `Messages` admits; it calls ``on_lost`` at its end.

    So no later call runs into a dead connection.
    """

    def __init__(self, inner: Any, on_lost: Callable[[], None]) -> None:
        self._inner = inner
        self._lost = on_lost
        self._messages = Messages()

    @property
    def last_context(self) -> Any:
        return getattr(self._inner, "last_context", None)

    async def receive(self) -> Any:
        while (message := self._messages.admitted(await self._inner.receive())) is None:
            pass
        return message

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while (message := self._messages.admitted(await self._inner.__anext__())) is None:
            pass
        return message

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._lost()
        ended: bool | None = await self._inner.__aexit__(kind, error, trace)
        return ended
