"""Reports of results: Markdown tables, JSON and a plot.

A run updates the report in its folder: the parts that it leaves out keep their last results.
"""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from tests.bench.figures import Comparison
from tests.bench.goals import HEAD, Goal, figure, row
from tests.bench.measuring import Found
from tests.bench.plot import plot

JSON, PICTURE, PAGE, TABLES = "bench.json", "bench.png", "README.md", "measured.txt"
TITLE = """# What penstock costs, beside vLLM's own Responses frontend

[METHOD.md](METHOD.md) describes how this was measured, [MISSED.md](MISSED.md) why goals are missed, and
[measured.txt](measured.txt) has every table."""


def machine(*, is_quick: bool) -> str:
    names = (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    when, cores = time.strftime("%Y-%m-%d"), len(os.sched_getaffinity(0))
    return (
        f"{when}{', --quick' * is_quick}: {next(names, platform.machine())}, {cores} cores, "
        f"load {os.getloadavg()[1]:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, vLLM {version('vllm')}"
    )


def goals_of(results: dict[str, Found]) -> list[Goal]:
    return sorted((goal for found in results.values() for goal in found.goals), key=lambda goal: int(goal.name[1:]))


def goals_table(results: dict[str, Found]) -> str:
    failed = [f"| | `{name}` failed: {found.failed} |" + " |" * 5 for name, found in results.items() if found.failed]
    return "\n".join([HEAD, *map(row, goals_of(results)), *failed])


NOISE = 0.1
"""The change of a figure that was measured once, as a part of it, which is taken for noise."""


def changes_table(before: dict[str, Found], after: dict[str, Found]) -> str:
    """Return the goals that have changed by more than the noise; empty if none has.

    A goal whose bound is a ratio in one run and a figure in the other is left out.
    If both runs have rounds, a goal has changed if the middle halves of their rounds do not overlap.
    """
    known = {(goal.name, goal.what, goal.beside): goal for goal in goals_of(before)}
    lines = []
    for goal in goals_of(after):
        old = known.get((goal.name, goal.what, goal.beside))
        if old is not None and (old.ratio is None) == (goal.ratio is None) and _has_changed(old, goal):
            share = goal.compared / old.compared - 1
            verdict = "better" if (share > 0) == goal.is_rate else "worse"
            figures = f"{figure(old.compared)} | {figure(goal.compared)} | {share:+.0%} | {verdict}"
            lines.append(f"| {goal.name} | {goal.what} | {figures} |")
    return "\n".join(["| goal | what | before | now | change | |\n|---|---|---|---|---|---|", *lines]) if lines else ""


def _has_changed(old: Goal, new: Goal) -> bool:
    if old.middle is None or new.middle is None:
        return abs(new.compared - old.compared) > NOISE * abs(old.compared)
    return old.middle[1] < new.middle[0] or new.middle[1] < old.middle[0]


def comparison_table(compared: list[Comparison]) -> str:
    head = ["measured"] * bool(compared[0].what) + list(compared[0].load)
    lines = [
        f"| {' | '.join(head)} | ours | spread | {compared[0].beside} | spread | ratio |",
        "|---" * (len(head) + 5) + "|",
    ]
    for found in compared:
        load = [found.what] * bool(found.what) + [f"{value:,g}" for value in found.load.values()]
        sides = [f"{figure(side.median)} | {side.spread:.0%}" for side in (found.ours, found.peer)]
        lines.append(f"| {' | '.join([*load, *sides])} | {found.ratio:.3f} |")
    return "\n".join(lines)


def section(name: str, found: Found) -> str:
    tables = [f"{title}\n\n{comparison_table(compared)}" for title, compared in found.comparisons.items()]
    tables += [f"{title}\n\n{table}" for title, table in found.tables.items()]
    tables += [f"Not all of it was measured: {found.failed}"] * bool(found.failed)
    return "\n\n".join([f"== {name}, {found.where}", *tables])


def document(results: dict[str, Found], changes: str = "") -> str:
    parts = [TITLE, "## Goals", goals_table(results)]
    parts += ["## What has changed since the last release", changes] * bool(changes)
    return "\n\n".join([*parts, f"![What a token costs, and how far the goals are]({PICTURE})"]) + "\n"


def last(folder: Path) -> dict[str, Found]:
    """Read the results of earlier runs; empty if there are none."""
    file = folder / JSON
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Found]) if file.exists() else {}


def keep(results: dict[str, Found], folder: Path, released: dict[str, Found] | None = None) -> dict[str, Found]:
    """Merge new results into those of earlier runs, write all files of the report, and return the merged results.

    The report names the goals that have changed since ``released``.
    """
    merged = last(folder) | results
    (folder / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(merged)) + b"\n")
    (folder / PAGE).write_text(document(merged, changes_table(released or {}, merged)))
    (folder / TABLES).write_text("\n\n\n".join(section(name, found) for name, found in merged.items()) + "\n")
    plot(merged, folder / PICTURE)
    return merged
