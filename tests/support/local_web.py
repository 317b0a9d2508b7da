"""A web of our own in tests: real servers on real sockets, and conversations to browse in."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from aiohttp import web

from pipeline.frames import Conversation, Sampling
from pipeline.protocol.items import Item
from stages.guard import AllowedNetworks
from tests.support.stored_responses import response

LOCAL = AllowedNetworks.parse(["127.0.0.0/8"])
SAMPLING = Sampling(temperature=1.0, top_p=1.0)


@asynccontextmanager
async def serving(handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0) -> AsyncIterator[str]:
    """The URL of a server whose every request goes to ``handler``, at that port if it is free."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await handler(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def conversation(
    history: tuple[Item, ...] = (), given: tuple[Item, ...] = (), results: Mapping[str, str] | None = None
) -> Conversation:
    """One with what was said before."""
    begun = response(status="in_progress", completed_at=None, output=())
    return Conversation(begun, history, given, SAMPLING, "2026-01-01", results=results or {})
