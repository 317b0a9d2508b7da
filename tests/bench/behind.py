"""The first token of interactive requests with a batch behind them, over that without one: a real engine on a CPU.

Both take turns in one process, so that a busy machine slows them alike.  A client asks, reads its answer, and rests;
lines fill what it leaves.  ``python -m tests.bench.behind --batch-beside 0`` gives further options to the server.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count

import aiohttp
from aiohttp.test_utils import TestServer

from penstock.api.cli.command_line import read_settings
from penstock.api.resources.resources import ServerParts
from penstock.api.start.parts import Running
from penstock.extensions.batches.answering import Answering
from penstock.extensions.batches.line_runs import LineRequest
from penstock.extensions.batches.yielding import Yielding
from penstock.pipeline.errors import ServerStopping
from penstock.server import running
from penstock.services.tools import Toolbox
from tests.support.tiny_engine import ARGUMENTS, CHECKPOINT

ROUNDS, REQUESTS = 6, 25
"""Rounds, in each of which so many requests are sent with a batch, and without."""

WORDS, ANSWER, LINE = 300, 16, 100
"""Words of a prompt, tokens of an answer, and tokens of the answer to a line."""

REST = 0.05, 0.25
"""The shortest and the longest rest of the client, in seconds."""

_numbers = count()


def body(words: int, tokens: int) -> bytes:
    text = f"{next(_numbers)} " + "lorem ipsum " * (words // 2)
    given = {"model": "tiny-gpt-oss", "input": text, "max_output_tokens": tokens, "store": False, "ignore_eos": True}
    return json.dumps(given).encode()


async def first_token(client: aiohttp.ClientSession, url: str) -> float:
    """Return the seconds to the first text of an answer, which is read to its end."""
    data = body(WORDS, ANSWER)[:-1] + b', "stream": true}'
    sent, first = time.perf_counter(), 0.0
    async with client.post(f"{url}/v1/responses", data=data, headers={"Content-Type": "application/json"}) as answer:
        assert answer.status == 200, await answer.text()
        async for part in answer.content:
            if not first and b".delta" in part:
                first = time.perf_counter() - sent
    assert first
    return first


class Batch:
    """Lines that fill what is left of the engine."""

    def __init__(self, parts: ServerParts) -> None:
        self.yielding = Yielding.of(parts)
        self.answering = Answering(parts, self.yielding)
        self.tokens = 0
        self.tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        filling = asyncio.create_task(self._fill())
        await asyncio.sleep(2)
        try:
            yield
        finally:
            for task in (filling, *self.tasks):
                task.cancel()
            await asyncio.gather(filling, *self.tasks, return_exceptions=True)

    async def _fill(self) -> None:
        while True:
            for _ in range(self.yielding.room()):
                task = asyncio.create_task(self._line())
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            await asyncio.sleep(0.02)

    async def _line(self) -> None:
        line = LineRequest(f"batch_a:{next(_numbers)}", "", "", "", "/v1/responses", body(20, LINE))
        with suppress(ServerStopping):
            answer = await self.answering.answer(line)
            assert answer.status == 200, answer.body
            self.tokens += answer.use.output_tokens if answer.use else 0


async def asked(client: aiohttp.ClientSession, url: str) -> list[float]:
    found = []
    for _ in range(REQUESTS):
        found.append(await first_token(client, url))
        await asyncio.sleep(random.uniform(*REST))
    return found


def p99(seconds: Sequence[float]) -> float:
    return statistics.quantiles(seconds, n=100, method="inclusive")[98]


async def measured(server: Running, parts: ServerParts) -> None:
    alone, behind, batch = list[float](), list[float](), Batch(parts)
    async with TestServer(server.api.app(10_000_000)) as http, aiohttp.ClientSession() as client:
        url, seconds = str(http.make_url("")).rstrip("/"), 0.0
        await asked(client, url)  # the first requests take longer
        for _ in range(ROUNDS):
            alone += await asked(client, url)
            started = time.perf_counter()
            async with batch.running():
                behind += await asked(client, url)
            seconds += time.perf_counter() - started
            say(f"p99 {p99(alone) * 1e3:.1f} ms alone, {p99(behind) * 1e3:.1f} ms with a batch behind")
    for name, of in (("median", statistics.median), ("p99", p99)):
        one, other = of(alone) * 1e3, of(behind) * 1e3
        say(f"{name}: {one:.1f} ms alone, {other:.1f} ms with a batch behind, ratio {other / one:.2f}")
    say(f"lines: {batch.tokens / seconds:.0f} tokens/s")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def main(options: Sequence[str]) -> None:
    arguments = [str(CHECKPOINT), *ARGUMENTS, "--scheduling-policy=priority", "--store=none", "--no-sandbox", *options]
    settings = read_settings(arguments)
    async with running(settings) as server:
        parts = ServerParts(
            settings,
            scheduler=server.scheduler,
            tools=Toolbox(),
            peers=server.api.peers,
            dialects=server.api.dialects,
            keys=server.keys,
        )
        await measured(server, parts)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
