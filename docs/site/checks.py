"""The page of the checks of ``penstock conformance``, made from the checks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from penstock.extensions.workbench.conformance.badge import NAMES
from penstock.extensions.workbench.conformance.check import Check
from penstock.extensions.workbench.conformance.checks import ALL

HEAD = """# Checks of conformance

[Conformance](CONFORMANCE.md) says how to run them. A name in bold is part of the core. A report names the source of
each rule that is broken.
"""

Shown = tuple[str, str, bool, str]
"""The name of a check without its API, its rule, whether it is core, and its area: what several APIs may share."""


def shown(check: Check) -> Shown:
    """Return what the page has of a check."""
    return check.name.partition(".")[2], check.rule, check.is_core, check.area


def checks_page() -> str:
    """Return the page."""
    return "\n".join((HEAD, *_lines()))


def _lines() -> Iterator[str]:
    groups: dict[str, list[Shown]] = {}
    for each in dict.fromkeys(map(shown, ALL)):
        groups.setdefault(", ".join(NAMES[check.speech] for check in ALL if shown(check) == each), []).append(each)
    for title, found in groups.items():
        yield from (f"## {title}", "")
        for area, rules in groupby(found, lambda each: each[3]):
            yield from (f"`{area}`:", "")
            yield from (f"* {f'**`{name}`**' if is_core else f'`{name}`'} {rule}" for name, rule, is_core, _ in rules)
            yield ""
