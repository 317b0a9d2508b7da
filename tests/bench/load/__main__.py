"""Put load on any server of the Responses API, and report what its clients see and `vllm bench serve` does not.

    python -m tests.bench.load URL [--streams N | --rate R] [--requests N | --seconds S] ...

``--help`` lists all options.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from itertools import count

import msgspec
import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp
from rich.console import Console

from tests.bench.load.client import USUAL, Client
from tests.bench.load.figures import Result, measured, result, table
from tests.bench.load.plan import Plan
from tests.bench.load.running import Load
from tests.bench.load.talk import pool


async def put_load(plan: Plan) -> Result:
    """Run a plan; SIGINT ends it early."""
    pool()
    async with Client.opened(plan) as client:
        if plan.warmup:
            first = plan.model_copy(update={"requests": plan.warmup, "seconds": None, "rate": None})
            await Load(first, client, count(-plan.warmup)).run()
        load = Load(plan, client)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, load.stop)
        async with measured() as generator:
            seconds = await load.run()
        return result(plan, client.model, load.samples, seconds, generator)


def main(*arguments: str) -> int:
    try:
        plan = CliApp.run(Plan, cli_args=list(arguments))
    except ValidationError as wrong:
        faults = [f"--{'.'.join(map(str, fault['loc'])).replace('_', '-')}: {fault['msg']}" for fault in wrong.errors()]
        raise SystemExit("\n".join(faults)) from None
    others = [msgspec.json.decode(file.read_bytes(), type=Result) for file in plan.beside]
    found = uvloop.run(put_load(plan))
    console = Console()
    console.print(table([found, *others]))
    if plan.result:
        plan.result.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    if found.warning:
        console.print(found.warning, style="bold yellow")
    return 0 if set(found.outcomes) & set(USUAL) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
