"""The plot of results: times as shares of their requests, and the rate of deltas."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.bench.load.result import Distribution, Result


def plot(results: Sequence[Result], file: Path) -> None:
    """Write the plot, with a line for each result."""
    canvas = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    (first, between), (whole, rate) = canvas.subplots(2, 2)
    for result in results:
        _share(first, result.first_token, result.name, "ms to the first token")
        _share(between, result.between_deltas, result.name, "ms between deltas")
        _share(whole, result.whole, result.name, "ms of a request")
        part = result.seconds / len(result.deltas)
        rate.plot([part * (place + 0.5) for place in range(len(result.deltas))], result.deltas, label=result.name)
    rate.set_xlabel("seconds after the first delta")
    rate.set_ylabel("deltas/s")
    rate.set_ylim(bottom=0)
    for axes in (first, between, whole, rate):
        axes.grid(color="#e6e8ea")
        axes.spines[["top", "right"]].set_visible(False)
    canvas.legend(*rate.get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
    canvas.savefig(file)


def _share(axes: Axes, times: Distribution, name: str, unit: str) -> None:
    axes.plot(times.percentiles, range(len(times.percentiles)), label=name)
    axes.set_xscale("symlog", linthresh=1, subs=(2, 5))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel(unit)
    axes.set_ylabel("% at most")
