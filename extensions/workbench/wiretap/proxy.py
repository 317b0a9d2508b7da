"""The proxy: it passes every request on to one server, and its answer back, byte for byte and as the bytes come.

Both sides wait for each other as without it: a slow reader slows the server, and a client that leaves ends its request.
An answer that the server breaks off breaks off here, too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp import ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from penstock.api.http.errors import Handler
from penstock.extensions.workbench.wiretap import asking
from penstock.extensions.workbench.wiretap.streams import readable
from penstock.extensions.workbench.wiretap.tap import Listener, Tap
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.foreign_errors import named_error

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 30.0
"""Seconds to connect to the server."""

KEPT_SECONDS = 2.0
"""Seconds for which an idle connection to the server is kept: less than after which servers close it."""

LONGEST_HEADER = 64 * 2**10
"""Bytes of a line of the headers of a request or an answer."""

MOST_HEADERS = 1000
"""The most headers of a request or an answer."""

STOPPING_SECONDS = 5.0
"""Seconds that answers get to end after a signal to stop."""

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"}
    | {"transfer-encoding", "upgrade"}
)
"""The headers about one connection, which a proxy does not pass on; see RFC 9110, section 7.6.1."""

ADDED = (hdrs.DATE, hdrs.SERVER, hdrs.CONTENT_TYPE)
"""The headers that aiohttp adds to an answer without them."""

OWN = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
"""The headers that aiohttp adds to a request without them."""

GENERATION = re.compile("(/chat)?/completions$")
"""The end of a path, in place of which a server has its list of models."""

PASSED = web.ResponseKey("passed", frozenset[str])
"""The names of the headers that came with an answer of the server, in small letters."""


class BrokenOff(Exception):
    """The server broke off its answer."""


def checked(upstream: str) -> str:
    """Return the URL of a server without a slash at its end.  Raise `CannotRun` if it is none."""
    wrong = CannotRun(f"--upstream: {upstream!r} is no URL such as http://127.0.0.1:8000")
    try:
        parts = urlsplit(upstream)
        is_complete = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise wrong from None
    if not is_complete:
        raise wrong
    if parts.username is not None or parts.query or parts.fragment:
        raise CannotRun("--upstream: give the URL alone; clients send their own keys, which pass through")
    return upstream.rstrip("/")


@dataclass
class Proxy:
    """Passes requests on to the server at the URL ``upstream``, and has the ``tap`` note them.

    With ``asks_for_tokens``, it adds to requests for a generation that the server is to send the ids of tokens.
    """

    upstream: str
    tap: Tap
    asks_for_tokens: bool = False

    def app(self) -> web.Application:
        """Create the application, which has no routes of its own."""
        app = web.Application(middlewares=[self._answer])
        app.cleanup_ctx.append(self._run)
        app.on_response_prepare.append(_remove_added)
        return app

    async def _run(self, _: web.Application) -> AsyncGenerator[None, None]:
        async with ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=KEPT_SECONDS),
            timeout=ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=OWN,
            max_line_size=LONGEST_HEADER,
            max_field_size=LONGEST_HEADER,
            max_headers=MOST_HEADERS,
        ) as self._session:
            yield
            await self.tap.sources.close()

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer each request, whatever its path is."""
        if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
            return refusal(426, "It does not pass WebSockets on: use HTTP, to which clients fall back.")
        if not request.raw_path.startswith("/"):
            return refusal(400, f"It passes requests on to {self.upstream} alone: send it the path.")
        is_post = request.method == hdrs.METH_POST
        listener = self.tap.listener(request.path, request.headers) if is_post else Listener()
        try:
            return await self._passed(request, listener)
        except BrokenOff as error:
            logger.warning("%s broke off an answer: %s", self.upstream, named_error(error.__cause__ or error))
            listener.over("The server broke off its answer.")
            if request.transport is not None:
                request.transport.close()  # after what came before
            return web.Response()
        except ConnectionResetError:  # the client has left
            return web.Response()
        finally:
            listener.over(abandoned=True)

    async def _passed(self, request: web.Request, listener: Listener) -> web.StreamResponse:
        if _is_unsendable(request.headers):
            return refusal(400, "A header of the request is not UTF-8.")
        headers = _end_to_end(request.headers, (hdrs.HOST, hdrs.EXPECT))
        if listener.is_recording and hdrs.ACCEPT_ENCODING in headers:
            headers[hdrs.ACCEPT_ENCODING] = readable(",".join(headers.getall(hdrs.ACCEPT_ENCODING)))
        url = URL(self.upstream + request.raw_path, encoded=True)
        try:
            body = await self._body(request, listener) if request.can_read_body else None
            if isinstance(body, bytes):
                headers.popall(hdrs.CONTENT_LENGTH, None)
                headers[hdrs.CONTENT_LENGTH] = str(len(body))
            answer = await self._session.request(request.method, url, data=body, headers=headers, allow_redirects=False)
        except (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError, aiohttp.ClientResponseError) as error:
            return self._unreached(error)
        except (aiohttp.ClientError, OSError) as error:
            raise BrokenOff from error
        async with answer:
            if answer.status == 200 and listener.may_get_tokens and (self.asks_for_tokens or listener.names_token_ids):
                self.tap.sources.look_up(self._session, self._models(request), request.headers.get(hdrs.AUTHORIZATION))
            return await _passed_back(request, answer, listener)

    async def _body(self, request: web.Request, listener: Listener) -> bytes | AsyncGenerator[bytes, None]:
        """Return the body to send; one that asks for tokens, if it should, comes whole."""
        sent = _sent(request, listener)
        if not (self.asks_for_tokens and listener.may_get_tokens) or hdrs.CONTENT_ENCODING in request.headers:
            return sent
        begun: list[bytes] = []
        size = 0
        async for data in sent:
            begun.append(data)
            size += len(data)
            if size > asking.LONGEST:
                return _continued(begun, sent)
        return asking.asking(b"".join(begun))

    def _models(self, request: web.Request) -> URL:
        """Return the URL of the list of models beside that of a generation."""
        path, _, _ = request.raw_path.partition("?")
        return URL(f"{self.upstream}{GENERATION.sub('', path)}/models", encoded=True)

    def _unreached(self, error: Exception) -> web.StreamResponse:
        """Return the answer of a server that cannot be reached, or that does not speak HTTP."""
        logger.warning("%s: %s", self.upstream, named_error(error))
        reason = "does not answer in HTTP" if isinstance(error, aiohttp.ClientResponseError) else "cannot be reached"
        return refusal(502, f"{self.upstream} {reason}.")


