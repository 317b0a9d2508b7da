"""The result of a run: its figures, as a table and as JSON."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import isnan
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
from rich.table import Table

from tests.bench.load.client import CANCELLED, Sample
from tests.bench.load.plan import Plan
from tests.bench.load.running import Meter

BUSY, LATE = 0.85, 20.0
"""Share of a core, and ms of lag (p99), from which the generator falsifies its figures."""

MORE = "Use several at once, each with its own --seed and fewer streams."
ELSEWHERE = "Run it on another machine, or count these ms as an error of all times."


class Distribution(msgspec.Struct, frozen=True):
    """Values in milliseconds."""

    count: int
    mean: float | None
    percentiles: list[float]
    """From the least value (0 %) to the greatest (100 %)."""

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Self:
        values = np.fromiter(seconds, float) * 1e3
        if not len(values):
            return cls(0, None, [])
        return cls(len(values), float(values.mean()), np.percentile(values, range(101)).tolist())

    def __getitem__(self, percent: int) -> float:
        return self.percentiles[percent] if self.percentiles else float("nan")


class Generator(msgspec.Struct, frozen=True):
    """The cost of the generator itself."""

    cpu: float
    """Share of one core."""
    lag: float
    """ms for which its event loop was late, as the 99th percentile."""
    us_per_delta: float

    @property
    def warning(self) -> str | None:
        """The reason why the times are longer than those of the server; None if they are not."""
        if self.cpu > BUSY:
            return f"The generator took {self.cpu:.0%} of a core, which is all that it can use. {MORE}"
        if self.lag > LATE:
            return f"The generator was {self.lag:.0f} ms late (p99): other programs took its core. {ELSEWHERE}"
        return None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All figures of a run; rates are per second of it."""

    name: str
    model: str
    when: str
    options: dict[str, Any]
    seconds: float
    requests: int
    outcomes: dict[str, int]
    """Requests by their outcome: completed, incomplete, cancelled, or an error."""
    slow: int
    """Requests that were read slowly; they are in no time below."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    first_token: Distribution
    between_deltas: Distribution
    whole: Distribution
    generator: Generator

    @property
    def failed(self) -> int:
        return sum(self.outcomes[outcome] for outcome in self.errors)

    @property
    def errors(self) -> list[str]:
        return sorted(set(self.outcomes) - {"completed", "incomplete", CANCELLED})


def summary(plan: Plan, model: str, samples: Sequence[Sample], seconds: float, meter: Meter) -> Result:
    usages = [sample.final.usage for sample in samples if sample.final and sample.final.usage]
    timed = [sample for sample in samples if not sample.is_slow]
    ended = [sample for sample in timed if sample.has_ended]
    return Result(
        name=plan.name or plan.url,
        model=model,
        when=time.strftime("%Y-%m-%d %H:%M:%S"),
        options=plan.model_dump(mode="json", exclude={"api_key", "result", "beside"}),
        seconds=seconds,
        requests=len(samples),
        outcomes=dict(Counter(sample.outcome for sample in samples)),
        slow=len(samples) - len(timed),
        input_tokens=sum(usage.input_tokens for usage in usages),
        cached_tokens=sum((d.cached_tokens or 0) for usage in usages if (d := usage.input_tokens_details)),
        output_tokens=sum(usage.output_tokens for usage in usages),
        first_token=Distribution.of(sample.deltas[0] - sample.begun for sample in timed if sample.deltas),
        between_deltas=Distribution.of(after - before for sample in timed for before, after in pairwise(sample.deltas)),
        whole=Distribution.of(sample.ended - sample.begun for sample in ended),
        generator=Generator(
            cpu=meter.cpu / seconds,
            lag=Distribution.of(meter.lags or [0.0])[99],
            us_per_delta=meter.cpu * 1e6 / max(1, sum(len(sample.deltas) for sample in samples)),
        ),
    )


def read(file: Path) -> Result:
    return msgspec.json.decode(file.read_bytes(), type=Result)


def write(result: Result, file: Path) -> None:
    file.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")


_ROWS: dict[str, Callable[[Result], float]] = {
    "seconds": lambda result: result.seconds,
    "requests": lambda result: result.requests,
    "requests/s": lambda result: result.requests / result.seconds,
    "output tokens/s": lambda result: result.output_tokens / result.seconds,
    "input tokens/s": lambda result: result.input_tokens / result.seconds,
    "cached input tokens/s": lambda result: result.cached_tokens / result.seconds,
}

_TIMES: dict[str, Callable[[Result], Distribution]] = {
    "ms to the first token": lambda result: result.first_token,
    "ms between deltas": lambda result: result.between_deltas,
    "ms of a request": lambda result: result.whole,
}


def table(results: Sequence[Result]) -> Table:
    """Return a table with a column for each result."""
    drawn = Table("", *(result.name for result in results))
    for name, value in _ROWS.items():
        drawn.add_row(name, *(_figure(value(result)) for result in results))
    for name, times in _TIMES.items():
        for percent in (50, 90, 99):
            drawn.add_row(f"{name}, p{percent}", *(_figure(times(result)[percent]) for result in results))
    for outcome in sorted({outcome for result in results for outcome in result.outcomes}):
        drawn.add_row(outcome, *(_figure(result.outcomes.get(outcome, 0)) for result in results))
    drawn.add_row("read slowly", *(_figure(result.slow) for result in results))
    drawn.add_row("CPU of the generator", *(f"{result.generator.cpu:.0%}" for result in results))
    drawn.add_row("its us of CPU per delta", *(_figure(result.generator.us_per_delta) for result in results))
    drawn.add_row("lag of its loop in ms, p99", *(_figure(result.generator.lag) for result in results))
    for column in drawn.columns[1:]:
        column.justify = "right"
    return drawn


def _figure(value: float) -> str:
    if isnan(value):
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:,.3g}"
