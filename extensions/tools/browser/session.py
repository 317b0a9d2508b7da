"""The browser: a host shared by all responses, and the session of one response to search, open and find."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from penstock.extensions.tools.browser.calls import Call, CallFailed, Find, Open, Search, parse_call
from penstock.extensions.tools.browser.html import clean
from penstock.extensions.tools.browser.kind import WebSearchOptions
from penstock.extensions.tools.browser.page_stack import PageStack, Visit
from penstock.extensions.tools.browser.pages import SOURCE_PREFIX, VIEW_TOKENS, Page, matches, opened, results, view
from penstock.extensions.tools.browser.reader import Reader
from penstock.extensions.tools.browser.search_engines import Hit, SearchBackend, search_backend
from penstock.pipeline.frames import BrowserAction, ResolvedRequest
from penstock.pipeline.hosted_kinds import options_of
from penstock.services.tools import HostSettings, Source, ToolResult
from penstock.services.web.domains import Domains
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks
from penstock.stages.models.shell_calls import ArgumentsInvalid

RESULTS = 20
"""Results of each search.  The model was trained with this number; the one in its arguments is ignored."""
_KNOWN = 100
"""Number of results whose text is kept, for pages that cannot be fetched."""
_AT_ONCE = 2
"""Pages that one response fetches and converts at once, so that it cannot take the places of all."""
_LEAD = 4
"""Lines shown before a match."""


class BrowserHost:
    """Searches with ``backend``, and opens pages at public and ``allowed`` addresses."""

    def __init__(self, backend: SearchBackend, allowed: AllowedNetworks = NOTHING_ALLOWED) -> None:
        self._backend = backend
        self._reader = Reader(allowed)

    def session(self, request: ResolvedRequest) -> BrowserSession:
        """Return a session whose cursors include the pages that the model still has in its context."""
        owner, options = request.facts.origin.owner, options_of(request.facts, "browser", WebSearchOptions)
        return BrowserSession(
            self._backend, reader=self._reader, stack=PageStack(request), options=options, owner=owner
        )

    async def close(self) -> None:
        await self._reader.close()
        await self._backend.close()


def host(settings: HostSettings) -> BrowserHost | None:
    """Return the host, if the operator has chosen a search engine."""
    if settings.web_search is None:
        return None
    engine, _, url = settings.web_search.partition("=")
    return BrowserHost(search_backend(engine, url, settings.search_key), settings.allowed)


class BrowserSession:
    """A stack of pages, with the functions to search, open and find."""

    def __init__(
        self, backend: SearchBackend, reader: Reader, stack: PageStack, options: WebSearchOptions, owner: str = ""
    ) -> None:
        self._backend = backend
        self._reader = reader
        self._owner = owner
        self._stack = stack
        self._domains = Domains(options.domains, options.blocked)
        self._tokens = VIEW_TOKENS[options.context_size]
        self._found: dict[str, Hit] = {}
        self._known: OrderedDict[str, Hit] = OrderedDict()
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._deadlines: set[asyncio.Timeout] = set()
        self._is_closed = False

    def action(self, name: str, text: str) -> dict[str, Any]:
        """Return the action of a call, with the actual URL as far as it is known before the call runs."""
        try:
            return self._action(parse_call(name, text))
        except (ArgumentsInvalid, CallFailed):
            return _unclear(name)

    async def run(self, name: str, text: str, seconds: float) -> ToolResult:
        action = self.action(name, text)
        try:
            async with asyncio.timeout(0 if self._is_closed else seconds) as deadline:
                self._deadlines.add(deadline)
                try:
                    return await self._done(parse_call(name, text), action)
                finally:
                    self._deadlines.discard(deadline)
        except (ArgumentsInvalid, CallFailed) as failure:
            why = str(failure)
        except TimeoutError:
            why = "The call was cancelled." if self._is_closed else f"It took longer than {seconds:g} seconds."
        return ToolResult(why, why, BrowserAction(_with_sources(action, ())))

    async def close(self) -> None:
        """Stop running calls.  Pages that the model has seen may still be cited."""
        self._is_closed = True
        for deadline in self._deadlines:
            deadline.reschedule(0)

    def source(self, cursor: int) -> Source | None:
        return self._stack.source(cursor)

    # Actions

    def _action(self, call: Call) -> dict[str, Any]:
        match call:
            case Search(query):
                return {"type": "search", "query": query, "queries": [query]}
            case Open():
                return {"type": "open_page", "url": self._address(call)}
            case Find(pattern, cursor):
                return {"type": "find_in_page", "url": _real(self._stack.at(cursor).url), "pattern": pattern}

    def _address(self, call: Open) -> str | None:
        """Return the URL that a call will open; None if a page has to be fetched first to know it."""
        if isinstance(call.target, str):
            return _real(call.target)
        visit = self._stack.at(call.cursor)
        if call.target is None:
            return _real(visit.url) or None
        page = visit.page or self._stack.kept(visit.url)
        return _link(page, call.target) if page else None

    # Calls

    async def _done(self, call: Call, action: dict[str, Any]) -> ToolResult:
        match call:
            case Search(query):
                page = await self._search(query)
                return ToolResult(
                    self._push(Visit(page.title, query=query, page=page), page),
                    data=BrowserAction(_with_sources(action, page.links), self._results(page)),
                )
            case Find(pattern, cursor):
                visit = self._stack.at(cursor)
                page = matches(await self._page(visit), pattern)
                return ToolResult(
                    self._push(Visit(page.title, visit.url, pattern=pattern, page=page), page),
                    data=BrowserAction(action),
                )
            case Open():
                return await self._open(call, action)

    async def _open(self, call: Open, action: dict[str, Any]) -> ToolResult:
        visit, loc = await self._chosen(call)
        if call.view_source and visit.url:
            visit = Visit(visit.title, SOURCE_PREFIX + _real(visit.url))
        page = await self._page(visit, again=isinstance(call.target, str))
        shown = self._push(replace(visit, title=page.title), page, max(0, loc), call.num_lines)
        return ToolResult(shown, data=BrowserAction({**action, "url": _real(visit.url) or None}))

    async def _chosen(self, call: Open) -> tuple[Visit, int]:
        """Return the visit that a call opens, and the line to begin at."""
        if isinstance(call.target, str):
            return Visit("", call.target), call.loc
        visit = self._stack.at(call.cursor)
        if call.target is None:
            return visit, call.loc
        page = await self._page(visit)
        url = _link(page, call.target)
        if page.kind == "matches" and call.loc < 0:
            place = page.places[call.target]
            return Visit("", url), place - _LEAD if place > _LEAD else place
        return Visit("", url), call.loc

    def _push(self, visit: Visit, page: Page, loc: int = 0, num_lines: int = -1) -> str:
        """Put a page on top of the stack and return its view.  A page that cannot be shown is not put there."""
        shown = view(page, self._stack.latest + 1, loc, num_lines, self._tokens)
        self._stack.push(visit)
        return shown

    def _results(self, page: Page) -> tuple[dict[str, Any], ...]:
        """Return the results of a search that the client may see."""
        hits = (self._found[url] for url in page.links if url in self._found)
        return tuple({"type": "url", "url": hit.url, "title": hit.title, "snippet": hit.snippet} for hit in hits)

    # Pages

    async def _page(self, visit: Visit, *, again: bool = False) -> Page:
        """Return the page of a visit.  A web page is fetched if it is not kept, or if ``again`` is set."""
        if visit.page:
            return visit.page
        if visit.query:
            return await self._search(visit.query)
        page = None if again else self._stack.kept(visit.url)
        if page is None:
            page = await self._fetched(visit.url)
            self._stack.keep(visit.url, page)
        return matches(page, visit.pattern) if visit.pattern else page

    async def _fetched(self, url: str) -> Page:
        try:
            async with self._places:
                return await self._reader.page(url, self._domains, self._owner)
        except CallFailed as failure:
            if (hit := self._known.get(url)) is not None:
                return opened(url, hit.title, clean(hit.text), ())
            raise CallFailed(f"Error fetching URL `{_real(url)}`: {failure}") from None

    async def _search(self, query: str) -> Page:
        try:
            found = await self._backend.search(query, RESULTS, tuple(self._domains.allowed))
        except CallFailed as failure:
            raise CallFailed(f"Error during search for `{query}`: {failure}") from None
        hits = [hit for hit in found if self._domains.permits(hit.url)]
        self._found.update((hit.url, hit) for hit in hits)
        self._known.update((hit.url, hit) for hit in hits if hit.text)
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return results(query, hits)


def _link(page: Page, number: int) -> str:
    if number >= len(page.links):
        raise CallFailed(f"Invalid link id `{number}`.")
    return page.links[number]


def _real(url: str) -> str:
    return url.removeprefix(SOURCE_PREFIX)


def _with_sources(action: dict[str, Any], urls: tuple[str, ...]) -> dict[str, Any]:
    if action["type"] != "search":
        return action
    return {**action, "sources": [{"type": "url", "url": url} for url in urls]}


def _unclear(name: str) -> dict[str, Any]:
    match name:
        case "open":
            return {"type": "open_page", "url": None}
        case "find":
            return {"type": "find_in_page", "url": "", "pattern": ""}
        case _:
            return {"type": "search", "query": "", "queries": []}
