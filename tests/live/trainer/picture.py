"""The picture of a training: ``python -m tests.live.trainer.picture STEPS PICTURE``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

COLORS = {"trained": "#0b6e4f", "shuffled": "#c8553d"}
LABELS = {"trained": "rewards of the sessions", "shuffled": "the same, shuffled among the sessions"}


def draw(steps: Path, picture: Path) -> None:
    """Draw the mean reward of each batch, with its standard error."""
    mpl.rcParams["svg.hashsalt"] = "penstock"  # the same numbers give the same file
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    for run, found in json.loads(steps.read_text()).items():
        means = [sum(step["rewards"]) / len(step["rewards"]) for step in found]
        errors = [(mean * (1 - mean) / len(found[0]["rewards"])) ** 0.5 for mean in means]
        low, high = ([mean + sign * error for mean, error in zip(means, errors, strict=True)] for sign in (-1, 1))
        axes.fill_between(range(len(means)), low, high, color=COLORS[run], alpha=0.2, linewidth=0)
        axes.plot(means, color=COLORS[run], marker="o", markersize=3, label=LABELS[run])
    axes.set(xlabel=f"batch of {len(found[0]['rewards'])} sessions", ylabel="mean reward", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(picture, metadata={"Date": None})


if __name__ == "__main__":
    draw(*map(Path, sys.argv[1:]))
