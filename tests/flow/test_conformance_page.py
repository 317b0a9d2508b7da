"""The page of the site with the checks of ``penstock conformance``."""

from __future__ import annotations

from docs.site.checks import checks_page, shown
from penstock.extensions.workbench.conformance.checks import ALL


def test_page_has_each_check_and_its_rule() -> None:
    lines = [line for line in checks_page().splitlines() if line.startswith("* ")]
    assert len(lines) == len({shown(check) for check in ALL})
    for check in ALL:
        name = f"`{check.name.partition('.')[2]}`"
        assert f"* {f'**{name}**' if check.is_core else name} {check.rule}" in lines


def test_each_rule_is_one_sentence() -> None:
    for check in ALL:
        assert check.rule.endswith(".")
        assert "\n" not in check.rule
        assert check.source
