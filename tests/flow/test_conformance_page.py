"""`docs/CONFORMANCE.md`, whose table is made from the checks; ``--regen`` writes it."""

from __future__ import annotations

from itertools import groupby

import pytest

from penstock.extensions.workbench.conformance.badge import NAMES
from penstock.extensions.workbench.conformance.check import Check
from penstock.extensions.workbench.conformance.checks import ALL
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "CONFORMANCE.md"
MARK = "<!-- checks -->\n"


def row(check: Check) -> str:
    core = "core" if check.is_core else ""
    return f"| `{check.name.partition('.')[2]}` | {check.area} | {check.rule} | {core} | {check.source} |"


def test_page_lists_the_checks(pytestconfig: pytest.Config) -> None:
    lines = []
    for speech, checks in groupby(ALL, lambda check: check.speech):
        lines += [f"### {NAMES[speech]}", "", "| check | area | rule | | source |", "|---|---|---|---|---|"]
        lines += [*map(row, checks), ""]
    page = PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines)
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def test_each_rule_is_one_sentence() -> None:
    for check in ALL:
        assert check.rule.endswith(".")
        assert "\n" not in check.rule
        assert check.source
