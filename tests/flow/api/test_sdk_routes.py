"""The verdict of each route that an SDK calls, in ``sdk_routes.toml``, and that the server keeps to it.

``--regen`` writes the page.  A new version of an SDK with a route that stands in no list fails.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from penstock.api.resources.resources import SHIPPED
from penstock.api.settings import Settings
from tests.support.paths import ROOT
from tests.support.sdk_routes import Route, sdk_routes
from tests.support.server import ScriptedServer
from tests.support.tool_servers import tool_server, web_server

TABLE: Mapping[str, Any] = tomllib.loads(Path(__file__).with_name("sdk_routes.toml").read_text())
PAGE = ROOT / "docs" / "SDK_ROUTES.md"
HEADERS: Mapping[str, dict[str, str]] = {"openai": {}, "anthropic": {"anthropic-version": "2023-06-01"}}


def routes(lines: Sequence[str]) -> list[Route]:
    """Return the routes of lines, each of which has the methods of a path."""
    split = [line.split(" ") for line in lines]
    return [Route(method, path) for *methods, path in split for method in methods]


def listed(sdk: str) -> list[Route]:
    table = TABLE[sdk]
    return [*routes(table["served"]), *(route for group in table["absent"] for route in routes(group["routes"]))]


@pytest.mark.parametrize("sdk", TABLE)
def test_every_route_of_the_sdk_has_one_verdict(sdk: str) -> None:
    with_verdict, called = Counter(listed(sdk)), sdk_routes(sdk)
    found = {
        "new": sorted(map(str, called - with_verdict.keys())),
        "gone": sorted(map(str, with_verdict.keys() - called)),
        "twice": [str(route) for route, count in with_verdict.items() if count > 1],
    }
    assert found == {"new": [], "gone": [], "twice": []}


@asynccontextmanager
async def serving_all_routes(folder: Path) -> AsyncGenerator[ScriptedServer, None]:
    """Serve every route of penstock, over a server that answers what is passed on."""

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({})

    async with web_server(answer) as url:
        settings = Settings.model_validate({"models": {"any": {"kind": "any", "engine": [url]}}})
        async with tool_server(folder, resources=SHIPPED, settings=settings) as served:
            yield served


@pytest.mark.parametrize("sdk", TABLE)
async def test_server_keeps_to_the_verdict_of_every_route(tmp_path: Path, sdk: str) -> None:
    served_routes, wrong = routes(TABLE[sdk]["served"]), list[str]()
    paths = {route.path for route in served_routes}
    async with serving_all_routes(tmp_path) as served:
        for route in listed(sdk):
            body = None if route.method == "GET" else b"{}"
            headers = {**HEADERS[sdk], "Content-Type": "application/json"}
            url = served.url + route.path.replace("{}", "x")
            async with served.client.request(route.method, url, data=body, headers=headers) as answer:
                found = (answer.status, await answer.json() if answer.status >= 400 else None)
            if verdict(sdk, *found) != expected(route, served_routes, paths):
                wrong.append(f"{route}: {found}")
    assert wrong == []


def expected(route: Route, served: Sequence[Route], paths: set[str]) -> str:
    if route in served:
        return "served"
    return "no such method" if route.path in paths else "no such route"


def verdict(sdk: str, status: int, body: Any) -> str:
    """Say what an answer means; an error has the form of the SDK's API."""
    if status < 400:
        return "served"
    error = body["error"]
    if sdk == "openai":
        assert (set(body), set(error)) == ({"error"}, {"message", "type", "param", "code"})
    else:
        assert (body["type"], set(error)) == ("error", {"message", "type"})
    assert status < 500, error
    kind, _, _ = error["message"].partition(": ")
    return {"Unknown request URL": "no such route", "Not allowed": "no such method"}.get(kind, "served")


def generated() -> str:
    return "\n".join(line for sdk in TABLE for line in section(sdk))


def section(sdk: str) -> Iterator[str]:
    """Yield the lines about an SDK."""
    yield f"\n## {sdk}: {len(listed(sdk))} routes, {len(routes(TABLE[sdk]['served']))} served\n"
    yield "| not served | reason | who has it |\n|---|---|---|"
    for group in TABLE[sdk]["absent"]:
        yield f"| {group['what']}: {len(routes(group['routes']))} | {group['reason']} | {group.get('who', '?')} |"


def test_page_has_every_verdict(pytestconfig: pytest.Config) -> None:
    head, mark, _ = PAGE.read_text().partition("<!-- generated -->\n")
    page = head + mark + generated() + "\n"
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page
