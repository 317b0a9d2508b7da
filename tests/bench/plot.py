"""The plot of the goals: penstock's figure, the best peer's and the limit's, as parts of what the goal allows."""

from __future__ import annotations

from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from PIL import Image

from tests.bench.goals import Goal

COLOR = {"penstock": "#0b6e4f", "the best peer": "#c8553d", "the limit": "#8a929a"}
BOUND, FAINT = "#222222", "#c9ced3"
SIZE, COLORS = 40, 64


def plot(goals: Iterable[Goal], file: Path) -> None:
    """Write the plot."""
    every = list(goals)
    canvas = Canvas(figsize=(11, 1.5 + 0.35 * max(len(every), 4)), dpi=110, layout="constrained")
    axes = canvas.subplots()
    _draw(axes, every)
    marks, names = axes.get_legend_handles_labels()
    canvas.legend(
        dict(zip(names, marks, strict=True)).values(),
        dict.fromkeys(names),
        loc="outside upper left",
        ncols=3,
        frameon=False,
    )
    drawn = BytesIO()
    canvas.savefig(drawn)
    Image.open(drawn).convert("RGB").quantize(COLORS).save(file, optimize=True)


def _draw(axes: Axes, goals: list[Goal]) -> None:
    for at, goal in enumerate(goals):
        parts = {"penstock": goal.ours.median}
        parts |= {} if goal.peer is None else {"the best peer": goal.peer.peer.median}
        parts |= {} if goal.limit is None else {"the limit": goal.limit.peer.median}
        shown = [part / goal.allowed for part in parts.values()]
        axes.plot([min(shown), max(shown)], [at, at], color=FAINT, linewidth=2, zorder=1)
        for name, part in zip(parts, shown, strict=True):
            axes.scatter(part, at, s=SIZE, color=COLOR[name], zorder=3, label=name)
        axes.annotate(goal.nearest.verdict, (1.02, at), xycoords=("axes fraction", "data"), va="center", fontsize=8)
    axes.axvline(1.0, color=BOUND, linewidth=1.5, zorder=0.5)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    axes.set_xlabel("parts of what the goal allows: met up to 1", fontsize=9)
    axes.set_yticks(range(len(goals)), [goal.what for goal in goals], fontsize=8)
    axes.invert_yaxis()
    axes.grid(axis="x", color="#e6e8ea", zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
