"""Reports of results: Markdown tables, JSON and a plot.

A run updates the report in its folder: the parts that it leaves out keep their last results, and the medians of each
day stay beside those of other days.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import msgspec

from tests.bench.apis import APIS, CHAT
from tests.bench.beside import AT_A_PACE, SHORT_REQUEST
from tests.bench.figures import BARE, RUST, VLLM, Comparison
from tests.bench.goals import HEAD, Goal, figure, row, table_row
from tests.bench.measuring import PARTS, TOKEN_BUDGET, Found
from tests.bench.plot import plot

RESULTS, DAYS, PICTURE, PAGE, TABLES = "bench.json", "days.json", "bench.png", "README.md", "measured.txt"
TITLE = """# What penstock costs, beside vLLM's servers

[METHOD.md](METHOD.md) describes how this was measured, [EARLIER.md](EARLIER.md) what became of earlier goals, and
[measured.txt](measured.txt) has every table. Lower is better, but for streams in time."""

OURS = "penstock"
OTHERS = {RUST: "vllm-rs", VLLM: "vLLM", BARE: "bare aiohttp"}
"""The other servers, as a table names them."""

MOST_DAYS = 4
"""Days that a page has beside each other."""

Medians: TypeAlias = dict[str, dict[str, float]]
"""The median of each server, by what was measured."""


class Day(msgspec.Struct):
    """The medians of one day, and the machine."""

    where: str = ""
    medians: Medians = {}


def machine(*, is_quick: bool) -> str:
    names = (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    when, cores = time.strftime("%Y-%m-%d"), len(os.sched_getaffinity(0))
    return (
        f"{when}: {next(names, platform.machine())}, {cores} cores, "
        f"load {os.getloadavg()[1]:.1f}, Linux {platform.release()}, "
        f"Python {platform.python_version()}, vLLM {version('vllm')}"
        f"{', --quick' * is_quick}"
    )


def goals_of(results: Mapping[str, Found]) -> list[Goal]:
    return [goal for name in PARTS if name in results for goal in results[name].goals]


def goals_table(results: Mapping[str, Found]) -> str:
    failed = [f"|`{name}` failed: {each.failed}" + "|" * 6 for name, each in results.items() if each.failed]
    return "\n".join([HEAD, *map(row, goals_of(results)), *failed])


def seconds_table(results: Mapping[str, Found]) -> str:
    """Return how long each part took, and all of `PARTS` together."""
    lines = [f"{name:12s}{each.seconds:8.0f} s" for name, each in results.items()]
    whole = sum(each.seconds for name, each in results.items() if name in PARTS)
    return "\n".join([*lines, f"{'the whole':12s}{whole:8.0f} s"])


def medians_of(results: Iterable[Found]) -> Medians:
    """Return the medians of the servers of `OTHERS` and of penstock."""
    medians: Medians = {}
    for found in results:
        for title, compared in found.comparisons.items():
            for each in compared:
                if title == f"Beside {each.beside}":
                    of_servers = medians.setdefault(each.what, {})
                    of_servers[OURS] = each.ours.median
                    of_servers[OTHERS[each.beside]] = each.peer.median
    return medians


def days_table(days: Mapping[str, Day]) -> str:
    """Return penstock's figures for Chat beside those of vllm-rs, for the last days on which both were measured."""
    rust = OTHERS[RUST]
    kept = [when for when in sorted(days) if any(rust in row for row in days[when].medians.values())][-MOST_DAYS:]
    if not kept:
        return "Not measured yet."
    rows = dict.fromkeys(what for when in kept for what in days[when].medians if what.startswith(f"{CHAT}: "))
    heads = (f"{when}, {days[when].where.partition(',')[0]}" for when in kept)
    lines = [table_row("Chat", *heads), "|---" * (1 + len(kept)) + "|"]
    for what in rows:
        cells = (_beside(days[when].medians.get(what, {}), rust) for when in kept)
        lines.append(table_row(what.removeprefix(f"{CHAT}: "), *cells))
    return "\n".join(lines)


