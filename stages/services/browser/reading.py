"""Converting fetched responses to pages.

HTML is converted in a separate process, which is killed if the task that waits for it is cancelled.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from pathlib import Path
from urllib.parse import urlsplit

from penstock.stages.services.browser.failure import Failure
from penstock.stages.services.browser.fetch import Fetched, Fetcher
from penstock.stages.services.browser.html import clean, decoded
from penstock.stages.services.browser.pages import SOURCE_PREFIX, Page, opened

_CONVERTER = str(Path(__file__).with_name("html.py"))
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
"""The converter's environment: no secrets, as it parses untrusted pages, only the path to Python's libraries."""


_AT_ONCE = 4
"""Limit on concurrent converter processes."""


class Reader:
    """Fetches web pages and converts them."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._converters = asyncio.Semaphore(_AT_ONCE)

    async def page(self, url: str) -> Page:
        """Open the page at a URL, or its source if the URL begins with `SOURCE_PREFIX`; raises `Failure`."""
        fetched = await self._fetcher.fetch(url.removeprefix(SOURCE_PREFIX))
        if url.startswith(SOURCE_PREFIX):
            return await asyncio.to_thread(_read_text, fetched, SOURCE_PREFIX)
        if not fetched.is_html:
            return await asyncio.to_thread(_read_text, fetched)
        async with self._converters:
            return await _read_html(fetched)

    async def close(self) -> None:
        """Close all connections."""
        await self._fetcher.close()


def _read_text(fetched: Fetched, prefix: str = "") -> Page:
    text = decoded(fetched.body, fetched.charset or "utf-8-sig")
    if text is None:
        text = fetched.body.decode(errors="replace")
    title = urlsplit(fetched.url).path.rpartition("/")[2]
    return opened(prefix + fetched.url, title, clean(text.replace("\r\n", "\n")), ())


async def _read_html(fetched: Fetched) -> Page:
    converted = json.loads(await _convert(fetched))
    return await asyncio.to_thread(opened, fetched.url, converted["title"], converted["text"], converted["links"])


async def _convert(fetched: Fetched) -> bytes:
    arguments = ("-I", _CONVERTER, fetched.url, fetched.charset.replace("\0", ""))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_ENVIRONMENT
    )
    try:
        output, _ = await process.communicate(fetched.body)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    if process.returncode != 0:
        raise Failure("The page is too large or too deeply nested to be read.")
    return output
