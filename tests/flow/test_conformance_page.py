"""`docs/CONFORMANCE.md`, whose table is made from the checks; ``--regen`` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import pytest

from penstock.extensions.workbench.conformance.badge import NAMES
from penstock.extensions.workbench.conformance.check import Check
from penstock.extensions.workbench.conformance.checks import ALL
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "CONFORMANCE.md"
MARK = "<!-- checks -->\n"


HEAD = "A name in bold is part of the core. A report names the source of each rule that is broken.\n"

Shown = tuple[str, str, bool, str]
"""The name of a check without its API, its rule, whether it is core, and its area: what several APIs may share."""


def shown(check: Check) -> Shown:
    return check.name.partition(".")[2], check.rule, check.is_core, check.area


def lines() -> Iterator[str]:
    yield HEAD
    groups: dict[str, list[Shown]] = {}
    for each in dict.fromkeys(map(shown, ALL)):
        groups.setdefault(", ".join(NAMES[check.speech] for check in ALL if shown(check) == each), []).append(each)
    for title, found in groups.items():
        yield from (f"### {title}", "")
        for area, rules in groupby(found, lambda each: each[3]):
            yield from (f"`{area}`:", "")
            yield from (f"* {f'**`{name}`**' if is_core else f'`{name}`'} {rule}" for name, rule, is_core, _ in rules)
            yield ""


def test_page_lists_the_checks(pytestconfig: pytest.Config) -> None:
    page = PAGE.read_text().partition(MARK)[0] + MARK + "\n" + "\n".join(lines())
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(page)
    assert PAGE.read_text() == page


def test_each_rule_is_one_sentence() -> None:
    for check in ALL:
        assert check.rule.endswith(".")
        assert "\n" not in check.rule
        assert check.source
