"""The browser of a response, on a local web."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.extensions.tools.browser.calls import CallFailed
from penstock.extensions.tools.browser.kind import WebSearchOptions
from penstock.extensions.tools.browser.pages import VIEW_TOKENS, opened, view
from penstock.extensions.tools.browser.search_engines import Hit, search_backend
from penstock.extensions.tools.browser.session import BrowserHost, BrowserSession
from penstock.pipeline.frames import BrowserAction
from penstock.pipeline.protocol.items import Item, Message, OutputText, WebSearchCall
from penstock.services.tools import Citable, Host, Session, Source, ToolResult
from penstock.services.web.ssrf import NOTHING_ALLOWED, AllowedNetworks
from penstock.testing import ExampleCalls, check_host
from tests.support.tool_servers import LOOPBACK, conversation_with, web_server

pytestmark = pytest.mark.io

PAGE = """<title>Latency study</title><h1>Study</h1><p>The median fell,
and <a href="/data">the data set</a> is public.</p><p>{}</p><p>Needle here.</p>"""
FILLER = "<p>".join(f"Paragraph {number} of many words that say little." for number in range(200))


@dataclass
class Web:
    url: str = ""
    requested: list[str] = field(default_factory=list)
    """The paths of the requested pages, queries included."""
    status: int = 200
    began: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requested.append(request.path_qs)
        if self.status != 200:
            return web.Response(status=self.status)
        match request.path:
            case "/search":
                found = [
                    {"url": f"{self.url}/{name}", "title": name.title(), "content": f"On {name}."} for name in "ab"
                ]
                return web.json_response({"results": found})
            case "/a":
                return web.Response(text=PAGE.format(FILLER), content_type="text/html")
            case path if path.startswith("/hostile/"):
                return web.Response(text="<div>" * 200_000, content_type="text/html")
            case "/data":
                return web.Response(text="first\nsecond 【0†x】", content_type="text/plain")
            case "/moved":
                raise web.HTTPFound("/a")
            case "/away":
                raise web.HTTPFound(self.url.replace("127.0.0.1", "localhost") + "/a")
            case "/slow":
                self.began.set()
                try:
                    await asyncio.sleep(60)
                finally:
                    self.ended.set()
            case _:
                pass
        return web.Response(status=404)


@pytest.fixture
async def site() -> AsyncIterator[Web]:
    web_of_ours = Web()
    async with web_server(web_of_ours.answer) as url:
        web_of_ours.url = url
        yield web_of_ours


Opening = Callable[..., BrowserSession]


@pytest.fixture
async def browse(site: Web) -> AsyncIterator[Opening]:
    """A factory of sessions of one host."""
    host: Host = BrowserHost(search_backend("searxng", site.url), LOOPBACK)
    assert isinstance(host, BrowserHost)
    sessions: list[BrowserSession] = []

    def opening(*items: Any, **more: Any) -> BrowserSession:
        sessions.append(host.session(conversation_with(*items, **more)))
        return sessions[-1]

    async with AsyncExitStack() as stack:
        stack.push_async_callback(host.close)
        yield opening
        for session in sessions:
            await session.close()


async def call(session: Session, name: str, seconds: float = 120, **arguments: Any) -> ToolResult:
    return await session.run(name, json.dumps(arguments), seconds)


async def test_host_keeps_all_rules(site: Web) -> None:
    host = BrowserHost(search_backend("searxng", site.url), LOOPBACK)
    slow = json.dumps({"id": f"{site.url}/slow"})
    await check_host(host, ExampleCalls(("search", '{"query": "fjords"}'), ("open", '{"id": 99}'), ("open", slow)))


async def test_search_open_and_find_get_successive_cursors(site: Web, browse: Opening) -> None:
    session = browse()
    found = await call(session, "search", query="tail latency")
    assert found.error is None
    assert found.result.startswith("[0] tail latency\n**viewing lines [0 - 5] of 5**\n\nL0: \nL1: URL: \n")
    assert f"L4:   * 【0†A†{site.url.removeprefix('http://')}】 On a." in found.result

    page = await call(session, "open", id=0)
    assert page.error is None
    assert page.result.startswith(f"[1] Latency study ({site.url}/a)\n**viewing lines [0 - ")
    assert "【0†the data set】" in page.result

    linked = await call(session, "open", id=0, cursor=1)
    assert linked.result.endswith("L2: first\nL3: second 〖0†x〗")

    needle = await call(session, "find", pattern="needle", cursor=1)
    assert needle.result.startswith(f"[3] Find results for text: `needle` in `Latency study` ({site.url}/a/find?")
    there = await call(session, "open", id=0)
    assert there.result.startswith("[4] Latency study")
    assert "Needle here." in there.result
    assert site.requested == ["/search?q=tail+latency&format=json", "/a", "/data"]


async def test_scrolling_gets_a_new_cursor(browse: Opening, site: Web) -> None:
    session = browse()
    await call(session, "open", id=f"{site.url}/a")
    shown = (await call(session, "open", loc=10, num_lines=2)).result
    assert shown.startswith(f"[1] Latency study ({site.url}/a)\n**viewing lines [10 - 11] of ")
    assert len(shown.split("\n")) == 5
    assert (await call(session, "open", cursor=0, loc=3, num_lines=1)).result.startswith("[2] Latency study")
    assert site.requested == ["/a"]


async def test_page_opened_by_url_is_fetched_again(browse: Opening, site: Web) -> None:
    """A URL stands for the current page."""
    session = browse()
    for _ in range(2):
        await call(session, "open", id=f" {site.url}/a ")
    assert site.requested == ["/a", "/a"]


async def test_page_source_can_be_viewed(browse: Opening, site: Web) -> None:
    session = browse()
    await call(session, "open", id=f"{site.url}/a")
    outcome = await call(session, "open", view_source=True)
    assert outcome.result.startswith(f"[1] a (view-source:{site.url}/a)")
    assert "<title>Latency study</title>" in outcome.result
    assert outcome.data == BrowserAction({"type": "open_page", "url": f"{site.url}/a"})
    assert session.source(1) == Source("a", f"{site.url}/a")


@pytest.mark.defect("V10")
async def test_actions_have_real_urls(browse: Opening, site: Web) -> None:
    session = browse()

    def action(name: str, **arguments: Any) -> dict[str, Any]:
        return session.action(name, json.dumps(arguments))

    assert action("search", query="q") == {"type": "search", "query": "q", "queries": ["q"]}
    await call(session, "search", query="q")
    assert action("open", id=1) == {"type": "open_page", "url": f"{site.url}/b"}
    assert action("open", id="1", cursor=0) == {"type": "open_page", "url": f"{site.url}/b"}
    assert action("open", id="example.org/x") == {"type": "open_page", "url": "https://example.org/x"}
    assert action("open", id=f"{site.url}/ä b") == {"type": "open_page", "url": f"{site.url}/%C3%A4%20b"}
    assert action("open", loc=3) == {"type": "open_page", "url": None}
    assert action("find", pattern="x") == {"type": "find_in_page", "url": "", "pattern": "x"}
    await call(session, "open", id=0)
    assert action("open", id=0) == {"type": "open_page", "url": f"{site.url}/data"}
    assert action("open", cursor=1, loc=3) == {"type": "open_page", "url": f"{site.url}/a"}
    assert action("find", pattern="x") == {"type": "find_in_page", "url": f"{site.url}/a", "pattern": "x"}
    await call(session, "find", pattern="median")
    assert action("open", id=0) == {"type": "open_page", "url": f"{site.url}/a"}


async def test_search_action_has_its_sources(browse: Opening, site: Web) -> None:
    session = browse()
    found = await call(session, "search", query="q")
    assert found.data == BrowserAction(
        {
            "type": "search",
            "query": "q",
            "queries": ["q"],
            "sources": [{"type": "url", "url": f"{site.url}/a"}, {"type": "url", "url": f"{site.url}/b"}],
        },
        tuple(
            {"type": "url", "url": f"{site.url}/{name}", "title": name.title(), "snippet": f"On {name}."}
            for name in "ab"
        ),
    )
    site.status = 500
    failed = await call(session, "search", query="q")
    assert failed.data == BrowserAction({"type": "search", "query": "q", "queries": ["q"], "sources": []})
    assert failed.error == failed.result
    assert (
        failed.error == "Error during search for `q`: The search engine could not be used: it answered with status 500."
    )


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("open", {"id": 7}, "Invalid link id `7`."),
    ("open", {"id": 0, "cursor": 9}, "Cursor `9` is out of range. Available cursor indices: [0 - 0]."),
    ("open", {"cursor": -2}, "Cursor `-2` is out of range. Available cursor indices: [0 - 0]."),
    ("open", {"loc": 99}, "Invalid location parameter: `99`. Cannot exceed page maximum of 5."),
    ("find", {"pattern": "x"}, "Cannot run `find` on search results page or find results page"),
    ("find", {"pattern": "x", "cursor": "one"}, "`cursor` should be an integer, not `str`"),
    ("find", {}, "Invalid function arguments: `pattern` has to be a text."),
    ("search", {"query": 3}, "Invalid function arguments: `query` has to be a text."),
    ("click", {}, "Unknown function: click"),
    ("open", {"id": "file:///etc/passwd"}, "Error fetching URL `file:///etc/passwd`: Only http:// and"),
    ("open", {"id": True}, "`id` should be an integer, not `bool`"),
]


@pytest.mark.defect("B12")
@pytest.mark.parametrize(("name", "arguments", "why"), WRONG)
async def test_wrong_call_is_explained_to_the_model(
    name: str, arguments: dict[str, Any], why: str, browse: Opening
) -> None:
    session = browse()
    await call(session, "search", query="q")
    outcome = await call(session, name, **arguments)
    assert (outcome.error or "").startswith(why)
    assert outcome.result == outcome.error
    assert (await call(session, "search", query="q")).result.startswith("[1] ")


@pytest.mark.defect("B12")
@given(
    st.sampled_from(["search", "open", "find", "", "run"]),
    st.text(max_size=30) | st.from_regex(r'\{"(id|cursor|query)": .{0,20}\}'),
)
def test_any_arguments_have_an_action(name: str, text: str) -> None:
    session = BrowserHost(search_backend("searxng", "http://127.0.0.1:1"), NOTHING_ALLOWED).session(conversation_with())
    action = session.action(name, text)
    assert action["type"] in ("search", "open_page", "find_in_page")
    assert "cursor:" not in json.dumps(action.get("url"))


@pytest.mark.defect("B12")
@pytest.mark.parametrize("name", ["search", "open", "find"])
async def test_lone_surrogates_are_replaced(name: str, browse: Opening, site: Web) -> None:
    session = browse()
    await call(session, "open", id=f"{site.url}/data")
    half = '"a\\ud83d"'
    outcome = await session.run(name, f'{{"query": {half}, "pattern": {half}, "id": {half}}}', 120)
    assert isinstance(outcome.data, BrowserAction)
    json.dumps([outcome.data.action, outcome.result, outcome.error], ensure_ascii=False).encode()


@pytest.mark.defect("B12")
@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '{"id": 1e999}', "[" * 100_000, '{"cursor": [0]}'])
async def test_arguments_that_are_no_json_are_an_error(text: str, browse: Opening) -> None:
    for name in ("search", "open", "find"):
        outcome = await browse().run(name, text, 5)
        assert outcome.error


async def test_numbers_are_read_in_any_form(browse: Opening, site: Web) -> None:
    """A whole number may be a string or a float."""
    session = browse()
    await call(session, "search", query="q")
    assert (await call(session, "open", id="0", cursor=0.0, loc=None)).result.startswith("[1] Latency")
    assert (await call(session, "open", id=-1, cursor="1", loc="2", num_lines=1.0)).result.count("\n") == 3


async def test_private_pages_are_not_opened(site: Web) -> None:
    host = BrowserHost(search_backend("searxng", site.url))
    session = host.session(conversation_with())
    await call(session, "search", query="q")
    outcome = await call(session, "open", id=0)
    assert outcome.error == f"Error fetching URL `{site.url}/a`: Its address is not allowed."
    assert site.requested == ["/search?q=q&format=json"]
    await session.close()
    await host.close()


async def test_search_text_replaces_a_page_that_cannot_be_fetched() -> None:

    class Knowing:
        async def search(self, query: str, topn: int, domains: Sequence[str] = ()) -> list[Hit]:
            if query == "broken":
                raise CallFailed("No.")
            return [Hit("Known", "http://10.0.0.1/x", "short", "All that 【0†is】 known.")]

        async def close(self) -> None:
            pass

    host = BrowserHost(Knowing())
    session = host.session(conversation_with())
    await call(session, "search", query="q")
    outcome = await call(session, "open", id=0)
    assert outcome.error is None
    assert outcome.result.startswith("[1] Known (http://10.0.0.1/x)")
    assert outcome.result.endswith("L2: All that 〖0†is〗 known.")
    assert (await call(session, "search", query="broken")).error == "Error during search for `broken`: No."
    await host.close()


async def test_parallel_calls_have_their_own_cursors(browse: Opening, site: Web) -> None:
    session = browse()
    outcomes = await asyncio.gather(
        *(call(session, "open", id=f"{site.url}/{name}") for name in ("a", "data", "moved", "nowhere"))
    )
    heads = {outcome.result.split("]")[0] for outcome in outcomes if outcome.error is None}
    assert heads == {"[0", "[1", "[2"}
    assert outcomes[3].error == f"Error fetching URL `{site.url}/nowhere`: Its server answered with status 404."


async def test_cancelling_a_call_ends_its_request(browse: Opening, site: Web) -> None:
    running = asyncio.create_task(call(browse(), "open", id=f"{site.url}/slow"))
    await asyncio.wait_for(site.began.wait(), 120)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(site.ended.wait(), 120)


async def test_page_seen_in_a_session_can_be_cited_after_its_end(browse: Opening, site: Web) -> None:
    session = browse()
    await call(session, "open", id=f"{site.url}/data")
    await session.close()
    assert session.source(0) == Source("data", f"{site.url}/data")


async def test_closing_the_host_ends_requests(site: Web) -> None:
    host = BrowserHost(search_backend("searxng", site.url), LOOPBACK)
    running = asyncio.create_task(call(host.session(conversation_with()), "open", id=f"{site.url}/slow"))
    await asyncio.wait_for(site.began.wait(), 120)
    await host.close()
    assert (await running).error


async def test_seen_pages_can_be_cited(browse: Opening, site: Web) -> None:
    """A cursor stands for its page; a cursor of results for the result at a line."""
    session = browse()
    assert isinstance(session, Citable)
    assert session.source(0) is None
    await call(session, "search", query="q")
    await call(session, "open", id=0)
    await call(session, "find", pattern="median")
    listing = session.source(0)
    assert getattr(listing, "at")(4) == Source("A", f"{site.url}/a")  # noqa: B009 - what it is lies with Citations
    assert session.source(1) == session.source(2) == Source("Latency study", f"{site.url}/a")
    assert session.source(3) is None


# A response that continues another


async def _said(session: BrowserSession, *calls: tuple[str, dict[str, Any]]) -> tuple[list[Item], dict[str, str]]:
    items: list[Item] = []
    results: dict[str, str] = {}
    for number, (name, arguments) in enumerate(calls):
        text = json.dumps(arguments)
        outcome = await session.run(name, text, 120)
        items.append(WebSearchCall(f"ws_{number}", "completed", session.action(name, text)))
        results[f"ws_{number}"] = outcome.result
    return items, results


async def test_continued_response_keeps_its_cursors(browse: Opening, site: Web) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("search", {"query": "tail (https://x.org)"}),
        ("open", {"id": 0}),
        ("find", {"pattern": "/find?pattern=` in ` median"}),
        ("open", {"id": 99}),
        ("open", {"id": f"{site.url}/data"}),
    ]
    items, results = await _said(browse(), *calls)
    for before, now in ((items, []), ([], items), (items[:2], items[2:])):
        site.requested.clear()
        session = browse(tuple(before), tuple(now), results=results)
        assert session.source(1) == session.source(2) == Source("Latency study", f"{site.url}/a")
        assert session.source(3) == Source("data", f"{site.url}/data")
        assert site.requested == []
        linked = await call(session, "open", id=0, cursor=1)
        assert linked.result.startswith(f"[4] data ({site.url}/data)")
        assert linked.data == BrowserAction({"type": "open_page", "url": f"{site.url}/data"})
        assert (await call(session, "open", cursor=2, loc=0)).result.startswith("[5] Find results for text: `/find")
        assert (await call(session, "open", cursor=0, id=1)).error is not None
        assert site.requested == ["/a", "/data", "/search?q=tail+(https://x.org)&format=json", "/b"]


async def test_cursors_restart_after_an_answer(browse: Opening, site: Web) -> None:
    items, results = await _said(browse(), ("search", {"query": "q"}), ("open", {"id": 0}))
    answer = Message("msg_1", "completed", "assistant", (OutputText("Done."),), "final_answer")
    session = browse((*items, answer), results=results)
    assert session.source(0) is None
    assert (await call(session, "open", cursor=0)).error == "No pages to access!"
    preamble = Message("msg_1", "completed", "assistant", (OutputText("Hm."),), "commentary")
    assert browse((*items, preamble), results=results).source(1) is not None


@pytest.mark.parametrize("result", ["", "Error", "[x] y (http://e.com)", "[9999999] t\n", "[1]"])
async def test_malformed_history_results_are_ignored(result: str, browse: Opening) -> None:
    call_before = WebSearchCall("ws_1", "completed", {"type": "open_page", "url": "u"})
    session = browse((call_before,), results={"ws_1": result})
    assert session.source(1) is None
    assert (await call(session, "search", query="q")).result.startswith("[0] q")


async def test_evicted_page_is_fetched_again(browse: Opening, site: Web) -> None:
    session = browse()
    for number in range(30):
        await call(session, "open", id=f"{site.url}/data?{number}")
    site.requested.clear()
    assert (await call(session, "open", cursor=0, loc=0)).result.startswith(f"[30] data ({site.url}/data?0)")
    assert (await call(session, "open", cursor=29, loc=0)).result.startswith("[31] data")
    assert site.requested == ["/data?0"]


@pytest.mark.slow
@pytest.mark.parametrize("sessions", [1, 6])
async def test_hostile_pages_do_not_hold_up_an_ordinary_one(browse: Opening, site: Web, sessions: int) -> None:
    """Their conversion takes all the time that it gets; all of one response, or one in each of several."""
    hostile = [browse() for _ in range(sessions)]
    opening = [
        asyncio.create_task(call(hostile[number % sessions], "open", id=f"{site.url}/hostile/{number}"))
        for number in range(6)
    ]
    async with asyncio.timeout(120):
        while len(site.requested) < min(6, 2 * sessions):
            await asyncio.sleep(0.01)
    ordinary = await call(browse(), "open", id=f"{site.url}/a")
    assert ordinary.error is None
    assert not any(task.done() for task in opening)
    for task in opening:
        task.cancel()
    await asyncio.gather(*opening, return_exceptions=True)


async def test_search_of_some_domains_reads_no_others(site: Web) -> None:
    """A redirect to another host would open it, so it is not followed."""
    elsewhere = site.url.replace("127.0.0.1", "localhost")
    host = BrowserHost(search_backend("searxng", site.url), AllowedNetworks.parse(["127.0.0.1", "localhost"]))
    for domain, own, other in (("127.0.0.1", site.url, elsewhere), ("localhost", elsewhere, site.url)):
        request = conversation_with()
        session = host.session(
            replace(request, facts=replace(request.facts, options={"browser": {"domains": [domain]}}))
        )
        found = await call(session, "search", query="q")
        assert ("127.0.0.1" in found.result) is (domain == "127.0.0.1")
        assert site.requested.pop() == f"/search?q=q+site:{domain}&format=json"
        assert (await call(session, "open", id=f"{own}/a")).error is None
        assert site.requested == ["/a"]
        for url in (f"{other}/a", f"view-source:{other}/a", f"{other.replace('//', '//x.')}/a"):
            assert f"Only pages of {domain} can be opened." in str((await call(session, "open", id=url)).error)
        assert site.requested == ["/a"]
        away = await call(session, "open", id=f"{own}/away")
        assert (away.error is None) is (domain == "localhost")
        site.requested.clear()
        await session.close()
    await host.close()


async def test_blocked_domains_are_neither_found_nor_opened(site: Web) -> None:
    elsewhere = site.url.replace("127.0.0.1", "localhost")
    host = BrowserHost(search_backend("searxng", site.url), AllowedNetworks.parse(["127.0.0.1", "localhost"]))
    request = conversation_with()
    options = WebSearchOptions(blocked=("127.0.0.1",))
    session = host.session(replace(request, facts=replace(request.facts, options={"browser": options.in_json})))
    assert "127.0.0.1" not in (await call(session, "search", query="q")).result
    assert site.requested.pop() == "/search?q=q&format=json"
    for url in (f"{site.url}/a", f"view-source:{site.url}/a"):
        assert "Only pages of other domains can be opened." in str((await call(session, "open", id=url)).error)
    assert (await call(session, "open", id=f"{elsewhere}/a")).error is None
    assert site.requested == ["/a"]
    await session.close()
    await host.close()


@pytest.mark.parametrize("size", ["low", "medium", "high"])
async def test_context_size_decides_how_much_of_a_page_is_shown(size: str) -> None:
    page = opened("https://a.example", "A", "words and words\n" * 2_000, ())
    assert len(view(page, 0, tokens=VIEW_TOKENS[size])) // 4 == pytest.approx(VIEW_TOKENS[size], rel=0.1)
