"""Fire hostile bodies, raw connections, forms, floods, streams, attacks on WebSockets and heavy requests at servers.

Give them hostile MCP servers, engines and embedders, files with forged marks, and keys that take all that keys share.

No 5xx, no traceback, no hang.  What held the event loop in the last two is told, and is no fault.

    python -m tests.bench.fuzz [--bodies N] [--connections N] [--streams N] [--seed N]

The same seed gives the same requests.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import uvloop

from tests.bench.fuzz.embedders import attack_embeddings
from tests.bench.fuzz.fire import Outcome, complaints, fire_bodies, fire_connections, open_streams
from tests.bench.fuzz.floods import flood
from tests.bench.fuzz.forms import attack_forms
from tests.bench.fuzz.heavy import send_heavy
from tests.bench.fuzz.hostile import drawn, hostile_requests, raw_connections
from tests.bench.fuzz.limits import exceed_limits, limited_process
from tests.bench.fuzz.marks import forge_marks
from tests.bench.fuzz.measured import PASSING, measured_process
from tests.bench.fuzz.publishers import attack_index
from tests.bench.fuzz.sharing import take_all
from tests.bench.fuzz.sockets import attack_sockets
from tests.bench.fuzz.tools import attack_tools, calling_process
from tests.support.openapi import Description
from tests.support.orphans import ending_with_us
from tests.support.server_process import ServerProcess, running_process

FLOOD_SECONDS = 15.0
"""Seconds of a flood, and those after it, in which memory goes back."""

FEW_TOKENS = 200
"""Tokens of a stream that ends before the server does."""

LIMITED = 1_000
"""Requests of a limited key, and bodies that it declares."""

OTHERS = (attack_index, 1_000), (attack_embeddings, 300), (forge_marks, 300), (take_all, 5)
"""Attacks that run servers of their own, and the number of their messages, answers, files and rounds."""

SHOWN = 5
"""Faults of each kind that are printed."""


async def hostile(server: ServerProcess, bodies: int, connections: int, seed: int) -> dict[str, Outcome]:
    """Fire at a server; its log and its health afterwards are an outcome of their own."""
    description = Description((await server.get("/openapi.json"))[1])
    _, conversation = await server.post({"items": [{"role": "user", "content": "Hi"}]}, "/v1/conversations")
    _, response = await server.post({"input": "Hi"})
    requests = hostile_requests(description, [conversation["id"], response["id"]])
    found = {
        "bodies": await fire_bodies(server, drawn(requests, bodies, seed)),
        "raw connections": await fire_connections(server, drawn(raw_connections(), connections, seed)),
    }
    health, _ = await server.get("/health")
    faults = complaints(server) + ([] if health == 200 else [f"health is {health}"])
    return {**found, "afterwards": Outcome(faults=faults)}


async def many_streams(server: ServerProcess, count: int) -> dict[str, Outcome]:
    """Hold streams open until they have `FEW_TOKENS`, then as many, which would go on, until the server is stopped."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        server.client, before = client, server.client
        whole = await open_streams(server, count, max_output_tokens=FEW_TOKENS)
        stopped = await open_streams(server, count, server.kill(signal.SIGTERM))
        server.client = before
    return {
        f"{count} streams": whole,
        f"{count} streams, SIGTERM in the middle": stopped,
        "afterwards ": Outcome(faults=complaints(server)),
    }


async def main() -> int:
    os.environ.update(ending_with_us())
    parser = argparse.ArgumentParser(prog="python -m tests.bench.fuzz")
    parser.add_argument("--bodies", type=int, default=10_000)
    parser.add_argument("--connections", type=int, default=1_000)
    parser.add_argument("--streams", type=int, default=1_500, help="streams, or bodies that do not end, at once")
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args()
    wrong = 0
    with TemporaryDirectory(prefix="fuzz") as name:
        folder = Path(name)
        options = ("--max-background", str(wanted.streams), "--drain-timeout", "1", "--log-level", "INFO")
        for script in ("quick", "long"):
            store = str(folder / f"{script}.sqlite3")
            async with running_process(store, folder, script, *options) as server:
                begun = time.monotonic()
                if script == "quick":
                    found = await hostile(server, wanted.bodies, wanted.connections, wanted.seed)
                    found |= await attack_forms(server)
                    found |= await flood(server, wanted.streams, FLOOD_SECONDS)
                else:
                    found = await many_streams(server, wanted.streams)
                wrong += tell(found, begun)
        for stages in ((), PASSING):
            print("With stages of an operator:" if stages else "With the server's own stages:")
            for script, attack in (("slow", attack_sockets), ("quick", send_heavy)):
                async with measured_process(folder, script, *stages) as server:
                    begun = time.monotonic()
                    wrong += tell(await attack(server), begun)
        async with calling_process(folder) as server:
            begun = time.monotonic()
            wrong += tell(await attack_tools(server), begun)
        async with limited_process(folder) as server:
            begun = time.monotonic()
            wrong += tell(await exceed_limits(server, LIMITED, wanted.seed), begun)
        for of_their_own, count in OTHERS:
            begun = time.monotonic()
            wrong += tell(await of_their_own(folder, count, wanted.seed), begun)
    return bool(wrong)


def tell(found: Mapping[str, Outcome], begun: float) -> int:
    """Print outcomes; return the number of faults."""
    for what, outcome in found.items():
        statuses = ", ".join(f"{status}: {count:,}" for status, count in sorted(outcome.statuses.items()))
        held = f"; {outcome.hold}" if outcome.hold else ""
        print(f"{what}: {statuses or 'nothing'}; {len(outcome.faults)} faults{held}")
        print(*outcome.faults[:SHOWN], sep="\n", end="\n" if outcome.faults else "")
    print(f"  in {time.monotonic() - begun:.0f} s", flush=True)
    return sum(len(outcome.faults) for outcome in found.values())


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
