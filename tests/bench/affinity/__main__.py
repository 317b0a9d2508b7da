"""Run conversations over several real engines, and measure how much of their prompts the engines' caches hold.

    python -m tests.bench.affinity [--engines N] [--conversations N] [--at-once N ...]
    python -m tests.bench.affinity --simulated

Two servers over one store share the engines, and each turn of a conversation goes to another server than the turn
before.  The load runs once for each way to choose an engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from unittest.mock import patch

import uvloop

from penstock.pipeline.frames import RequestFacts
from penstock.stages.services.engines import affinity
from penstock.stages.services.engines.replicas import Replica, Replicas
from penstock.stages.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from tests.bench.affinity import simulated
from tests.bench.affinity.load import HEADER, Load
from tests.bench.engines import serving
from tests.support.server import Server, running_server
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

SERVERS = 2
OPTIONS = ("--structured-outputs-config.backend=guidance", "--enable-prompt-tokens-details", "--enable-scale-out")
CHECKED = 3600.0
"""Seconds between two health checks: engines that share a few cores answer late."""

ALWAYS = 10**6
BOUNDS = ((0, 1.0), (1, 1.5), (4, 1.25), (4, 1.5), (4, 2.0), (ALWAYS, 1.0))
"""Values of `affinity.FEW` and `affinity.EXCESS`.

With `ALWAYS` no engine is ever busy; with 0 the least busy one is chosen."""

Choice: TypeAlias = Callable[[Replicas, RequestFacts, Any, Any], Replica | None]


def by_load() -> Choice:
    """Return the choice of the engine with the fewest generations, and of those, of the one longest not chosen."""
    turns, last = count(1), dict[str, int]()

    def choose(these: Replicas, _: RequestFacts, without: Any, rather_not: Any) -> Replica | None:
        able = [replica for replica in these.healthy if replica not in without]
        key = [((one in rather_not, len(one.running), last.get(one.url, 0)), one) for one in able]
        chosen = min(key, key=lambda pair: pair[0])[1] if key else None
        if chosen:
            last[chosen.url] = next(turns)
        return chosen

    return choose


@asynccontextmanager
async def engines(number: int, folder: Path) -> AsyncGenerator[list[str], None]:
    """Run some ``vllm serve`` with the tiny model for the length of a block; yield their URLs."""
    command = (str(Path(sys.executable).with_name("vllm")), "serve", str(CHECKPOINT), *ARGUMENTS, *OPTIONS)
    async with AsyncExitStack() as closing:
        running = [
            await closing.enter_async_context(serving(command, folder / f"engine-{each}.log")) for each in range(number)
        ]
        yield [one.url for one in running]


@asynccontextmanager
async def servers(urls: list[str], folder: Path) -> AsyncGenerator[list[Server[VllmHttpEngine]], None]:
    """Serve the engines at several servers of one store for the length of a block."""
    async with AsyncExitStack() as closing:
        running: list[Server[VllmHttpEngine]] = []
        for _ in range(SERVERS):
            engine = await start_vllm_http(urls, interval=CHECKED)
            closing.push_async_callback(engine.close)
            running.append(await closing.enter_async_context(running_server(engine, folder, max_body_bytes=10**6)))
        yield running


@contextmanager
def chosen(few: int, excess: float) -> Iterator[str]:
    """Choose engines in a way of `BOUNDS` for the length of a block; yield its name."""
    if not few:
        with patch.object(Replicas, "choose", by_load()):
            yield "least busy"
    else:
        with patch.multiple(affinity, FEW=few, EXCESS=excess):
            yield "home always" if few == ALWAYS else f"home, unless busy: {few}, {excess}"


async def main(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        async with engines(options.engines, folder) as urls, servers(urls, folder) as both:
            show(HEADER)
            for at_once in options.at_once:
                for number, bounds in enumerate(BOUNDS):
                    load = Load(f"{number} {at_once}", both, options.conversations, at_once, options.key)
                    with chosen(*bounds) as choice:
                        show(f"| {choice} | {await load.run()}")


def simulate() -> None:
    show(simulated.HEADER)
    for count_of_engines, running, bounds in product((2, 3, 8), (2, 8, 32), BOUNDS):
        with chosen(*bounds) as choice:
            show(simulated.Simulation(count_of_engines, running).run(choice))


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.affinity")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="+", default=[24], help="conversations at once")
    parser.add_argument("--key", default="", help="a prompt_cache_key for all conversations")
    parser.add_argument("--simulated", action="store_true", help="simulate the engines, to compare loads")
    arguments = parser.parse_args()
    if arguments.simulated:
        simulate()
    else:
        uvloop.run(main(arguments))
