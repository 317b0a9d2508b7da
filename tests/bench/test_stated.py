"""The measured figures of the pages for users are those that are measured here, or say when they were measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.bench.stated import BENCHED, MEASURED_HERE, STATED
from tests.support.paths import ROOT
from tests.support.stated import IMAGE, Stated

PAGES = (ROOT / "README.md", ROOT / "SECURITY.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").rglob("*.md"))
SIZE = re.compile(r"[\d.,]*\d (?:KB|MB|GB)\b")
"""What is measured has decimal units; most limits have binary ones."""

DAY = re.compile(r"\b20\d\d-\d\d-\d\d\b")
LIMITS = (ROOT / "docs" / "LIMITS.md").read_text()


@pytest.mark.io
@pytest.mark.slow
@pytest.mark.parametrize("name", MEASURED_HERE)
def test_page_states_what_is_measured(name: str) -> None:
    each = STATED[name]
    measured = each.measure()
    assert each.holds(measured), f"{each.page} states {each.stated}, and {measured} is measured"


@pytest.mark.parametrize("name", BENCHED)
def test_page_states_what_the_benchmark_has_measured(name: str) -> None:
    each = STATED[name]
    assert each.holds(each.measure()), f"{each.page} states {each.stated}, and the benchmark has {each.measure()}"


def sections(page: Path) -> list[str]:
    return [" ".join(part.split()) for part in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_size_is_measured_again_or_has_its_day_or_is_a_limit(page: Path) -> None:
    stated = [IMAGE, *(each.text for each in STATED.values() if ROOT / each.page == page)]
    for section in sections(page):
        spans = [found.span() for text in stated for found in re.finditer(text, section)]
        unknown = [
            found[0]
            for found in SIZE.finditer(section)
            if found[0] not in LIMITS and not any(start <= found.start() + 1 < end for start, end in spans)
        ]
        assert unknown == [] or DAY.search(section), section[:80]


def test_figure_that_is_off_by_more_than_the_margin_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("It takes\n1,000 MB.")
    stated = Stated(str(tmp_path / "page.md"), r"takes ([\d,]+) MB", lambda: 0.0, 1e6)
    assert [stated.holds(measured) for measured in (0.85e9, 0.95e9, 1.1e9, 1.2e9)] == [False, True, True, False]


def test_measured_figure_is_written_where_the_page_states_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It needs 3 and\n1,000 MB. A MB is 2.")
    stated = Stated(str(page), r"and ([\d,]*\d) MB", lambda: 0.0, 1e6)
    stated.write(12_345e6)
    assert page.read_text() == "It needs 3 and\n12,000 MB. A MB is 2."
    assert stated.holds(12_345e6)
