"""The site that `make site` has built, in Chromium: from files, as a reader opens it who has no server."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.paths import BROWSER, ROOT
from tests.support.processes import PATIENCE

AXE = BROWSER.parent / "axe-core" / "axe.min.js"
SITE = ROOT / ".cache/site/site"
PAGES = (
    "index.html",
    "docs/START.html",
    "docs/COMPARE.html",
    "docs/ERRORS.html",
    "docs/HTTP_API.html",
    "docs/HTTP_RESPONSES.html",
    "docs/HTTP_VECTOR_STORES.html",
    "docs/SETTINGS.html",
)

GRAVE = ("error", "warning")
"""Kinds of messages on the console; Chromium also notes there that it does not focus the search."""

OpenPage: TypeAlias = Callable[..., Page]

WIDEST = """() => Math.max(
    document.documentElement.scrollWidth,
    document.body.scrollWidth,
    ...[...document.querySelectorAll('.md-content h1, .md-content p, .md-content pre, .md-typeset__scrollwrap')].map(
        each => each.getBoundingClientRect().right,
    ),
)"""
"""The right edge of what the page shows, in pixels; the contents of code and of tables scroll inside."""

SCHEME = "() => document.body.dataset.mdColorScheme"


@pytest.fixture
def visit(browser: Browser, complaints: list[str]) -> Generator[OpenPage, None, None]:
    """A function that opens a page of the site; its options go to the browser's context."""
    outside: list[str] = []
    contexts = []

    def opened(name: str, **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        context.set_default_timeout(1000 * PATIENCE)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text) if message.type in GRAVE else None)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: outside.append(request.url))
        page.goto((SITE / name).as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not complaints
    assert not [url for url in outside if not url.startswith((f"{SITE.as_uri()}/", "blob:", "data:"))]


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_a_narrow_screen(name: str, visit: OpenPage) -> None:
    page = visit(name, viewport={"width": 390, "height": 800})
    assert page.evaluate(WIDEST) <= 390


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["docs/START.html", "docs/COMPARE.html", "docs/ERRORS.html", "docs/HTTP_FILES.html"])
def test_page_is_accessible(name: str, scheme: str, visit: OpenPage) -> None:
    """Lesser faults are those of the generator, such as buttons that all have one name."""
    page = visit(name, color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page.evaluate(AXE.read_text("utf-8"))
    found = page.evaluate("axe.run({preload: false}).then(found => found.violations)")
    grave = [each for each in found if each["impact"] in ("serious", "critical")]
    assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in grave] == []


def test_search_finds_the_text_of_an_error(visit: OpenPage) -> None:
    page = visit("index.html", viewport={"width": 1280, "height": 800})
    page.get_by_role("button", name="Search").click()
    page.get_by_role("combobox", name="Search").fill("it cannot be continued")
    page.get_by_role("option", name="PreviousResponseUnfinished").click()
    expect(page.get_by_role("heading", name="PreviousResponseUnfinished")).to_be_visible()
    assert "/docs/ERRORS.html" in page.url


@pytest.mark.parametrize(("system", "scheme"), [("light", "default"), ("dark", "slate")])
def test_colours_are_those_of_the_system(system: str, scheme: str, visit: OpenPage) -> None:
    page = visit("index.html", color_scheme=system)
    assert page.evaluate(SCHEME) == scheme


def test_reader_chooses_the_colours_of_all_pages(visit: OpenPage) -> None:
    page = visit("index.html", color_scheme="light")
    page.get_by_title("Colours of the system. Switch to light").click()
    page.get_by_title("Light. Switch to dark").click()
    assert page.evaluate(SCHEME) == "slate"
    page.goto((SITE / "docs/START.html").as_uri())
    assert page.evaluate(SCHEME) == "slate"
