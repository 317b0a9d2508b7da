"""What `penstock record` adds between a client and its server: time to the first bytes, delay and CPU time per token.

    python -m tests.bench.proxied [--streams 50] [--rounds 5]

The server is a bare one, which writes the chunks of a chat at a pace.  Each chunk has the time at which it was written.
In each round the same clients read from the server itself, from a proxy that records nothing, and from one that records
every answer.  CPU time is that of the process which the clients connect to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import aiohttp
import psutil
from aiohttp import web

from tests.support.processes import free_port, running_process

RATE = 50.0
"""Chunks per second of each stream."""

CHUNKS = 200
"""Chunks of a stream, with a token each."""

SHORT = 100
"""Answers of one chunk in a round, one after another, for the time to the first bytes."""

PATH = "/v1/chat/completions"


class Reading(NamedTuple):
    """What a client sees: milliseconds to the first bytes, delay of a chunk in milliseconds, microseconds of CPU."""

    first: float
    delay: float
    cpu: float


async def answer(request: web.Request) -> web.StreamResponse:
    """Write the chunks of a chat at a pace, as many as the request wants."""
    wanted = (await request.json())["max_tokens"]
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await stream.prepare(request)
    begun = time.monotonic()
    for number in range(wanted):
        if (pause := begun + number / RATE - time.monotonic()) > 0:
            await asyncio.sleep(pause)
        choice = {"index": 0, "delta": {"content": " token"}, "finish_reason": None}
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        await stream.write(b"data: %b\n\n" % json.dumps({**chunk, "at": time.monotonic()}).encode())
    await stream.write(b"data: [DONE]\n\n")
    return stream


def serve(port: int) -> None:
    """Run the bare server."""
    app = web.Application()
    app.router.add_post(PATH, answer)
    app.router.add_get("/health", lambda _: _health())
    web.run_app(app, host="127.0.0.1", port=port, access_log=None, print=None)


async def _health() -> web.Response:
    return web.Response()


async def read(client: aiohttp.ClientSession, url: str, tokens: int) -> tuple[float, list[float]]:
    """Read an answer; return the seconds to its first bytes, and the delay of each chunk in seconds."""
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": tokens}
    sent, first, delays = time.monotonic(), 0.0, []
    async with client.post(url + PATH, json=body) as response:
        async for line in response.content:
            first = first or time.monotonic() - sent
            if line.startswith(b"data: {"):
                delays.append(time.monotonic() - json.loads(line.removeprefix(b"data: "))["at"])
    if len(delays) != tokens:
        raise RuntimeError(f"{len(delays)} of {tokens} chunks came from {url}")
    return first, delays


async def measured(url: str, process: psutil.Process, streams: int) -> Reading:
    """Measure a server: short answers one after another, then streams at once."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        firsts = [(await read(client, url, 1))[0] for _ in range(SHORT)]
        before = process.cpu_times()
        found = await asyncio.gather(*(read(client, url, CHUNKS) for _ in range(streams)))
        after = process.cpu_times()
    cpu = (after.user - before.user + after.system - before.system) * 1e6 / streams / CHUNKS
    delays = [delay for _, each in found for delay in each]
    return Reading(statistics.median(firsts) * 1e3, statistics.median(delays) * 1e3, cpu)


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, tuple[str, psutil.Process]]]:
    """Run the server and both proxies; yield the URL and the process of each."""
    ports = {name: free_port() for name in ("direct", "passed on", "recorded")}
    upstream = f"http://127.0.0.1:{ports['direct']}"
    record: list[str | Path] = [
        Path(sys.executable).with_name("penstock"),
        "record",
        folder / "recordings",
        "--upstream",
        upstream,
    ]
    commands: dict[str, list[str | Path]] = {
        "direct": [sys.executable, "-m", "tests.bench.proxied", "--serve", str(ports["direct"])],
        "passed on": [*record, "--record-if", "x-record", "--port", str(ports["passed on"])],
        "recorded": [*record, "--port", str(ports["recorded"])],
    }
    with ExitStack() as running:
        found = {}
        for name, command in commands.items():
            url = f"http://127.0.0.1:{ports[name]}"
            process = running.enter_context(running_process(command, f"{url}/health", folder / f"{ports[name]}.log"))
            found[name] = url, psutil.Process(process.pid)
        yield found


def table(rounds: list[dict[str, Reading]]) -> str:
    """Return the medians of the rounds, each with the median of its ratios to the direct connection."""
    lines = [f"{'':12s}{'first bytes, ms':>22s}{'delay of a token, ms':>24s}{'CPU of a token, us':>24s}"]
    for name in rounds[0]:
        cells = []
        for at in range(len(Reading._fields)):
            value = statistics.median(each[name][at] for each in rounds)
            ratio = statistics.median(each[name][at] / each["direct"][at] for each in rounds)
            cells.append(f"{value:13.2f} ({ratio:5.2f})")
        lines.append(f"{name:12s}" + "".join(f"{cell:>23s}" for cell in cells))
    return "\n".join(lines)


async def compared(streams: int, rounds: int) -> str:
    """Measure the server and both proxies in turns."""
    with TemporaryDirectory() as folder, servers(Path(folder)) as found:
        return table([await one_round(found, streams) for _ in range(rounds)])


async def one_round(servers: dict[str, tuple[str, psutil.Process]], streams: int) -> dict[str, Reading]:
    """Measure the server and both proxies once, one after another."""
    return {name: await measured(url, process, streams) for name, (url, process) in servers.items()}


def main() -> None:
    """Print the table, or run the bare server."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.proxied")
    parser.add_argument("--streams", type=int, default=50, help=f"at once, with {CHUNKS} tokens each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    else:
        sys.stdout.write(f"{asyncio.run(compared(options.streams, options.rounds))}\n")


if __name__ == "__main__":
    main()