def _beside(medians: Mapping[str, float], other: str) -> str:
    if other not in medians:
        return ""
    ours, theirs = medians[OURS], medians[other]
    return f"{figure(ours)}/{figure(theirs)}: {ours / theirs:.2f}"


def apis_table(medians: Medians) -> str:
    """Return what a token and a request of each API cost each server."""
    servers = (OURS, *OTHERS.values())
    lines = [table_row("", *servers), "|---" * (1 + len(servers)) + "|"]
    for what, unit in ((AT_A_PACE, "us a token"), (SHORT_REQUEST, "us a request")):
        for api in APIS:
            if of := medians.get(f"{api}: {what}"):
                cells = (figure(of[name]) if name in of else "" for name in servers)
                lines.append(table_row(f"{api}, {unit}", *cells))
    return "\n".join(lines)


def comparison_table(compared: list[Comparison]) -> str:
    head = ["measured"] * bool(compared[0].what) + list(compared[0].load)
    others = dict.fromkeys(found.beside for found in compared)
    lines = [
        f"| {' | '.join([*head, 'ours', 'spread', ' or '.join(others), 'spread', 'ratio'])} |",
        "|---" * (len(head) + 5) + "|",
    ]
    for found in compared:
        load = [found.what] * bool(found.what) + [f"{value:,g}" for value in found.load.values()]
        sides = [f"{figure(side.median)} | {side.spread:.0%}" for side in (found.ours, found.peer)]
        lines.append(f"| {' | '.join([*load, *sides])} | {found.ratio:.3f} |")
    return "\n".join(lines)


def bound_line(goal: Goal) -> str:
    found, most = (f"{figure(value)} {goal.unit}".rstrip() for value in (goal.ours.median, goal.most or 0.0))
    return f"{goal.what}: {found}, at most {most}: {goal.nearest.verdict}"


def section(name: str, found: Found) -> str:
    tables = [f"{title}\n\n{comparison_table(compared)}" for title, compared in found.comparisons.items()]
    tables += [f"{title}\n\n{table}" for title, table in found.tables.items()]
    tables += ["\n".join(map(bound_line, found.bounds))] * bool(found.bounds)
    tables += [f"Not all of it was measured: {found.failed}"] * bool(found.failed)
    return "\n\n".join([f"== {name}, {found.seconds:.0f} s, {found.where}", *tables])


def document(results: Mapping[str, Found], days: Mapping[str, Day]) -> str:
    medians = medians_of(results.values())
    budget = [found.tables[TOKEN_BUDGET] for found in results.values() if TOKEN_BUDGET in found.tables]
    parts = [TITLE, "## Goals", goals_table(results)]
    parts += ["## Beside vllm-rs, day by day", days_table(days)]
    parts += ["## Each API", apis_table(medians)] * bool(medians)
    parts += [f"## {TOKEN_BUDGET}", *(f"```\n{table}\n```" for table in budget)] * bool(budget)
    return "\n\n".join([*parts, f"![The figures of each goal, and its bound]({PICTURE})"]) + "\n"


def last(folder: Path) -> dict[str, Found]:
    """Read the results of earlier runs; empty if there are none."""
    file = folder / RESULTS
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Found]) if file.exists() else {}


def days_of(folder: Path) -> dict[str, Day]:
    """Read the medians of earlier days; empty if there are none."""
    file = folder / DAYS
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Day]) if file.exists() else {}


def keep(results: dict[str, Found], folder: Path) -> dict[str, Found]:
    """Merge new results into those of earlier runs, write all files of the report, and return the merged results."""
    merged, days = last(folder) | results, days_of(folder)
    for found in results.values():
        when, _, where = found.where.partition(": ")
        day = days.setdefault(when, Day())
        day.where, day.medians = where, day.medians | medians_of([found])
    for name, written in ((RESULTS, merged), (DAYS, days)):
        (folder / name).write_bytes(msgspec.json.format(msgspec.json.encode(written)) + b"\n")
    (folder / PAGE).write_text(document(merged, days))
    (folder / TABLES).write_text("\n\n\n".join(section(name, found) for name, found in merged.items()) + "\n")
    plot(goals_of(merged), folder / PICTURE)
    return merged
