"""A real browser, and pages of recordings in it (`make test-page`).

A test fails if a page that it opened writes to the console, raises an error or sends a request to the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from penstock.extensions.workbench.page.page import layout_of, page_of
from penstock.stages.models.harmony.vocabulary import HarmonyEncoding, load_encoding
from tests.support.browser_pages import Pages
from tests.support.fixture_cases import timeline_at
from tests.support.paths import BROWSER
from tests.support.processes import PATIENCE

MILLISECONDS = 1000.0 * PATIENCE

ShowPage: TypeAlias = Callable[..., Page]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--browser", help="a Chromium; the one that npm brought if none is named")
    parser.addoption("--screenshot", type=Path, help="where to write the picture of the README")


@pytest.fixture(scope="session")
def browser(request: pytest.FixtureRequest) -> Generator[Browser, None, None]:
    named = request.config.getoption("--browser")
    environment = dict(os.environ)
    if not named:
        environment["LD_LIBRARY_PATH"] = str(BROWSER / "lib")
        if not Path("/etc/fonts").is_dir():
            environment["FONTCONFIG_PATH"] = str(BROWSER)
    with sync_playwright() as playwright:
        program = named or str(BROWSER / "chromium")
        expect.set_options(timeout=MILLISECONDS)
        browser = playwright.chromium.launch(
            executable_path=program,
            env=dict(environment),
            timeout=MILLISECONDS,
            args=["--host-resolver-rules=MAP rebound.example 127.0.0.1"],  # as DNS rebinding does
        )
        yield browser
        browser.close()


@pytest.fixture
def complaints() -> list[str]:
    return []


@pytest.fixture
def show(show_file: ShowPage, tmp_path: Path) -> ShowPage:
    """A function that opens the page of the recording in a folder; its options go to the browser's context."""

    def opened(folder: Path, name: str = "", **options: Any) -> Page:
        path = tmp_path / "page.html"
        path.write_text(page_of(layout_of(timeline_at(folder), name or folder.name)), "utf-8")
        return show_file(path, **options)

    return opened


@pytest.fixture
def show_file(browser: Browser, complaints: list[str]) -> Generator[ShowPage, None, None]:
    """A function that opens a page; its options go to the browser's context."""
    requested: list[str] = []
    with ExitStack() as closing:

        def opened(path: Path, **options: Any) -> Page:
            context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}, **options})
            closing.callback(context.close)
            context.set_default_timeout(MILLISECONDS)
            page = context.new_page()
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: requested.append(request.url))
            page.goto(path.as_uri())
            assert requested.pop() == path.as_uri()
            return page

        yield opened
    assert not complaints
    assert not requested


@pytest.fixture
def pages(browser: Browser) -> Generator[Pages, None, None]:
    pages = Pages(browser)
    yield pages
    for context in pages.contexts:
        context.close()
    assert not pages.complaints
    assert not [url for url in pages.outside if not url.startswith(("http://127.0.0.1:", "data:"))]


@pytest.fixture(scope="session")
def encoding() -> HarmonyEncoding:
    return load_encoding()
