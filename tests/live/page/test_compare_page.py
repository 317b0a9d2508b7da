"""The page of a comparison in Chromium: by mouse and by keys, in light and in dark."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from playwright.sync_api import Page, expect

from penstock.extensions.workbench.forced.comparison import Compared, Comparison, Figures
from penstock.extensions.workbench.forced.page import layout_of, page_of
from penstock.extensions.workbench.forced.recorded import recordings_in
from penstock.extensions.workbench.forced.vocabulary import Vocabulary
from penstock.stages.models.harmony.vocabulary import VOCABULARY_SIZE, load_encoding
from tests.support.fixture_cases import run_in_thread
from tests.support.paths import BROWSER
from tests.support.table_engine import TableEngine, recorded_turn, write_turns

ShowFile: TypeAlias = Callable[..., Page]

AXE = BROWSER.parent / "axe-core" / "axe.min.js"


@pytest.fixture
def page_file(tmp_path: Path) -> Path:
    """A page: of four answers, the second and the fourth are changed, and one recording is skipped."""
    was, vocabulary = TableEngine(3), Vocabulary.of(load_encoding(), VOCABULARY_SIZE, "harmony", None)
    for number in range(4):
        prompt = [1000 + number]
        write_turns(tmp_path / "recorded" / f"resp_{number}", recorded_turn(prompt, was.greedy(prompt, 20)))
    (tmp_path / "recorded" / "resp_4").mkdir()
    (tmp_path / "recorded" / "resp_4" / "events.jsonl").write_text('{"type":"Recording","format":2}\n')
    figures, answers = Figures(), list[Compared]()

    async def compare() -> None:
        comparison = Comparison(TableEngine(3, 0.4), vocabulary)
        async for answer in comparison.compared(recordings_in([tmp_path / "recorded"])):
            figures.add(answer)
            answers.append(answer)

    run_in_thread(compare())
    path = tmp_path / "compared.html"
    path.write_text(page_of(layout_of(answers, figures, vocabulary, "recorded → new")), "utf-8")
    return path


def test_each_change_is_reached_by_keys(show_file: ShowFile, page_file: Path) -> None:
    page = show_file(page_file)
    count = page.locator(".token.changed[data-token]").count()
    assert count > 3
    seen = set()
    for _ in range(count):
        page.keyboard.press("n")
        seen.add(page.evaluate("[...document.querySelectorAll('[data-token]')].indexOf(document.activeElement)"))
    assert len(seen) == count
    expect(page.locator("#chosen")).to_contain_text("The new engine chooses otherwise.")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Escape")
    expect(page.locator("#chosen")).to_be_hidden()


def test_pointer_shows_what_the_engine_would_say(show_file: ShowFile, page_file: Path) -> None:
    page = show_file(page_file)
    page.locator(".token.changed[data-token]").first.hover()
    expect(page.locator("#chosen")).to_contain_text("The new engine would write")
    expect(page.locator("#chosen .likely li")).to_have_count(5)


def test_unchanged_answers_can_be_hidden(show_file: ShowFile, page_file: Path) -> None:
    page = show_file(page_file)
    expect(page.locator(".answer:visible")).to_have_count(5)
    page.locator("#only").click()
    expect(page.locator(".answer:visible")).to_have_count(page.locator(".has-changes").count())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1600])
def test_page_is_accessible(scheme: str, width: int, show_file: ShowFile, page_file: Path) -> None:
    page = show_file(page_file, color_scheme=scheme, viewport={"width": width, "height": 900})
    page.evaluate(AXE.read_text("utf-8"))
    for key in ("", "n", "n"):
        if key:
            page.keyboard.press(key)
        found = page.evaluate("axe.run().then(found => found.violations)")
        assert [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
