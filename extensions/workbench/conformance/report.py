"""The report of a run, in the terminal and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.extensions.workbench.conformance.check import Verdict
from penstock.extensions.workbench.conformance.client import ADVICE
from penstock.extensions.workbench.conformance.run import Outcome
from penstock.pipeline.logs import counted

STYLES: Mapping[Verdict, str] = {"pass": "green", "warn": "yellow", "skip": "dim", "fail": "bold red"}
UNRECORDED = "This server answers from recordings: these checks say little (not_recorded)."
"""The explanation of checks that failed because the server had no recording for their requests."""
WIDE = 100
"""The width in columns at which the reason stands beside the name instead of below it."""


def counts(outcomes: Iterable[Outcome]) -> dict[Verdict, int]:
    """Return the number of checks of each verdict."""
    found = Counter(outcome.verdict for outcome in outcomes)
    return {verdict: found[verdict] for verdict in STYLES}


def summary(outcomes: Iterable[Outcome]) -> str:
    """Return the counts in words."""
    return ", ".join(f"{number} {verdict}" for verdict, number in counts(outcomes).items())


def show(console: Console, outcomes: Sequence[Outcome], *, full: bool) -> None:
    """Print the outcomes by dialect and area; those that pass are counted, unless ``full``."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.check.speech, outcome.check.area), []).append(outcome)
    for (speech, area), members in groups.items():
        console.print(Text.assemble((f"{speech}, {area}", "bold"), f"  {summary(members)}"))
        for outcome in members:
            if full or outcome.verdict in ("warn", "fail"):
                console.print(_row(outcome, wide=console.width >= WIDE))
        reasons = {each.reason for each in members if each.verdict == "skip" and not each.is_limited}
        if skipped := sorted(reasons) if not full else []:
            console.print(Text(f"  skip  {'; '.join(skipped)}"[: 2 * console.width], "dim"))
    if limited := sum(outcome.is_limited for outcome in outcomes):
        console.print(Text(f"{counted(limited, 'check')} could not tell: {ADVICE}", STYLES["warn"]))
    console.print(Text(summary(outcomes), "bold"))
    if any(outcome.is_unrecorded for outcome in outcomes):
        console.print(Text(UNRECORDED, STYLES["warn"]))


def _row(outcome: Outcome, *, wide: bool) -> RenderableType:
    name = Text(outcome.check.name.partition(".")[2])
    lines = [Text(outcome.reason or outcome.check.rule)]
    if outcome.verdict == "fail":
        lines.insert(0, Text(outcome.check.rule, "dim"))
        lines.append(Text(f"({outcome.check.source})", "dim"))
        lines += [Text(f"{arrow} {text}", "dim") for arrow, text in ((">", outcome.sent), ("<", outcome.came)) if text]
    grid = Table.grid(padding=(0, 2), expand=False)
    cells: list[RenderableType] = [Text(""), Text(outcome.verdict, STYLES[outcome.verdict])]
    cells += [name, Group(*lines)] if wide else [Group(name, *lines)]
    grid.add_column(width=0)
    grid.add_column(width=4)
    if wide:
        grid.add_column(width=24)
    grid.add_column(overflow="fold")
    grid.add_row(*cells)
    return grid


def as_json(server: Mapping[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the report as JSON."""
    return {
        **server,
        "counts": counts(outcomes),
        "checks": [
            {
                "name": outcome.check.name,
                "area": outcome.check.area,
                "rule": outcome.check.rule,
                "source": outcome.check.source,
                "core": outcome.check.is_core,
                "verdict": outcome.verdict,
                "reason": outcome.reason,
                "sent": outcome.sent,
                "came": outcome.came,
                "seconds": round(outcome.seconds, 3),
            }
            for outcome in outcomes
        ],
    }
