"""The figures of a run, as a table and as JSON."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from math import isnan, nan
from typing import Any

import msgspec
import numpy as np
from rich.table import Table

from tests.bench.load.client import CANCELLED, USUAL, Sample
from tests.bench.load.plan import Plan

TICK = 0.01
"""Seconds between two looks at the lag of the event loop."""

BUSY, LATE = 0.85, 20.0
"""Share of a core, and ms of lag (p99), from which the generator falsifies its figures."""

PERCENTS = (50, 90, 99)

CORES, LAG = "cores of the generator", "lag of its loop in ms, p99"


class Result(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    model: str
    when: str
    options: dict[str, Any]
    figures: dict[str, float | None]
    """By their names; rates are per second of the run. None if there is no value."""
    outcomes: dict[str, int]
    """Requests by their outcome: completed, incomplete, cancelled, or an error."""

    @property
    def warning(self) -> str | None:
        """The reason why the times are longer than those of the server; None if they are not."""
        cores, lag = self.figures[CORES] or 0.0, self.figures[LAG] or 0.0
        if cores > BUSY:
            return f"The generator took {cores:.0%} of a core. Run several with fewer streams and a --seed each."
        if lag > LATE:
            return f"Other programs took the generator's core: all times may be {lag:.0f} ms too long (p99)."
        return None


def result(plan: Plan, model: str, samples: Sequence[Sample], seconds: float, generator: Mapping[str, float]) -> Result:
    usages = [usage for sample in samples if (usage := sample.response.get("usage"))]
    timed = [sample for sample in samples if not sample.is_slow]
    ended = [sample for sample in timed if sample.outcome in USUAL and sample.outcome != CANCELLED]
    return Result(
        name=plan.name or plan.url,
        model=model,
        when=time.strftime("%Y-%m-%d %H:%M:%S"),
        options=plan.model_dump(mode="json", exclude={"api_key", "result", "beside"}),
        figures={
            "seconds": seconds,
            "requests": len(samples),
            "requests/s": len(samples) / seconds,
            "output tokens/s": sum(usage["output_tokens"] for usage in usages) / seconds,
            "input tokens/s": sum(usage["input_tokens"] for usage in usages) / seconds,
            "cached input tokens/s": sum(_cached(usage) for usage in usages) / seconds,
            **times("first token", (sample.deltas[0] - sample.begun for sample in timed if sample.deltas)),
            **times("between deltas", (after - at for sample in timed for at, after in pairwise(sample.deltas))),
            **times("of a request", (sample.ended - sample.begun for sample in ended)),
            "read slowly": len(samples) - len(timed),
            **generator,
        },
        outcomes=dict(Counter(sample.outcome for sample in samples)),
    )


def _cached(usage: Mapping[str, Any]) -> int:
    return (usage.get("input_tokens_details") or {}).get("cached_tokens") or 0


def times(name: str, seconds: Iterable[float]) -> dict[str, float]:
    """Return percentiles in milliseconds."""
    values = np.fromiter(seconds, float) * 1e3
    found = np.percentile(values, PERCENTS).tolist() if len(values) else [nan] * len(PERCENTS)
    return {f"ms {name}, p{percent}": value for percent, value in zip(PERCENTS, found, strict=True)}


@asynccontextmanager
async def measured() -> AsyncGenerator[dict[str, float], None]:
    """Measure what the generator itself costs; the figures are filled in at the end of the block."""
    found: dict[str, float] = {}
    lags: list[float] = [0.0]

    async def measure() -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(TICK)
            lags.append(max(0.0, time.perf_counter() - before - TICK))

    measuring, begun, cpu = asyncio.create_task(measure()), time.perf_counter(), time.process_time()
    try:
        yield found
    finally:
        measuring.cancel()
        found[CORES] = (time.process_time() - cpu) / (time.perf_counter() - begun)
        found[LAG] = float(np.percentile(lags, 99)) * 1e3


def table(results: Sequence[Result]) -> Table:
    """Return a table with a column for each result."""
    drawn = Table("", *(result.name for result in results))
    for name in results[0].figures:
        drawn.add_row(name, *(_shown(result.figures.get(name)) for result in results))
    for outcome in sorted({outcome for result in results for outcome in result.outcomes}):
        drawn.add_row(outcome, *(_shown(result.outcomes.get(outcome, 0)) for result in results))
    for column in drawn.columns[1:]:
        column.justify = "right"
    return drawn


def _shown(value: float | None) -> str:
    if value is None or isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.3g}"
