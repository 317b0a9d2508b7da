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

METHOD, MISSED = (Path(__file__).with_name(name) for name in ("METHOD.md", "MISSED.md"))

JSON, PICTURE, PAGE = "bench.json", "bench.png", "README.md"


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
    tables = [f"### {title}\n\n{comparison_table(compared)}" for title, compared in found.comparisons.items()]
    tables += [f"### {title}\n\n```\n{table}\n```" for title, table in found.tables.items()]
    tables += [f"Not all of it was measured: {found.failed}"] * bool(found.failed)
    return "\n\n".join([*tables, f"<sub>`{name}`, {found.where}</sub>"])


def document(results: dict[str, Found]) -> str:
    parts = [METHOD.read_text().rstrip(), "## Goals", goals_table(results)]
    parts += [f"![What a token costs, and how far the goals are]({PICTURE})", MISSED.read_text().rstrip()]
    parts += ["## Everything that was measured"]
    parts += [section(name, found) for name, found in results.items()]
    return "\n\n".join(parts) + "\n"


def last(folder: Path) -> dict[str, Found]:
    """Read the results of earlier runs; empty if there are none."""
    file = folder / JSON
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Found]) if file.exists() else {}


def keep(results: dict[str, Found], folder: Path) -> dict[str, Found]:
    """Merge new results into those of earlier runs, write all files of the report, and return the merged results."""
    merged = last(folder) | results
    (folder / JSON).write_bytes(msgspec.json.format(msgspec.json.encode(merged)) + b"\n")
    (folder / PAGE).write_text(document(merged))
    plot(merged, folder / PICTURE)
    return merged
