"""A request that no client has sent: a body for a handler of this server, without a connection."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import HttpVersion11, StreamReader, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.payload import Payload
from aiohttp.web_urldispatcher import UrlMappingMatchInfo
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from penstock.api.http.openapi import JSON
from penstock.pipeline.errors import UpstreamFailed


class InnerRequest(web.Request):
    """A ``POST`` of a JSON body, which keeps the bytes of an answer that its handler writes by itself.

    aiohttp makes requests from connections alone, and finds their routes; here the caller does both.
    """

    ATTRS = web.Request.ATTRS | {"written"}

    def __init__(self, path: str, body: bytes, protocol: web.RequestHandler, most: int) -> None:
        given = CIMultiDict({hdrs.CONTENT_TYPE: JSON, hdrs.CONTENT_LENGTH: str(len(body))})
        headers = CIMultiDictProxy(given)
        message = RawRequestMessage("POST", path, HttpVersion11, headers, (), False, None, False, False, URL(path))
        loop = asyncio.get_running_loop()
        content = StreamReader(protocol, len(body) + 1, loop=loop)
        content.feed_data(body)
        content.feed_eof()
        task = asyncio.current_task()
        assert task is not None
        self.written = Written()
        super().__init__(message, content, protocol, self.written, task, loop, client_max_size=most)

    def matched(self, match: UrlMappingMatchInfo, app: web.Application) -> None:
        """Take the route that answers it, and the application of the route."""
        match.add_app(app)
        match.freeze()
        self._match_info = match

    async def whole(self, answer: web.StreamResponse) -> bytes:
        """Return the body of its answer; raise `UpstreamFailed` for one that was broken off."""
        if not isinstance(answer, web.Response):
            if not self.written.is_whole:
                raise UpstreamFailed
            return bytes(self.written.data)
        body: Any = answer.body
        return await body.as_bytes() if isinstance(body, Payload) else bytes(body or b"")


class Written(AbstractStreamWriter):
    """The bytes that a handler writes."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.is_whole = False

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        """Keep bytes."""
        self.data += chunk

    async def write_eof(self, chunk: bytes = b"") -> None:
        """Keep the last bytes."""
        self.data += chunk
        self.is_whole = True

    async def drain(self) -> None:
        """Wait for nothing."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        """Compress nothing."""

    def enable_chunking(self) -> None:
        """Keep the bytes as they are."""

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Drop the headers."""


def no_connection() -> web.RequestHandler:
    """Return what stands for the connection of such requests."""
    return web.Server(_refuse)()


async def _refuse(_: web.BaseRequest) -> web.StreamResponse:
    raise web.HTTPNotFound
