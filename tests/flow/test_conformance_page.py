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


SOURCES = list(dict.fromkeys(check.source for check in ALL))
HEAD = "A name in bold is part of the core. The numbers stand for these sources:\n"


def line(check: Check) -> str:
    name, source = check.name.partition(".")[2], SOURCES.index(check.source) + 1
    return f"* {f'**`{name}`**' if check.is_core else f'`{name}`'} {check.rule.removesuffix('.')} ({source})."


def test_page_lists_the_checks(pytestconfig: pytest.Config) -> None:
    lines = [HEAD, *(f"{number}. {source}" for number, source in enumerate(SOURCES, 1)), ""]
    for speech, checks in groupby(ALL, lambda check: check.speech):
        lines += [f"### {NAMES[speech]}", ""]
        for area, found in groupby(checks, lambda check: check.area):
            lines += [f"Area `{area}`:", "", *map(line, found), ""]
    page = PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines)
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def test_each_rule_is_one_sentence() -> None:
    for check in ALL:
        assert check.rule.endswith(".")
        assert "\n" not in check.rule
        assert check.source
