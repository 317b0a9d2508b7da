"""Run conversations over several real engines, and measure how much of their prompts the engines' caches hold.

    python -m tests.bench.affinity [--engines N] [--conversations N] [--at-once N ...]

Two servers over one store share the engines, and each turn of a conversation goes to another server than the turn
before.  The load runs once for each way to choose an engine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias
from unittest.mock import patch

import uvloop

from penstock.pipeline.frames import RequestFacts
from penstock.stages.services.engines import affinity
from penstock.stages.services.engines.replicas import Replica, Replicas
from penstock.stages.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from tests.bench.affinity.load import HEADER, Load
from tests.bench.engines import serving
from tests.support.server import Server, running_server
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

SERVERS = 2
OPTIONS = ("--structured-outputs-config.backend=guidance", "--enable-prompt-tokens-details", "--enable-scale-out")
CHECKED = 3600.0
"""Seconds between two health checks: engines that share a few cores answer late."""

WORTHS = (0, affinity.WORTH)
"""Values of `affinity.WORTH`, besides the choice of the least busy engine; with 0, each turn goes to its home."""

Choice: TypeAlias = Callable[[Replicas, RequestFacts, int, Any, Any, Any], Replica | None]


def by_load() -> Choice:
    """Return the choice of the engine with the fewest generations, and of those, of the one longest not chosen."""
    turns, last = count(1), dict[str, int]()

    def choose(
        these: Replicas, _: RequestFacts, _tokens: int, without: Any, rather_not: Any, _cached: Any
    ) -> Replica | None:
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
def chosen(worth: int | None) -> Iterator[str]:
    """Choose engines with a value of `affinity.WORTH`, or the least busy one, for the length of a block."""
    if worth is None:
        with patch.object(Replicas, "choose", by_load()):
            yield "least busy"
    else:
        with patch.object(affinity, "WORTH", worth):
            yield f"least work, {worth:,} tokens for a generation" if worth else "home always"


async def main(options: argparse.Namespace) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        async with engines(options.engines, folder) as urls, servers(urls, folder) as both:
            show(HEADER)
            for at_once in options.at_once:
                for number, worth in enumerate((None, *WORTHS)):
                    load = Load(f"{number} {at_once}", both, options.conversations, at_once, options.key)
                    with chosen(worth) as choice:
                        show(f"| {choice} | {await load.run()}")


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.affinity")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="+", default=[24], help="conversations at once")
    parser.add_argument("--key", default="", help="a prompt_cache_key for all conversations")
    uvloop.run(main(parser.parse_args()))
