"""The page of what was used in Chromium, on a server in this process whose ledger has a month of three keys."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from penstock.api.http.auth import Keys
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.use import Use
from tests.support.browser_pages import Pages, accessible, in_own_thread
from tests.support.live_server import KEY, live_server
from tests.support.processes import DAY, PATIENCE, wait_for_midnight
from tests.support.server import Server, script

DAYS = 30
HOSTILE = "<img src=x onerror=\"document.title = 'run'\"> {{script}}"
PICTURED = {"ci": "infra", "notebook": "research", "web": "infra", "agents": "research"}
NAMES = {"ci": "infra", "notebook": "research", "web": "infra", HOSTILE: ""}
FILE = """
[prices."big*"]
input = 1
cached = 0.1
output = 4

[prices.small]
input = 0.1
output = 0.4

[budgets.key.ci]
month-money = 1_000

[budgets.team.infra]
day-tokens = 1_000

[budgets.all]
month-money = 100_000
"""


def uses(now: float, names: Mapping[str, str] = NAMES) -> Iterator[Use]:
    """A use of each key on each day: the first one uses the most."""
    for before in range(DAYS):
        for number, (name, team) in enumerate(names.items()):
            yield Use(
                id=f"resp_{before}_{number}",
                owner=f"{number}" * 64,
                key_name=name,
                team=team,
                model=("big-model", "small")[number % 2],
                api=("responses", "chat")[number % 2],
                at=now - DAY * before,
                input_tokens=(9_000_000 - 1_000_000 * number) // (1 + before % 7),
                cached_tokens=100_000 * number,
                output_tokens=500_000 // (1 + number),
                reasoning_tokens=1_000 * number,
            )


@contextmanager
def served(
    folder: Path, *, has_file: bool = True, names: Mapping[str, str] = NAMES, **options: Any
) -> Iterator[Server[ScriptedEngine]]:
    wait_for_midnight(within=120)
    (folder / "accounts.toml").write_text(FILE)
    changes = {"accounts": folder / "accounts.toml"} if has_file else {}
    options.setdefault("keys", Keys(given=["a-key-of-sixteen-or-more name=ci team=infra"], operator=KEY))
    engine, resources = ScriptedEngine(script()), ("accounts", "live")
    opened = live_server(engine, folder, resources=resources, changes=changes, **options)
    with in_own_thread(opened) as (loop, server):

        async def note() -> None:
            await asyncio.gather(*filter(None, [server.store.used(use) for use in uses(time.time(), names)]))

        asyncio.run_coroutine_threadsafe(note(), loop).result(PATIENCE)
        yield server


@pytest.fixture
def url(tmp_path: Path) -> Generator[str, None, None]:
    with served(tmp_path) as server:
        yield f"{server.url}/usage"


def cells(page: Page, table: str) -> list[list[str]]:
    """The texts of the rows of a table."""
    return [row.locator("th, td").all_inner_texts() for row in page.locator(f"#{table} tr").all()]


def test_amounts_stand_as_a_plot_and_as_tables(url: str, pages: Pages) -> None:
    page = pages.open(url)
    expect(page.locator("#plot-title")).to_have_text("Cost by day")
    expect(page.locator("#plot .bar-part")).to_have_count(DAYS * len(NAMES))
    rows = cells(page, "groups")
    assert [row[0] for row in rows] == ["ci", "web", "notebook", HOSTILE]
    everything = [*uses(0)]
    (total,) = cells(page, "groups-sum")
    assert total[1] == str(len(everything))
    assert total[2] == f"{sum(use.input_tokens for use in everything):,}"
    assert total[4] == f"{sum(use.output_tokens for use in everything):,}"
    ci = [use for use in everything if use.key_name == "ci"]
    cost = sum(use.input_tokens + 4 * use.output_tokens for use in ci) / 1_000_000
    assert rows[0][6] == f"{cost:,.2f} USD"
    expect(page.locator("#totals")).to_contain_text(total[6])
    assert len(cells(page, "day-rows")) == DAYS
    assert page.title() == "usage · penstock"


@pytest.mark.parametrize(
    ("by", "names"),
    [("team", ["infra", "research", "no team"]), ("model", ["big-model", "small"]), ("api", ["responses", "chat"])],
)
def test_amounts_are_grouped_by_what_the_reader_chooses(url: str, pages: Pages, by: str, names: list[str]) -> None:
    page = pages.open(url)
    expect(page.locator("#groups tr")).to_have_count(len(NAMES))
    page.select_option("#by", by)
    expect(page.locator("#groups tr")).to_have_count(len(names))
    assert [row[0] for row in cells(page, "groups")] == names
    page.select_option("#measure", "requests")
    expect(page.locator("#plot-title")).to_have_text("Requests by day")
    page.select_option("#days", "7")
    expect(page.locator("#day-rows tr")).to_have_count(7)
    assert int(cells(page, "groups-sum")[0][1]) == 7 * len(NAMES)


def test_keys_choose_a_day(url: str, pages: Pages) -> None:
    page = pages.open(url)
    plot = page.locator("#plot")
    expect(page.locator("#groups tr")).to_have_count(len(NAMES))
    plot.focus()
    page.keyboard.press("ArrowLeft")
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    expect(page.locator("#groups-title")).to_have_text(f"By key, {today}")
    assert cells(page, "groups-sum")[0][1] == str(len(NAMES))
    assert (plot.get_attribute("aria-valuetext") or "").startswith(f"{today}: ")
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(plot).to_have_attribute("aria-valuenow", "2")
    page.keyboard.press("Escape")
    expect(page.locator("#whole")).to_be_hidden()
    box = plot.bounding_box()
    assert box
    plot.click(position={"x": box["width"] / 2, "y": 100})
    expect(page.locator("#whole")).to_be_visible()
    page.locator("#whole").click()
    expect(page.locator("#groups-title")).to_contain_text(" to ")
    background = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(background)
    page.keyboard.press("d")
    assert page.evaluate(background) != before


def test_budgets_show_how_full_they_are(url: str, pages: Pages) -> None:
    page = pages.open(url)
    expect(page.locator("#budgets tr")).to_have_count(3)
    everybody, infra, ci = cells(page, "budgets")
    assert (everybody[0], infra[0], ci[0]) == ("all keys", "team infra", "key ci")
    assert (infra[2], ci[2]) == ("1,000 tokens a day", "1,000.00 USD a month")
    assert infra[3].strip().endswith(" %")
    assert int(infra[3].split()[0]) > 100
    expect(page.locator("#budgets .over")).to_have_count(1)


def test_page_without_prices_shows_tokens(tmp_path: Path, pages: Pages) -> None:
    with served(tmp_path, has_file=False) as server:
        page = pages.open(f"{server.url}/usage")
        expect(page.locator("#plot-title")).to_have_text("Tokens by day")
        expect(page.locator("#budgets-part")).to_be_hidden()
        expect(page.locator("#groups-head th")).to_have_count(6)


def test_page_asks_for_the_key_of_the_operator(url: str, pages: Pages) -> None:
    page = pages.open(url, "not-the-key-of-the-operator")
    expect(page.locator("#lock-problem")).to_have_text("This is not the operator's key.")
    expect(page.locator("#usage")).to_be_hidden()
    page.fill("#key", KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#groups tr")).to_have_count(len(NAMES))
    page.click("text=live")  # the tab has kept the key
    expect(page.locator("#composer")).to_be_visible()
    page.click(".tools >> text=usage")
    expect(page.locator("#groups tr")).to_have_count(len(NAMES))


def test_page_of_a_server_without_a_key_of_the_operator_says_so(tmp_path: Path, pages: Pages) -> None:
    with served(tmp_path, is_on=False, keys=Keys()) as server:
        page = pages.open(f"{server.url}/usage")
        expect(page.locator("#lock-problem")).to_contain_text("PENSTOCK_OPERATOR_KEY")
        expect(page.locator("#ask")).to_be_hidden()


def test_problem_of_the_store_leaves_what_is_shown(url: str, pages: Pages) -> None:
    page = pages.open(url)
    expect(page.locator("#groups tr")).to_have_count(len(NAMES))

    def refuse(route: Route) -> None:
        route.fulfill(status=503, json={"error": {"message": "The store cannot be read."}})

    page.route("**/usage/data?*", refuse)
    page.select_option("#by", "team")
    expect(page.locator("#problem")).to_have_text("The store cannot be read.")
    expect(page.locator("#groups tr")).to_have_count(len(NAMES))


@pytest.mark.parametrize(("scheme", "width"), [("light", 1440), ("dark", 1440), ("light", 390), ("dark", 390)])
def test_page_is_accessible_and_fits(url: str, pages: Pages, scheme: Any, width: int) -> None:
    page = pages.open(url, color_scheme=scheme, viewport={"width": width, "height": 900})
    expect(page.locator("#groups tr")).to_have_count(len(NAMES))
    page.locator("#by-day summary").click()
    accessible(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_picture_of_the_page_is_taken(
    pages: Pages, scheme: Any, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """With ``--screenshot``, the pictures are kept beside that path, for the page about it."""
    wanted = request.config.getoption("--screenshot")
    path = (wanted.parent if wanted else tmp_path) / f"usage_{scheme}.png"
    with served(tmp_path, names=PICTURED) as server:
        page = pages.open(f"{server.url}/usage", color_scheme=scheme, viewport={"width": 1440, "height": 800})
        expect(page.locator("#groups tr")).to_have_count(len(PICTURED))
        page.screenshot(path=path)
    assert 20_000 < path.stat().st_size < 300_000
