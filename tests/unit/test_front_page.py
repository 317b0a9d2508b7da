"""The README, and the pages of its four doors: they stay short, lead to every page, and name what there is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from docs.site.gather import LINK
from penstock.api.cli.__main__ import COMMANDS
from penstock.pipeline import plugins
from tests.support.paths import ROOT

README = (ROOT / "README.md").read_text()
COMPARE = (ROOT / "docs/COMPARE.md").read_text()
PLUGINS = (ROOT / "docs/PLUGINS.md").read_text()
DOORS = re.findall(r"^\* \*\*\[[\w ]+\]\((docs/\w+\.md)\)\*\*", README, re.MULTILINE)
LONGEST, LONGEST_DOOR = 110, 40
"""Lines of the README, and of a page of a door: one screen."""


def linked(page: Path) -> set[str]:
    """Return the pages to which a page leads, by their paths in the repository."""
    targets = (page.parent / link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link)
    return {str(target.resolve().relative_to(ROOT)) for target in targets if target.suffix == ".md"}


def failed(server: str) -> tuple[int, int]:
    """Return how many checks fail of a server, and how many there are, over all APIs in the table of the comparison."""
    head = re.search(r"^\| server \| (.*Responses.*) \|$", COMPARE, re.MULTILINE)
    row = re.search(rf"^\| {re.escape(server)} \| (.*) \|$", COMPARE, re.MULTILINE)
    assert head
    assert row
    checks = [int(number) for number in re.findall(r", (\d+)", head[1])]
    verdicts = [[int(number) for number in cell.split("/")] for cell in row[1].split(" | ")]
    assert [sum(each) for each in verdicts] == checks
    return sum(each[-1] for each in verdicts), sum(checks)


def test_readme_and_the_pages_of_its_doors_fit_a_screen() -> None:
    assert len(README.splitlines()) <= LONGEST
    assert len(DOORS) == 4
    assert not [door for door in DOORS if len((ROOT / door).read_text().splitlines()) > LONGEST_DOOR]


def test_readme_has_the_figures_of_the_comparison() -> None:
    own, checks = failed("penstock, tiny gpt-oss or tiny Qwen")
    [[release, theirs]] = re.findall(r"^\| vLLM ([\d.]+), tiny Qwen \| (.*) \|$", COMPARE, re.MULTILINE)
    assert theirs
    others, _ = failed(f"vLLM {release}, tiny Qwen")
    assert own == 0
    assert f"`vllm serve` {release}" in README
    assert f"that fail | none of {checks} | {others} of {checks} |" in README


def test_every_page_for_users_is_behind_the_readme_or_a_door() -> None:
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    behind = linked(ROOT / "README.md").union(*(linked(ROOT / door) for door in DOORS))
    assert not pages - behind


@pytest.mark.parametrize("door", DOORS)
def test_door_begins_with_what_its_reader_does_first_and_opens_a_tab_of_the_site(door: str) -> None:
    title, text, *_ = (ROOT / door).read_text().split("\n\n")
    assert text.startswith("```")
    config = yaml.safe_load((ROOT / "docs/site/mkdocs.yml").read_text())
    assert {title.removeprefix("# "): door} in [entries[0] for section in config["nav"] for entries in section.values()]


def test_page_of_plug_ins_has_every_group() -> None:
    named = {
        str(value) for name, value in vars(plugins).items() if name.isupper() and str(value).startswith("penstock.")
    }
    used = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    groups = {*named, COMMANDS, *(group for group in used if group.startswith("penstock."))}
    assert set(re.findall(r"^\| `(penstock\.\w+)` \|", PLUGINS, re.MULTILINE)) == groups
