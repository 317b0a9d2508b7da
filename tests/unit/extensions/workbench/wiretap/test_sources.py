"""The list of models of a server that is recorded, which may be anything."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from penstock.extensions.workbench.wiretap.sources import Sources

pytestmark = pytest.mark.io

LISTS = {
    "nothing": b"",
    "no JSON": b"<html>",
    "no list": b'{"data": 1}',
    "no UTF-8": b'{"data": [{"id": "\xff"}]}',
    "deep": b'{"more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("body", LISTS.values(), ids=LISTS)
async def test_list_that_cannot_be_read_names_no_source(body: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    sources, known = Sources(), asyncio.Event()
    with caplog.at_level(logging.INFO, "penstock"):
        async with TestServer(app) as server, ClientSession() as session:
            sources.look_up(session, server.make_url("/v1/models"), None)
            sources.when_known(known.set)
            await known.wait()
    assert "gives no list of models" in caplog.text
    assert sources.of("tiny") is None
