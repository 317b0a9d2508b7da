"""What a run found, for people and for programs: tables, JSON and a plot."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

import msgspec

from tests.bench.figures import Comparison
from tests.bench.goals import HEAD, row
from tests.bench.measuring import Found

METHOD = Path(__file__).with_name("METHOD.md")


def machine() -> str:
    """What it ran on, and when."""
    names = (line.partition(": ")[2] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line)
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[1]
    when = time.strftime("%Y-%m-%d")
    return f"{when}, Python {platform.python_version()}, {next(names, 'x')}, {cores} cores, load {load:.1f}"


def goals_table(found: Found) -> str:
    """The goals, as Markdown."""
    return "\n".join([HEAD, *map(row, found.goals)])


def comparison_table(name: str, compared: list[Comparison]) -> str:
    """Everything that was compared under a name, as Markdown."""
    loads = list(compared[0].load)
    lines = [f"| {' | '.join(loads)} | ours | spread | vLLM's | spread | ratio |", "|---" * (len(loads) + 5) + "|"]
    for found in compared:
        load = " | ".join(f"{value:,g}" for value in found.load.values())
        peer = f"{found.peer.median:.2f} | {found.peer.spread:.0%}"
        lines.append(f"| {load} | {found.ours.median:.2f} | {found.ours.spread:.0%} | {peer} | {found.ratio:.3f} |")
    return f"### {name}\n\n" + "\n".join(lines)


def document(found: Found) -> str:
    """All tables, with how they came about."""
    parts = [METHOD.read_text().rstrip(), f"## Last run\n\n{machine()}", goals_table(found)]
    parts += [comparison_table(name, compared) for name, compared in found.comparisons.items()]
    parts += [f"### {name}\n\n```\n{table}\n```" for name, table in found.tables.items()]
    return "\n\n".join(parts) + "\n"


def write(found: Found, folder: Path) -> None:
    """``bench.json`` into the folder."""
    written = {"machine": machine(), **msgspec.to_builtins(found)}
    (folder / "bench.json").write_bytes(msgspec.json.format(msgspec.json.encode(written)))
