"""Links between the pages: each leads to a file that exists, and to a heading of it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from docs.site.gather import CODE, FENCED, LINK, PAGES, anchor
from tests.support.paths import ROOT

HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED = re.compile(r"`((?:[a-z_]+/)*[A-Za-z_]+\.md)`")


@cache
def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub writes them."""
    headings = HEADING.findall(FENCED.sub("", path.read_text()))
    return {anchor(heading) for heading in headings}


def leads_nowhere(page: Path, link: str) -> bool:
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    return not target.exists() or (bool(anchor) and target.suffix == ".md" and anchor not in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(CODE.sub("", FENCED.sub("", page.read_text())))
    assert not [link for link in links if "://" not in link and leads_nowhere(page, link)]


def test_pages_that_the_changelog_names_exist() -> None:
    named = {name for name in NAMED.findall((ROOT / "CHANGELOG.md").read_text()) if "/" in name}
    assert not {name for name in named if not (ROOT / name).exists()}


def test_guide_for_authors_names_what_exists() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    paths = re.findall(
        r"`((?:api|deploy|docs|fixtures|pipeline|stages|tests)(?:/\w+)*(?:\.\w+)?|\w+\.(?:py|md|toml))`", guide
    )
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    named = re.findall(r"`(\w+)`(?: and `(\w+)`)? in\s`([\w/]+\.\w+)`", guide)
    assert named
    assert not [
        (name, path)
        for *names, path in named
        for name in filter(None, names)
        if not re.search(rf"^(?:class |def |async def )?{name}\b", (ROOT / path).read_text(), re.MULTILINE)
    ]
