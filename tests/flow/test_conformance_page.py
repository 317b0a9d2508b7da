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


SOURCES = list(dict.fromkeys(check.source for check in ALL))
HEAD = "A name in bold is part of the core. The numbers stand for these sources:\n"

Shown = tuple[str, str, bool, str]
"""The name of a check without its API, its rule, whether it is core, and its area: what several APIs may share."""


def shown(check: Check) -> Shown:
    return check.name.partition(".")[2], check.rule, check.is_core, check.area


def lines() -> Iterator[str]:
    yield from (HEAD, *(f"{number}. {source}" for number, source in enumerate(SOURCES, 1)), "")
    groups: dict[str, dict[Shown, str]] = {}
    for each, checks in ((each, [check for check in ALL if shown(check) == each]) for each in map(shown, ALL)):
        title = ", ".join(NAMES[check.speech] for check in checks)
        numbers = dict.fromkeys(str(SOURCES.index(check.source) + 1) for check in checks)
        groups.setdefault(title, {})[each] = ", ".join(numbers)
    for title, found in groups.items():
        yield from (f"### {title}", "")
        for area, rules in groupby(found.items(), lambda item: item[0][3]):
            yield from (f"Area `{area}`:", "")
            for (name, rule, is_core, _), numbers in rules:
                yield f"* {f'**`{name}`**' if is_core else f'`{name}`'} {rule.removesuffix('.')} ({numbers})."
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
