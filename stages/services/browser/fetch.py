"""Fetching pages from URLs in untrusted input: only text is read, up to `LARGEST_PAGE` bytes."""

from __future__ import annotations

from dataclasses import dataclass

import aiohttp
from aiohttp.abc import AbstractResolver

from penstock.stages.services.browser.failure import Failure
from penstock.stages.services.web import fetch
from penstock.stages.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks

LARGEST_PAGE = 2 << 20
_HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; penstock)",
    "Accept": "text/html,application/xhtml+xml,text/*;q=0.9,application/json;q=0.9",
    "Accept-Language": "en;q=0.8,*;q=0.5",
}


@dataclass(frozen=True)
class Fetched:
    """A fetched page, after all redirects; ``charset`` is the server's, empty if it named none."""

    url: str
    is_html: bool
    charset: str
    body: bytes


class Fetcher:
    """Fetches pages."""

    def __init__(self, allowed: AllowedNetworks = NOTHING_ALLOWED, resolver: AbstractResolver | None = None) -> None:
        self._fetcher = fetch.Fetcher(_HEADERS, allowed, resolver)

    async def fetch(self, url: str) -> Fetched:
        """Fetch the page at a URL; raises `Failure`."""
        try:
            return await self._fetcher.fetch(url, _read)
        except fetch.NotFetched as error:
            raise Failure(str(error)) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._fetcher.close()


async def _read(answer: aiohttp.ClientResponse) -> Fetched:
    kind = answer.content_type if "Content-Type" in answer.headers else ""
    if kind and not _is_text(kind):
        raise Failure(f"It is of type {kind[:100]}, which cannot be read here.")
    body = await fetch.read_start(answer.content, LARGEST_PAGE)
    is_html = kind in ("text/html", "application/xhtml+xml") if kind else body.lstrip()[:1] == b"<"
    if not kind and b"\0" in body:
        raise Failure("It is no text.")
    return Fetched(str(answer.url), is_html, answer.charset or "", body)


def _is_text(kind: str) -> bool:
    subtype = kind.partition("/")[2]
    return kind.startswith("text/") or subtype in ("json", "xml", "javascript") or subtype.endswith(("+json", "+xml"))
