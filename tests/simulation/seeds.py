"""The simulation of many seeds, in several processes."""

from __future__ import annotations

import tests.simulation.determinism  # isort: skip # noqa: F401 - before all that reads a clock

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice

from tests.simulation.plan import plan_of
from tests.simulation.planted import planted
from tests.simulation.simulation import Outcome, simulate


def outcome_of(seed: int, kinds: str = "", only: str = "", plant: str | None = None, postgres: str = "") -> Outcome:
    """Simulate a seed, perhaps with an old fault; ``kinds`` and ``only`` choose the actions of its plan.

    The store is in the PostgreSQL at a URL, if there is one.
    """
    plan = plan_of(seed, kinds.split(",") if kinds else (), postgres)
    if only:
        plan = plan.only({int(number) for number in only.split(",")})
    with planted(plant):
        return simulate(plan)


def outcomes(
    seeds: Iterable[int], jobs: int, kinds: str, only: str, plant: str | None, postgres: str
) -> Iterator[Outcome]:
    """Simulate seeds, in a number of processes; yield their outcomes in order."""
    if jobs == 1:
        for seed in seeds:
            yield outcome_of(seed, kinds, only, plant, postgres)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        remaining = iter(seeds)
        running: list[Future[Outcome]] = []
        while True:
            free = 2 * jobs - len(running)
            running += [pool.submit(outcome_of, seed, kinds, only, plant, postgres) for seed in islice(remaining, free)]
            if not running:
                return
            yield running.pop(0).result()
