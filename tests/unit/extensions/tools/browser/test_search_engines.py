"""Search engines, as real servers that answer like them."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from aiohttp import web

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.search_engines import ENGINES, Hit, SearchBackend, search_backend
from tests.support.tool_servers import web_server

pytestmark = pytest.mark.io

KEY = "sk-very-secret-17"


class Call:
    """A server that records its requests and always gives the same answer."""

    def __init__(self, answer: Any = None, status: int = 200) -> None:
        self._answer = answer
        self._status = status
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.headers: list[dict[str, str]] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        self.requests.append((request.method, request.path, dict(request.query), body))
        self.headers.append(dict(request.headers))
        return web.json_response(self._answer, status=self._status)


async def searched(kind: str, url: str, query: str = "tail latency", topn: int = 20) -> list[Hit]:
    backend = search_backend(kind, url, KEY)
    try:
        return await backend.search(query, topn)
    finally:
        await backend.close()


SEARXNG = {
    "query": "tail latency",
    "number_of_results": 0,
    "results": [
        {
            "url": "https://example.com/a",
            "title": "Latency & study",
            "content": "The  median\nfell.",
            "engine": "brave",
            "score": 4.0,
        },
        {"url": "https://example.com/b", "title": "B", "content": None, "engine": "x"},
        {"url": "magnet:?xt=urn", "title": "No page"},
        {"title": "No URL"},
        {"url": "http://e.com/\ud83d", "title": "Half a character"},
        {"url": "http://e.com/a\nb", "title": "Two lines"},
    ],
    "answers": [],
    "unresponsive_engines": [["google", "timeout"]],
}


async def test_searxng_is_queried_for_json() -> None:
    api = Call(SEARXNG)
    async with web_server(api) as url:
        hits = await searched("searxng", url + "/")
    assert api.requests == [("GET", "/search", {"q": "tail latency", "format": "json"}, None)]
    assert hits == [
        Hit("Latency & study", "https://example.com/a", "The median fell."),
        Hit("B", "https://example.com/b"),
    ]


async def test_number_of_results_is_limited() -> None:
    async with web_server(Call({"results": [{"url": f"https://e.com/{n}", "title": "t"} for n in range(50)]})) as url:
        assert len(await searched("searxng", url, topn=20)) == 20


async def test_brave_is_queried_with_its_token() -> None:
    found = {
        "title": "A &lt;T&gt; <strong>b</strong>",
        "url": "https://e.com/",
        "description": "<strong>tail</strong> it&#x27;s",
    }
    api = Call({"type": "search", "web": {"type": "search", "results": [found]}})
    async with web_server(api) as url:
        hits = await searched("brave", url, "word " * 300, topn=50)
    method, path, query, body = api.requests[0]
    assert (method, path, body) == ("GET", "/res/v1/web/search", None)
    assert query == {"q": " ".join(["word"] * 50), "count": "20", "text_decorations": "false"}
    assert api.headers[0]["X-Subscription-Token"] == KEY
    assert hits == [Hit("A <T> b", "https://e.com/", "tail it's")]


async def test_brave_answer_without_results_is_empty() -> None:
    async with web_server(Call({"type": "search", "query": {"original": "x"}})) as url:
        assert await searched("brave", url) == []


async def test_tavily_is_queried_with_a_bearer_key() -> None:
    found = {"title": "T", "url": "https://e.com/", "content": "snippet", "score": 0.9, "raw_content": None}
    api = Call({"query": "tail latency", "answer": None, "images": [], "results": [found], "response_time": 1.1})
    async with web_server(api) as url:
        hits = await searched("tavily", url)
    body = {"query": "tail latency", "max_results": 20, "search_depth": "basic"}
    assert api.requests == [("POST", "/search", {}, body)]
    assert api.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert hits == [Hit("T", "https://e.com/", "snippet")]


async def test_exa_returns_the_text_of_pages() -> None:
    found = [
        {
            "id": "1",
            "title": "E",
            "url": "https://e.com/",
            "publishedDate": "2026-01-01",
            "text": "All.",
            "summary": "Sum.",
        },
        {"id": "2", "title": None, "url": "https://f.com/"},
    ]
    api = Call({"requestId": "x", "results": found, "costDollars": {"total": 0.02}})
    async with web_server(api) as url:
        hits = await searched("exa", url)
    contents = {"text": {"maxCharacters": 50_000}, "summary": True}
    assert api.requests == [("POST", "/search", {}, {"query": "tail latency", "numResults": 20, "contents": contents})]
    assert api.headers[0]["x-api-key"] == KEY
    assert hits == [Hit("E", "https://e.com/", "Sum.", "All."), Hit("", "https://f.com/")]


@pytest.mark.parametrize("kind", ["searxng", "brave", "tavily", "exa"])
@pytest.mark.parametrize(
    ("status", "words"),
    [
        (401, "refused the key"),
        (403, "refused the key|formats"),
        (422, "status 422"),
        (429, "rate of requests"),
        (432, "plan"),
        (500, "status 500"),
    ],
)
async def test_failures_do_not_reveal_the_key(
    kind: str, status: int, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with web_server(Call({"detail": f"Invalid key {KEY}"}, status)) as url:
        with pytest.raises(CallFailed, match=words) as failure:
            await searched(kind, url)
    assert caplog.records
    assert KEY not in str(failure.value) + caplog.text + repr(failure.value)


async def test_searxng_without_json_names_its_setting() -> None:
    """JSON is off by default there, and the operator must enable it."""
    async with web_server(Call("<html>", 403)) as url:
        with pytest.raises(CallFailed, match=r"search\.formats"):
            await searched("searxng", url)


@pytest.mark.parametrize("answer", [{}, [], None, "text", {"results": None}, {"results": [1]}, {"web": 3}])
@pytest.mark.parametrize("kind", ["searxng", "brave", "tavily", "exa"])
async def test_any_json_answer_gives_results_or_a_failure(kind: str, answer: Any) -> None:
    async with web_server(Call(answer)) as url:
        (outcome,) = await asyncio.gather(searched(kind, url), return_exceptions=True)
    assert outcome == [] or "unexpected form" in str(outcome)


async def test_answer_that_is_html_or_too_large_is_refused() -> None:

    async def answer(request: web.Request) -> web.StreamResponse:
        if "endless" not in request.query["q"]:
            return web.Response(text="<html>", content_type="text/html")
        stream = web.StreamResponse()
        await stream.prepare(request)
        while True:
            await stream.write(b" " * (1 << 20))

    async with web_server(answer) as url:
        with pytest.raises(CallFailed, match="unexpected form"):
            await searched("searxng", url)
        with pytest.raises(CallFailed, match="too large"):
            await searched("searxng", url, "endless")


async def test_key_follows_no_redirect() -> None:
    other = Call({"results": []})
    async with web_server(other) as elsewhere:

        async def answer(request: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(f"{elsewhere}/search")

        async with web_server(answer) as url:
            with pytest.raises(CallFailed, match="redirects"):
                await searched("exa", url)
    assert other.requests == []


async def test_unreachable_engine_is_a_failure() -> None:
    async with web_server(Call()) as url:
        pass
    with pytest.raises(CallFailed, match="no answer came"):
        await searched("searxng", url)


async def test_cancelling_ends_the_request() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        raise AssertionError

    async with web_server(answer) as url:
        backend: SearchBackend = search_backend("searxng", url)
        search = asyncio.create_task(backend.search("q", 5))
        await began.wait()
        search.cancel()
        await asyncio.wait_for(ended.wait(), 120)
        with pytest.raises(asyncio.CancelledError):
            await search
        await backend.close()


@pytest.mark.parametrize(
    ("kind", "url", "key", "words"),
    [
        ("bing", "", "k", "searxng, brave, tavily, exa"),
        ("searxng", "", "", "URL"),
        ("searxng", "localhost:8080", "", "URL"),
        ("brave", "", "", "key"),
        ("tavily", "", "", "key"),
        ("exa", "", "", "key"),
    ],
)
def test_unusable_settings_are_refused(kind: str, url: str, key: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        search_backend(kind, url, key)


def test_backend_does_not_show_its_key() -> None:
    assert KEY not in repr(search_backend("exa", "", KEY))
    assert KEY not in json.dumps({"backend": str(search_backend("exa", "", KEY))})


@pytest.mark.parametrize(
    ("kind", "passed"),
    [
        ("searxng", {"q": "q site:a.example OR site:b.example", "format": "json"}),
        ("brave", {"q": "q site:a.example OR site:b.example"}),
        ("tavily", {"include_domains": ["a.example", "b.example"]}),
        ("exa", {"includeDomains": ["a.example", "b.example"]}),
    ],
)
def test_engine_is_told_the_domains(kind: str, passed: dict[str, object]) -> None:
    """Else few of its results would be of theirs."""
    query = ENGINES[kind].ask("k", "q", 20, ["a.example", "b.example"])
    sent = {**query.parameters, **(query.body or {})}
    assert passed.items() <= sent.items()
    assert "omain" not in str(ENGINES[kind].ask("k", "q", 20, []))
    many = ENGINES[kind].ask("k", "q", 20, [f"{number}.example" for number in range(100)])
    assert len(many.parameters.get("q", "")) <= 400
