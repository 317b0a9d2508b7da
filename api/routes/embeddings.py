"""Embeddings, scores and rankings: requests that another server answers, whose model does not write text."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector, hdrs, web

from penstock.api.http.conventions import REQUEST_ID, REQUEST_ID_HEADER
from penstock.api.http.errors import STREAMING
from penstock.api.http.openapi import Operation, operation
from penstock.api.http.prefix import path_of
from penstock.api.http.request_body import receive, release
from penstock.pipeline.errors import UpstreamFailed
from penstock.pipeline.foreign_errors import named_error
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.request import trace_headers
from penstock.services import tracing

logger = logging.getLogger(__name__)

PATHS = ("/v1/embeddings", "/v1/rerank", "/v1/score", "/rerank", "/score", "/v2/rerank")
"""The routes of vLLM whose requests another server answers."""

CONNECT_TIMEOUT = 5.0
"""Seconds to connect to the other server."""

READ_TIMEOUT = 300.0
"""Seconds for which the other server may be silent."""

PASSED_BACK = (hdrs.CONTENT_TYPE, hdrs.CONTENT_LENGTH, hdrs.CONTENT_ENCODING, hdrs.RETRY_AFTER)
"""The headers of an answer that its client gets."""

REDIRECTS = range(300, 400)
"""The statuses that are not followed: an answer of another place is not what the operator has set."""


class PassedOn(Body):
    """A body that the other server reads; this one passes it on as it came."""


@dataclass
class Upstream:
    """The server at ``url`` that embeds, with the API ``key`` that it wants, if any."""

    url: str
    key: str = field(default="", repr=False)

    @property
    def routes(self) -> Sequence[web.RouteDef]:
        """The routes whose requests it answers."""
        return [web.post(path, self.pass_on) for path in PATHS]

    async def run(self, _: web.Application) -> AsyncGenerator[None, None]:
        """Keep connections to it for the lifetime of an application."""
        timeout = ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT, sock_read=READ_TIMEOUT)
        jar = DummyCookieJar()
        connector = TCPConnector(limit=0)  # with one, slow answers to one key would let the others wait
        async with ClientSession(
            connector=connector, timeout=timeout, cookie_jar=jar, auto_decompress=False
        ) as self._session:
            yield

    @operation(Operation(Any, body=PassedOn, refusals=(UpstreamFailed,)))
    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Have the server of ``--embeddings`` answer, and pass its answer back as it comes."""
        body = await receive(request)
        url, headers = f"{self.url}{path_of(request)}", self._headers(request)
        try:
            async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as answer:
                release(request)
                return await _passed_back(request, answer)
        except (ClientError, TimeoutError) as error:
            raise UpstreamFailed from error

    def _headers(self, request: web.Request) -> dict[str, str]:
        """Return the headers of a request that the other server gets: its client's key is for this one alone."""
        headers = {
            **tracing.current_headers(trace_headers(request.headers)),
            "Content-Type": request.headers.get(hdrs.CONTENT_TYPE, "application/json"),
            "Accept-Encoding": "identity",
            REQUEST_ID_HEADER: request[REQUEST_ID],
        }
        return headers | ({"Authorization": f"Bearer {self.key}"} if self.key else {})


async def _passed_back(request: web.Request, answer: ClientResponse) -> web.StreamResponse:
    """Pass an answer back; if it breaks off, close the connection, as its client could not tell otherwise."""
    if answer.status in REDIRECTS:
        raise UpstreamFailed
    passed = web.StreamResponse(
        status=answer.status, headers={name: answer.headers[name] for name in PASSED_BACK if name in answer.headers}
    )
    request[STREAMING] = True
    await passed.prepare(request)
    try:
        async for data in answer.content.iter_any():
            await passed.write(data)
    except (ClientError, TimeoutError) as error:
        logger.warning("The server of --embeddings broke off an answer: %s", named_error(error))
        if request.transport is not None:
            request.transport.close()
        return passed
    await passed.write_eof()
    return passed
