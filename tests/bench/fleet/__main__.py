"""Simulate fleets of engines behind several penstocks, by the way in which they choose an engine for a turn.

python -m tests.bench.fleet [--quick] [--engines N ...] [TABLE ...]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import islice
from math import inf
from statistics import mean
from typing import Protocol, TypeVar

from tests.bench.fleet.batches import LOADS as BATCH_LOADS
from tests.bench.fleet.batches import WAYS as BATCH_WAYS
from tests.bench.fleet.batches import BatchesPlan, simulate_batches
from tests.bench.fleet.fleet import Counts, Fleet, Plan
from tests.bench.fleet.hints import LOADS as HINTS_LOADS
from tests.bench.fleet.hints import NODE, HintsPlan, simulate_hints
from tests.bench.fleet.hints import WAYS as HINTS_WAYS
from tests.bench.fleet.models import FEWEST_GPUS, LOADS, ModelsPlan, simulate_models
from tests.bench.fleet.models import WAYS as MODEL_WAYS
from tests.bench.fleet.policies import Affinity, Bounded, Events, Informed, LeastLoad, Policy, RoundRobin
from tests.bench.fleet.traffic import OTHERS

WAYS: dict[str, Callable[[Fleet], Policy]] = {
    "penstock": lambda fleet: Affinity(fleet.plan.engines, fleet.plan.penstocks, fleet.engines),
    "informed": lambda fleet: Informed(fleet.engines, fleet.plan.penstocks, 1.0),
    "bounded": lambda fleet: Bounded(fleet.plan.engines, fleet.plan.penstocks, 1.5),
    "home": lambda fleet: Bounded(fleet.plan.engines, fleet.plan.penstocks, inf),
    "least": lambda fleet: LeastLoad(fleet.plan.engines, fleet.plan.penstocks),
    "round robin": lambda fleet: RoundRobin(fleet.plan.engines, fleet.plan.penstocks),
    "events": lambda fleet: Events(fleet.engines, fleet.plan.penstocks, fleet.plan.speed, 1.0, 10**9),
    "late events": lambda fleet: Events(fleet.engines, fleet.plan.penstocks, fleet.plan.speed, 10.0, 10**9),
    "few events": lambda fleet: Events(
        fleet.engines, fleet.plan.penstocks, fleet.plan.speed, 1.0, 10_000 * fleet.plan.engines
    ),
}
"""Ways to choose; "bounded" was penstock's until 2026-11."""

SECONDS = 18_000_000
"""Seconds of a run, times the open conversations of all engines, at most: a few minutes on one core."""

MANY = 1_000
"""Engines from which on only some ways are compared."""


def main(options: argparse.Namespace) -> None:
    plan = Plan(0, penstocks=10, hot=0.5, warm_up=300.0, seconds=300.0)
    engines = options.engines or ([10] if options.quick else [10, 100, 1_000, 10_000])
    if options.quick:
        plan = replace(plan, warm_up=60.0, seconds=60.0)
    with ProcessPoolExecutor(options.processes) as pool:
        for table in options.tables or TABLES:
            for line in TABLES[table](pool.map, plan, engines):
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()


def simulate(row: tuple[str, Plan]) -> Fleet:
    """Run one plan; return it with its counts, and without its engines."""
    way, plan = row
    fleet = Fleet(plan, WAYS[way])
    fleet.run()
    fleet.close()
    return fleet


Row = TypeVar("Row")
Outcome = TypeVar("Outcome")


class Run(Protocol):
    """Simulates rows, perhaps in several processes."""

    def __call__(self, simulated: Callable[[Row], Outcome], rows: Iterable[Row], /) -> Iterator[Outcome]: ...