def refusal(status: int, message: str) -> web.Response:
    """Return an error of the proxy itself, in a form that OpenAI's and Anthropic's clients show."""
    error = {"message": f"penstock record: {message}", "type": "proxy_error", "param": None, "code": None}
    return web.json_response({"type": "error", "error": error}, status=status)


async def _sent(request: web.Request, listener: Listener) -> AsyncGenerator[bytes, None]:
    async for data in request.content.iter_any():
        listener.sent(data)
        yield data


async def _continued(begun: list[bytes], rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    for data in begun:
        yield data
    async for data in rest:
        yield data


async def _passed_back(request: web.Request, answer: ClientResponse, listener: Listener) -> web.StreamResponse:
    if _is_unsendable(answer.headers):
        return refusal(502, "A header of the answer is not UTF-8.")
    passed = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers))
    passed[PASSED] = frozenset(name.lower() for name in answer.headers)
    listener.begun(answer.status, answer.headers)
    await passed.prepare(request)
    async for data in _pieces(answer):
        listener.came(data)
        await passed.write(data)
    listener.over()
    await passed.write_eof()
    return passed


async def _pieces(answer: ClientResponse) -> AsyncIterator[bytes]:
    """Yield the bytes of an answer as they come.  Raise `BrokenOff` if the server breaks it off."""
    try:
        async for data in answer.content.iter_any():
            yield data
    except (aiohttp.ClientError, OSError) as error:
        raise BrokenOff from error


def _end_to_end(headers: CIMultiDictProxy[str], besides: Iterable[str] = ()) -> CIMultiDict[str]:
    """Return the headers that a proxy passes on, in their order, but those ``besides``.

    A header that stands twice is spelt alike, as aiohttp would lose one of them otherwise.
    """
    spelt: dict[str, str] = {}
    listed = ",".join(headers.getall(hdrs.CONNECTION, ())).lower().split(",")
    dropped = HOP_BY_HOP | {name.strip() for name in listed} | {name.lower() for name in besides}
    kept = ((name, value) for name, value in headers.items() if name.lower() not in dropped)
    return CIMultiDict((spelt.setdefault(name.lower(), name), value) for name, value in kept)


def _is_unsendable(headers: CIMultiDictProxy[str]) -> bool:
    """True if aiohttp would lose bytes of a header, because they are not UTF-8."""
    return any("\udc80" <= character <= "\udcff" for value in headers.values() for character in value)


async def _remove_added(_: web.Request, answer: web.StreamResponse) -> None:
    """Remove from an answer of the server what aiohttp has added."""
    if PASSED in answer:
        for name in ADDED:
            if name.lower() not in answer[PASSED]:
                answer.headers.popall(name, None)


class _Connection(web.RequestHandler):
    """A connection that answers a request which is no HTTP, and logs it in one line."""

    __slots__ = ()

    def handle_error(
        self, request: Any, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer a request that cannot be parsed; all others reach the application."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        logger.info("%s sent a request that is not valid HTTP", request.remote)
        answer = refusal(status, "The request is not valid HTTP.")
        answer.force_close()
        return answer


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Runner(web.AppRunner):
    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,  # noqa: SLF001 - aiohttp has no public way to choose the class of its server
        )


@asynccontextmanager
async def proxying(proxy: Proxy, host: str, port: int) -> AsyncGenerator[str, None]:
    """Run the proxy for the length of a block, and yield its URL.  Raise `OSError` if the address cannot be had."""
    runner = _Runner(
        proxy.app(),
        access_log=None,
        auto_decompress=False,
        handler_cancellation=True,
        max_line_size=LONGEST_HEADER,
        max_field_size=LONGEST_HEADER,
        max_headers=MOST_HEADERS,
        shutdown_timeout=STOPPING_SECONDS,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        address = runner.addresses[0]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        yield f"http://{shown}:{address[1]}"
    finally:
        await runner.cleanup()
        await proxy.tap.close()
