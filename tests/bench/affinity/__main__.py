"""Run conversations over several real engines, and measure how much of their prompts the engines' caches hold.

    python -m tests.bench.affinity [--engines N] [--conversations N] [--at-once N ...] [--engine OPTIONS]

Two servers over one store share the engines, and each turn of a conversation goes to another server than the turn
before.  The load runs once for each way to choose an engine.
"""

from __future__ import annotations

import argparse
import contextlib
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
from penstock.services.engines import affinity
from penstock.services.engines.kv_events import KvEvents
from penstock.services.engines.replicas import Core, Replicas
from penstock.services.engines.vllm_http import VllmHttpEngine, start_vllm_http
from tests.bench.affinity.load import HEADER, Load
from tests.bench.engines import serving
from tests.support.server import Server, running_server
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

SERVERS = 2
OPTIONS = ("--structured-outputs-config.backend=guidance", "--enable-prompt-tokens-details", "--enable-scale-out")
CHECKED = 3600.0
"""Seconds between two health checks: engines that share a few cores answer late."""

WAYS = ((None, False), (0, False), (affinity.WORTH, False), (affinity.WORTH, True))
"""Values of `affinity.WORTH`, and if KV events are followed.

With 0, each turn goes to its home; None stands for the choice of the least busy engine.
"""

Addresses: TypeAlias = dict[str, str]
"""The addresses of the KV events of engines, by their URLs."""

Choice: TypeAlias = Callable[[Replicas, RequestFacts, int, Any, Any, Any], Core | None]


def by_load() -> Choice:
    """Return the choice of the engine with the fewest generations, and of those, of the one longest not chosen."""
    turns, last = count(1), dict[str, int]()

    def choose(
        these: Replicas, _: RequestFacts, _tokens: int, without: Any, rather_not: Any, _cached: Any
    ) -> Core | None:
        able = [replica for replica in these.healthy if replica not in without]
        key = [((one in rather_not, len(one.running), last.get(one.url, 0)), one) for one in able]
        chosen = min(key, key=lambda pair: pair[0])[1] if key else None
        if chosen is None:
            return None
        last[chosen.url] = next(turns)
        return chosen.cores[0]

    return choose


@asynccontextmanager
async def engines(number: int, folder: Path, options: str) -> AsyncGenerator[Addresses, None]:
    """Run some ``vllm serve`` with the tiny model for the length of a block; yield where they publish KV events."""
    vllm, addresses = str(Path(sys.executable).with_name("vllm")), Addresses()
    async with AsyncExitStack() as closing:
        for each in range(number):
            address = f"ipc://{folder / f'events-{each}'}"
            events = f'{{"enable_kv_cache_events": true, "endpoint": "{address}"}}'
            command: tuple[str, ...] = (
                vllm,
                "serve",
                str(CHECKPOINT),
                *ARGUMENTS,
                *OPTIONS,
                "--kv-events-config",
                events,
            )
            command += tuple(options.split())
            running = await closing.enter_async_context(serving(command, folder / f"engine-{each}.log"))
            addresses[running.url] = address
        yield addresses


@asynccontextmanager
async def servers(
    urls: list[str], folder: Path, addresses: Addresses | None = None
) -> AsyncGenerator[list[Server[VllmHttpEngine]], None]:
    """Serve the engines at several servers of one store for the length of a block."""
    async with AsyncExitStack() as closing:
        running: list[Server[VllmHttpEngine]] = []
        for _ in range(SERVERS):
            engine = await start_vllm_http(urls, interval=CHECKED)
            closing.push_async_callback(engine.close)
            if addresses:
                engine.follow(closing.enter_context(contextlib.closing(KvEvents(addresses))))
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
        async with engines(options.engines, folder, options.engine) as addresses:
            show(HEADER)
            for at_once in options.at_once:
                for number, (worth, follows) in enumerate(WAYS):
                    async with servers(list(addresses), folder, addresses if follows else None) as both:
                        load = Load(f"{number} {at_once}", both, options.conversations, at_once, options.key)
                        with chosen(worth) as choice:
                            shown = f"{choice}, with KV events" if follows else choice
                            show(f"| {shown} | {await load.run()}")


def show(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.bench.affinity")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--engine", default="", metavar="OPTIONS", help="more options of vllm serve")
    parser.add_argument("--conversations", type=int, default=200)
    parser.add_argument("--at-once", type=int, nargs="+", default=[24], help="conversations at once")
    parser.add_argument("--key", default="", help="a prompt_cache_key for all conversations")
    uvloop.run(main(parser.parse_args()))