def ways(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Compare the ways, in fleets of several sizes."""
    yield from header("engines", "choice", *FIGURES)
    some = ("penstock", "informed", "least", "events")
    every = ("penstock", "informed", "bounded", "home", "least", "round robin", "events")
    rows = [
        (way, fitted(replace(plan, engines=number))) for number in engines for way in (every if number < MANY else some)
    ]
    for fleet in run(simulate, rows):
        yield f"| {fleet.plan.engines:,} | {fleet.name} | {figures(fleet.counts)} |"


def penstocks(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Compare one penstock, which knows all turns, with several that know only their own."""
    yield from header("engines", "penstocks", "choice", *FIGURES)
    number = engines[min(1, len(engines) - 1)]
    rows = [
        (way, replace(plan, engines=number, penstocks=each))
        for each in (1, 4, 16, 64)
        for way in ("penstock", "informed", "bounded", "events")
    ]
    for fleet in run(simulate, rows):
        yield f"| {number} | {fleet.plan.penstocks} | {fleet.name} | {figures(fleet.counts)} |"


def deaths(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Let engines die, and return after two minutes with an empty cache."""
    yield from header("engines", "die", "choice", "lost conversations that went on", "read again of each", *AROUND)
    third = plan.seconds / 3
    rows = [
        (way, fitted(replace(plan, engines=number, dies_at=third, is_back_after=third)))
        for number in engines
        if number <= MANY
        for way in ("penstock", "informed", "least", "events")
    ]
    for fleet in run(simulate, rows):
        before, after = (sum_of(fleet.buckets[each] for each in minute) for minute in (range(-6, 0), range(6)))
        lost = fleet.lost
        yield (
            f"| {fleet.plan.engines:,} | {fleet.dead} | {fleet.name} | {lost.turns}"
            f" | {lost.again / max(1, lost.turns):,.0f} tokens | {before.share:.1%} | {after.share:.1%}"
            f" | {before.wait(0.99):.1f} s | {after.wait(0.99):.1f} s |"
        )


def state(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Compare what a penstock keeps, and what events that are late or too many to keep cost."""
    yield from header(
        "engines", "choice", "bytes of a penstock", "for an open conversation", "cached", "highest load / mean"
    )
    number = engines[min(1, len(engines) - 1)]
    for fleet in run(
        simulate, [(way, replace(plan, engines=number)) for way in ("penstock", "events", "late events", "few events")]
    ):
        counts, talks = fleet.counts, number * plan.talks
        yield (
            f"| {number} | {fleet.name} | {fleet.size:,} | {fleet.size_of_talks / talks:,.0f} | {counts.share:.1%}"
            f" | {mean(counts.peaks):.2f} |"
        )


def others(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Compare the ways with conversations and mixtures that no constant of them was tuned with."""
    yield from header("engines", "conversations", "choice", *FIGURES)
    number = engines[min(1, len(engines) - 1)]
    rows = {
        (name, way): (way, replace(plan, engines=number, kinds=kinds, first=10**6))
        for name, kinds in OTHERS.items()
        for way in ("penstock", "informed", "bounded", "events")
    }
    for (name, _), fleet in zip(rows, run(simulate, rows.values()), strict=True):
        yield f"| {number} | {name} | {fleet.name} | {figures(fleet.counts)} |"


def models(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Compare ways to share GPUs among ten models, whose loads move."""
    yield from header("models", *(f"{load}, {rank}" for load in LOADS for rank in ("p50", "p99")), *OF_MODELS)
    gpus = max(FEWEST_GPUS, engines[min(1, len(engines) - 1)])
    rows = [ModelsPlan(way, gpus, 3 * plan.warm_up, 12 * plan.seconds) for way in MODEL_WAYS]
    for counts in run(simulate_models, rows):
        waits = [f"{counts.wait(load, rank):.1f} s" for load in LOADS for rank in (0.5, 0.99)]
        yield (
            f"| {MODEL_WAYS[counts.plan.way].name} | {' | '.join(waits)} | {counts.turns:,} | {counts.refused:,}"
            f" | {counts.swaps:,} | {counts.lost / gpus / counts.plan.seconds:.1%} |"
        )


def batches(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Compare ways to have lines of batches behind conversations, by the first tokens of the same turns."""
    yield from header(
        "places", "time", "lines", "wait, p50, alone", "with lines", "p99, alone", "with lines", *OF_LINES
    )
    rows = [
        BatchesPlan(way, speed, talks, warm_up=plan.warm_up, seconds=12 * plan.seconds)
        for (speed, _), talks in BATCH_LOADS.items()
        for way in BATCH_WAYS
    ]
    outcomes = run(simulate_batches, rows)
    for speed, time in BATCH_LOADS:
        alone, *behind = islice(outcomes, len(BATCH_WAYS))
        for counts in behind:
            (p50, p50_alone), (p99, p99_alone) = (counts.against(alone, quantile) for quantile in (0.5, 0.99))
            way = BATCH_WAYS[counts.plan.way]
            assert way is not None
            yield (
                f"| {speed.sequences} | {time} | {way.name} | {p50_alone:.2f} s | {p50:.2f} s | {p99_alone:.2f} s"
                f" | {p99:.2f} s | {p99 / (p99_alone or 1):.2f} | {sum(counts.lines) / sum(counts.idle):.1%}"
                f" | {counts.tokens / counts.plan.seconds / counts.plan.engines:,.0f} |"
            )


def hints(run: Run, plan: Plan, engines: list[int]) -> Iterator[str]:
    """Compare what caches do that know nothing of sessions, what penstock knows, or all that comes."""
    tiers = ("alone", "with a second tier")
    yield from header("choice", *(f"{figure}, {tier}" for tier in tiers for figure in OF_HINTS))
    rows = [
        HintsPlan(
            engines[0],
            talks=talks,
            warm_up=6 * plan.warm_up,
            seconds=12 * plan.seconds,
            speed=NODE,
            way=way,
            second=second,
        )
        for way in HINTS_WAYS
        for second, talks in HINTS_LOADS.items()
    ]
    outcomes = run(simulate_hints, rows)
    for way in HINTS_WAYS.values():
        both = (
            f"{counts.again / max(1, counts.turns):,.0f} tokens | {counts.wait(0.5):.2f} s | {counts.wait(0.99):.1f} s"
            for counts in islice(outcomes, len(HINTS_LOADS))
        )
        yield f"| {way.name} | {' | '.join(both)} |"


OF_HINTS = ("read again of a turn", "wait, p50", "p99")
OF_LINES = ("ratio", "idle places that lines use", "tokens of lines a second and engine")
OF_MODELS = ("turns", "refused", "swaps", "time of GPUs lost")

TABLES = {
    "models": models,
    "batches": batches,
    "ways": ways,
    "others": others,
    "penstocks": penstocks,
    "deaths": deaths,
    "state": state,
    "hints": hints,
}


AROUND = ("cached, minute before", "minute after", "wait, p99, before", "after")
FIGURES = ("cached", "read again of a turn", "highest load / mean", "p99 of engines / mean", "wait, p50", "wait, p99")


def header(*names: str) -> tuple[str, str]:
    return f"| {' | '.join(names)} |", "|---" * len(names) + "|"


def figures(counts: Counts) -> str:
    return (
        f"{counts.share:.1%} | {counts.again / max(1, counts.turns):,.0f} tokens | {mean(counts.peaks):.2f}"
        f" | {mean(counts.high):.2f} | {counts.wait(0.5):.2f} s | {counts.wait(0.99):.1f} s"
    )


def fitted(plan: Plan) -> Plan:
    """Shorten the plan of a large fleet."""
    seconds = min(plan.seconds, SECONDS / (plan.engines * plan.talks))
    return replace(plan, warm_up=min(plan.warm_up, seconds), seconds=seconds)


def sum_of(parts: Iterable[Counts]) -> Counts:
    total = Counts()
    for part in parts:
        total.turns += part.turns
        total.prompts += part.prompts
        total.cached += part.cached
        total.again += part.again
        total.waits += part.waits
    return total


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fleet")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(TABLES)}")
    parser.add_argument("--engines", type=int, nargs="+")
    parser.add_argument("--quick", action="store_true", help="ten engines, for two minutes of virtual time")
    parser.add_argument("--processes", type=int, default=2)
    main(parser.parse_args())
