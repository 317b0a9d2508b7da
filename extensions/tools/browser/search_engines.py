"""Search engines: the request to each one, and the reading of its response.

An `SearchEngine` describes both, without I/O.  `WebSearch` sends the requests.  The operator chooses the engine, so its
address is not checked; the size of its responses is limited all the same.  No error message holds the key or text of a
response, as a response may quote the key.
"""

from __future__ import annotations

import asyncio
import html
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.services.foreign import Unreadable, decoded, read_whole

logger = logging.getLogger(__name__)

_LONGEST_TEXT = 50_000
"""Characters of the text of a hit."""
_LONGEST_QUERY = 400
"""Characters of a query; Brave and Tavily refuse longer ones."""
_MARKUP = re.compile(r"</?(?:b|em|i|mark|strong)>")
"""Tags with which engines highlight matches; other angle brackets may belong to the text."""


@dataclass(frozen=True)
class Hit:
    """One search result; ``text`` is the text of the page, empty if the engine does not return it."""

    title: str
    url: str
    snippet: str = ""
    text: str = ""


class SearchBackend(Protocol):
    """A search engine."""

    async def search(self, query: str, topn: int, domains: Sequence[str] = ()) -> list[Hit]:
        """Return the best results, at most ``topn``, with those of ``domains`` among them; raises `CallFailed`."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


@dataclass(frozen=True)
class Query:
    """A request to a search engine: a POST if it has a ``body``, else a GET."""

    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    body: Any = None


@dataclass(frozen=True)
class SearchEngine:
    """The API of one search engine.

    ``ask`` builds the request from the key, the query, the number of results and the domains to search, none for all.
    ``hits`` reads the decoded response, which may have results of other domains.
    """

    name: str
    url: str
    ask: Callable[[str, str, int, Sequence[str]], Query]
    hits: Callable[[Any], list[Hit]]
    needs_key: bool = True
    forbidden: str = "it refused the key"
    """Meaning of its status 403, for the error message."""


def _ask_searxng(key: str, query: str, topn: int, domains: Sequence[str]) -> Query:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return Query("/search", headers, {"q": _at_sites(query, domains), "format": "json"})


def _ask_brave(key: str, query: str, topn: int, domains: Sequence[str]) -> Query:
    parameters = {"q": _at_sites(_short(query), domains), "count": str(min(topn, 20)), "text_decorations": "false"}
    return Query("/res/v1/web/search", {"X-Subscription-Token": key}, parameters)


def _ask_tavily(key: str, query: str, topn: int, domains: Sequence[str]) -> Query:
    body: dict[str, Any] = {"query": _short(query), "max_results": min(topn, 20), "search_depth": "basic"}
    body |= {"include_domains": list(domains)} if domains else {}
    return Query("/search", {"Authorization": f"Bearer {key}"}, body=body)


def _ask_exa(key: str, query: str, topn: int, domains: Sequence[str]) -> Query:
    contents = {"text": {"maxCharacters": _LONGEST_TEXT}, "summary": True}
    body: dict[str, Any] = {"query": query, "numResults": topn, "contents": contents}
    body |= {"includeDomains": list(domains)} if domains else {}
    return Query("/search", {"x-api-key": key}, body=body)


def _at_sites(query: str, domains: Sequence[str]) -> str:
    """Return the query with the domains as search operators, unless that is too long."""
    sited = f"{query} {' OR '.join(f'site:{domain}' for domain in domains)}".rstrip()
    return sited if sited == _short(sited) else query


def _short(query: str) -> str:
    """Shorten a query to Brave's limits on words and characters."""
    return " ".join(query.split()[:50])[:_LONGEST_QUERY]


def _searxng_hits(answer: Any) -> list[Hit]:
    return [_hit(result, "content") for result in answer["results"]]


def _brave_hits(answer: Any) -> list[Hit]:
    return [_hit(result, "description") for result in (answer.get("web") or {}).get("results", [])]


