"""Pages from the web: fetched from URLs in untrusted input, and converted to text.

Only text is fetched, up to `LARGEST_PAGE` bytes.  HTML is converted in a separate process, which is killed if the task
that waits for it is cancelled.

A hostile page takes all the time that it gets.  So each page first gets a second, and a page that needs more begins
again among its like, with less priority: ordinary pages, which take a tenth of that, need not wait for these.
"""

from __future__ import annotations

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.html import clean
from penstock.extensions.tools.browser.html import decoded as decoded_text
from penstock.extensions.tools.browser.pages import SOURCE_PREFIX, Page, opened
from penstock.services.foreign import Unreadable, decoded, read_start, read_whole
from penstock.services.json_size import JsonSize
from penstock.services.slots import Slots
from penstock.services.web.domains import ALL_DOMAINS, Domains
from penstock.services.web.fetch import Fetcher, NotFetched
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks

LARGEST_PAGE = 2 << 20
_LARGEST_CONVERTED = JsonSize(containers=2, commas=LARGEST_PAGE)
"""The size of a converted page: a title, a text, and fewer links than the page has bytes."""
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; penstock)",
    "Accept": "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.9",
    "Accept-Language": "en;q=0.8,*;q=0.5",
}
_CONVERTER = str(Path(__file__).with_name("html.py"))
_ENVIRONMENT = {name: value for name, value in os.environ.items() if name == "LD_LIBRARY_PATH"}
"""The converter's environment: no secrets, as it parses untrusted pages, only the path to Python's libraries."""

_BRIEF_SECONDS, _BRIEF_AT_ONCE = 1, 4
_LONG_SECONDS, _LONG_AT_ONCE = 5, 2
"""Limits on the CPU time of a converter, and on concurrent converters of this kind."""


@dataclass(frozen=True)
class Fetched:
    """A fetched page, after all redirects; ``charset`` is the server's, empty if it named none."""

    url: str
    is_html: bool
    charset: str
    body: bytes


class _Converted(msgspec.Struct, frozen=True):
    title: str
    text: str
    links: tuple[str, ...]


_read_converted = msgspec.json.Decoder(_Converted).decode


class Reader:
    """Fetches web pages and converts them."""

    def __init__(self, allowed: AllowedNetworks = NOTHING_ALLOWED, resolver: AbstractResolver | None = None) -> None:
        self._fetcher = Fetcher(_HEADERS, allowed, resolver)
        self.brief = Slots(_BRIEF_AT_ONCE, per_owner=_BRIEF_AT_ONCE // 2)
        self.long = Slots(_LONG_AT_ONCE, per_owner=_LONG_AT_ONCE // 2)

    async def page(self, url: str, domains: Domains = ALL_DOMAINS, owner: str = "") -> Page:
        """Open the page at a URL for an owner, or its source if the URL begins with `SOURCE_PREFIX`.

        Raises `CallFailed`, also for a page that ``domains`` does not permit.
        """
        fetched = await self.fetch(url.removeprefix(SOURCE_PREFIX), domains)
        if url.startswith(SOURCE_PREFIX):
            return await asyncio.to_thread(_read_text, fetched, SOURCE_PREFIX)
        if not fetched.is_html:
            return await asyncio.to_thread(_read_text, fetched)
        return await self.converted(fetched, owner)

    async def fetch(self, url: str, domains: Domains = ALL_DOMAINS) -> Fetched:
        """Fetch the page at a URL; raises `CallFailed`."""
        try:
            return await self._fetcher.fetch(url, _read_answer, domains)
        except NotFetched as error:
            raise CallFailed(str(error)) from None

    async def converted(self, fetched: Fetched, owner: str = "") -> Page:
        """Convert a page of HTML once the owner has a place; raises `CallFailed` if that takes too much."""
        async with self.brief.slot(owner):
            output = await _convert(fetched, _BRIEF_SECONDS)
        if output is None:
            async with self.long.slot(owner):
                output = await _convert(fetched, _LONG_SECONDS)
        if output is None:
            raise CallFailed("The page is too large or too deeply nested to be read.")
        page = await decoded(output, _read_converted, _LARGEST_CONVERTED)
        return await asyncio.to_thread(opened, fetched.url, page.title, page.text, page.links)

    async def close(self) -> None:
        await self._fetcher.close()


async def _read_answer(answer: aiohttp.ClientResponse) -> Fetched:
    kind = answer.content_type if "Content-Type" in answer.headers else ""
    if kind and not _is_text(kind):
        raise CallFailed(f"It is of type {kind[:100]}, which cannot be read here.")
    body = await read_start(answer.content.iter_any(), LARGEST_PAGE)
    is_html = kind in ("text/html", "application/xhtml+xml") if kind else body.lstrip()[:1] == b"<"
    if not kind and b"\0" in body:
        raise CallFailed("It is not text.")
    return Fetched(str(answer.url), is_html, answer.charset or "", body)


def _is_text(kind: str) -> bool:
    subtype = kind.partition("/")[2]
    return kind.startswith("text/") or subtype in ("json", "xml", "javascript") or subtype.endswith(("+json", "+xml"))


def _read_text(fetched: Fetched, prefix: str = "") -> Page:
    text = decoded_text(fetched.body, fetched.charset or "utf-8-sig")
    if text is None:
        text = fetched.body.decode(errors="replace")
    title = urlsplit(fetched.url).path.rpartition("/")[2]
    return opened(prefix + fetched.url, title, clean(text.replace("\r\n", "\n")), ())


async def _convert(fetched: Fetched, seconds: int) -> bytes | None:
    """Return what the converter writes; None if it could not read the page within its limits."""
    arguments = ("-I", _CONVERTER, fetched.url, fetched.charset.replace("\0", ""), str(seconds))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=_ENVIRONMENT
    )
    assert process.stdin
    assert process.stdout
    try:
        process.stdin.write(fetched.body)
        process.stdin.close()  # once all is written
        output = await read_whole(_pieces(process.stdout))
        await process.wait()
    except Unreadable:
        return None
    finally:
        if process.returncode is None:  # it writes too much, or the call was cancelled
            process.kill()
            await process.wait()
    return output if process.returncode == 0 else None


async def _pieces(output: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await output.read(2**16):
        yield piece
