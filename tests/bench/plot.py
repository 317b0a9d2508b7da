"""The plot of all results: the cost of a token, and the distance of each goal from its bound."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from math import isfinite
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from PIL import Image

from tests.bench.figures import Comparison
from tests.bench.goals import Goal
from tests.bench.measuring import IN_PROCESS, SERVERS, Found

OURS, PEER, BOUND, FAINT = "#0b6e4f", "#c8553d", "#222222", "#c9ced3"
SIZE, COLORS = 40, 64


def plot(results: dict[str, Found], file: Path) -> None:
    """Write the plot; parts that were not measured are left out."""
    goals = sorted((goal for found in results.values() for goal in found.goals), key=lambda goal: int(goal.name[1:]))
    under: dict[str, list[Comparison]] = {}
    for found in results.values():
        under |= found.comparisons
    in_process, servers = under.get(IN_PROCESS, []), under.get(SERVERS, [])
    rows = max(len(in_process) + len(servers), len(goals), 6)
    canvas = Canvas(figsize=(13, 1.5 + 0.3 * rows), dpi=110, layout="constrained")
    left, right = canvas.subplots(1, 2)
    _costs(left, [*in_process, *servers], goals)
    _goals(right, goals)
    for axes in (left, right):
        axes.set_visible(bool(axes.get_yticklabels()))
    marks = (left if left.get_visible() else right).get_legend_handles_labels()
    canvas.legend(*marks, loc="outside upper left", ncols=4, frameon=False)
    drawn = BytesIO()
    canvas.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(COLORS).save(file, optimize=True)


def _costs(axes: Axes, costs: list[Comparison], goals: list[Goal]) -> None:
    """Draw the cost per token of each load, and the bounds of the goals that refer to one."""
    ours, peer = [compared.ours.median for compared in costs], [compared.peer.median for compared in costs]
    _pairs(axes, ours, [*peer], [f"{compared.ratio:.3f}" for compared in costs])
    bounds = {
        ours.index(goal.ours): goal.ratio * goal.other
        for goal in goals
        if goal.ours in ours and goal.ratio and goal.other
    }
    axes.scatter([*bounds.values()], [*bounds], s=180, color=BOUND, marker="|", linewidths=2, zorder=4, label="bound")
    _lay_out(axes, [_name(compared.load) for compared in costs], "us of CPU per token (on the right: of vLLM's)")


def _goals(axes: Axes, goals: list[Goal]) -> None:
    ours, peer = [goal.of_bound for goal in goals], [goal.other_of_bound for goal in goals]
    _pairs(axes, ours, peer, [goal.verdict for goal in goals])
    axes.axvline(1.0, color=BOUND, linewidth=1.5, zorder=0.5)
    _lay_out(axes, [f"{goal.name}  {goal.what}" for goal in goals], "parts of the bound: met up to 1")


def _pairs(axes: Axes, ours: list[float], peer: list[float | None], notes: list[str]) -> None:
    others = {place: other for place, other in enumerate(peer) if other is not None and isfinite(other)}
    for place, other in others.items():
        axes.plot([ours[place], other], [place, place], color=FAINT, linewidth=2, zorder=1)
    axes.scatter(ours, range(len(ours)), s=SIZE, color=OURS, zorder=3, label="penstock")
    axes.scatter([*others.values()], [*others], s=SIZE, color=PEER, zorder=3, label="vLLM's own frontend")
    for place, note in enumerate(notes):
        axes.annotate(note, (1.02, place), xycoords=("axes fraction", "data"), va="center", fontsize=8)


def _name(load: Mapping[str, float]) -> str:
    where = f"{load['streams']:g} streams" if "streams" in load else "in process"
    return f"{where}, {load['reasoning']:,g} thoughts, {load['step']:g} per step"


def _lay_out(axes: Axes, names: list[str], unit: str) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel(unit, fontsize=9)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.grid(axis="x", color="#e6e8ea", zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