def _tavily_hits(answer: Any) -> list[Hit]:
    return [_hit(result, "content", "raw_content") for result in answer["results"]]


def _exa_hits(answer: Any) -> list[Hit]:
    return [_hit(result, "summary", "text") for result in answer["results"]]


def _hit(result: Mapping[str, Any], snippet: str, text: str = "text") -> Hit:
    """Return a result as plain text: the engine may send its title and snippet as HTML."""
    words = str(result.get(text) or "")[:_LONGEST_TEXT]
    return Hit(_plain(result.get("title")), str(result.get("url")), _plain(result.get(snippet)), words)


def _plain(text: object) -> str:
    return " ".join(html.unescape(_MARKUP.sub("", str(text or ""))).split())


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://")) and url.isprintable() and " " not in url


ENGINES: Mapping[str, SearchEngine] = {
    "searxng": SearchEngine(
        "SearXNG",
        "",
        _ask_searxng,
        _searxng_hits,
        needs_key=False,
        forbidden="it returns no JSON: `search.formats` of its settings has to list `json`",
    ),
    "brave": SearchEngine("Brave Search", "https://api.search.brave.com", _ask_brave, _brave_hits),
    "tavily": SearchEngine("Tavily", "https://api.tavily.com", _ask_tavily, _tavily_hits),
    "exa": SearchEngine("Exa", "https://api.exa.ai", _ask_exa, _exa_hits),
}


def search_backend(kind: str, url: str = "", key: str = "") -> SearchBackend:
    """Return the search engine of the settings; raises `ValueError` for an unknown kind, or a missing key or URL."""
    if (engine := ENGINES.get(kind)) is None:
        raise ValueError(f"There is no search engine {kind!r}; there are {', '.join(ENGINES)}.")
    if engine.needs_key and not key:
        raise ValueError(f"{engine.name} needs a key.")
    if not (url or engine.url).startswith(("http://", "https://")):
        raise ValueError(f"{engine.name} needs a URL that begins with http:// or https://.")
    return WebSearch(engine, (url or engine.url).rstrip("/"), key)


class WebSearch:
    """A search engine reached over HTTP; connections are made on the first search."""

    def __init__(self, engine: SearchEngine, url: str, key: str) -> None:
        self._engine = engine
        self._url = url
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def search(self, query: str, topn: int, domains: Sequence[str] = ()) -> list[Hit]:
        engine_query = self._engine.ask(self._key, query, topn, domains)
        try:
            answer = await decoded(await self._answer(engine_query), json.loads)
            hits = await asyncio.to_thread(self._engine.hits, answer)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._failure(f"no answer came ({type(error).__name__})") from None
        except Unreadable as error:
            raise self._failure(f"its answer is {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError):
            raise self._failure("its answer is of an unexpected form") from None
        return [hit for hit in hits if _is_web(hit.url)][:topn]

    async def close(self) -> None:
        session, self._session = self._session, None
        if session:
            await session.close()

    async def _answer(self, query: Query) -> bytes:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=30, sock_connect=10)
            )
        request = self._session.request(
            "GET" if query.body is None else "POST",
            self._url + query.path,
            headers={"Accept": "application/json", **query.headers},
            params=query.parameters,
            json=query.body,
            allow_redirects=False,  # the key must not be sent elsewhere
        )
        async with asyncio.timeout(30), request as answer:
            if answer.status != 200:
                raise self._failure(self._meaning(answer.status))
            return await read_whole(answer.content.iter_any())

    def _meaning(self, status: int) -> str:
        match status:
            case 401:
                return "it refused the key"
            case 403:
                return self._engine.forbidden
            case 429:
                return "it limits the rate of requests"
            case 402 | 432 | 433:
                return "the limit of its plan is reached"
            case _ if 300 <= status < 400:
                return "its URL redirects"
            case _:
                return f"it answered with status {status}"

    def _failure(self, why: str) -> CallFailed:
        logger.warning("%s could not be used: %s", self._engine.name, why)
        return CallFailed(f"The search engine could not be used: {why}.")
