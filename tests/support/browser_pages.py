"""Pages of the operator in a browser, on a server in this process that has a thread of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Thread
from typing import Any, TypeVar

from playwright.sync_api import Browser, Page

from tests.support.live_server import KEY
from tests.support.paths import BROWSER
from tests.support.processes import PATIENCE

AXE = BROWSER.parent / "axe-core" / "axe.min.js"
Result = TypeVar("Result")


@contextmanager
def in_own_thread(
    context: AbstractAsyncContextManager[Result],
) -> Iterator[tuple[asyncio.AbstractEventLoop, Result]]:
    """Open a server in a thread of its own; give its event loop, too."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(PATIENCE)

    async def opened() -> Result:
        return await context.__aenter__()

    async def closed() -> None:
        await context.__aexit__(None, None, None)

    try:
        server = run(opened())
        try:
            yield loop, server
        finally:
            run(closed())
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE)
        loop.close()


@dataclass
class Pages:
    browser: Browser
    complaints: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)

    def open(self, url: str, key: str = KEY, *, prepare: Callable[[Page], None] | None = None, **options: Any) -> Page:
        """Open the page of the operator at a URL, with the key of the operator."""
        context = self.browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
        self.contexts.append(context)
        context.set_default_timeout(1000 * PATIENCE)
        page = context.new_page()
        page.on("console", self._hear)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.outside.append(request.url))
        if prepare:
            prepare(page)
        page.goto(url if not key else f"{url}#key={key}")
        return page

    def _hear(self, message: Any) -> None:
        if "with a status of" not in message.text and "ERR_" not in message.text:  # Chromium notes each failed request
            self.complaints.append(message.text)


def accessible(page: Page) -> None:
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run().then(found => found.violations)")
    assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []
