"""The pages of penstock share one head, one style and the beginning of one script."""

from __future__ import annotations

import re

import pytest

from penstock.api.http.front import front
from penstock.api.http.web_page import SHARED, WebPage, part_of
from penstock.extensions.workbench.forced import page as forced
from penstock.extensions.workbench.live import page as live
from penstock.extensions.workbench.page import page as inspected

PAGES = {module.__name__.split(".")[-2]: module.PAGE for module in (front, live, inspected, forced)}
COLOUR = re.compile(r"#[0-9a-f]{3,8}\b(?![^{]*\{)|\b(?:rgb|hsl)a?\(", re.IGNORECASE)


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_colours_are_those_of_all_pages(page: WebPage) -> None:
    shared = part_of(SHARED, "page.css")
    assert COLOUR.search(shared)
    assert page.style.startswith(shared)
    assert not COLOUR.findall(page.style.removeprefix(shared))
    defined = set(re.findall(r"(--[\w-]+):", page.style))
    assert set(re.findall(r"var\((--[\w-]+)", page.style)) <= defined


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_element_that_a_script_names_is_on_its_page(page: WebPage) -> None:
    html = page.html("a page")
    named = set(re.findall(r"""\$\(["']([\w-]+)["']\)""", page.script))
    made = set(re.findall(r"""\bid: ["']([\w-]+)["']""", page.script)) | {"to-stages"}
    assert named - made <= set(re.findall(r'\bid="([\w-]+)"', html))


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_page_takes_nothing_from_elsewhere(page: WebPage) -> None:
    html = page.html("a page")
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|url\(|@import""", html)
    assert "default-src 'none'" in page.policy
