"""Put load on any server of the Responses API, and report what its clients see and `vllm bench serve` does not.

    python -m tests.bench.load URL [--streams N | --rate R] [--requests N | --seconds S] ...

``--help`` lists all options.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from itertools import count

import uvloop
from pydantic import ValidationError
from pydantic_settings import CliApp
from rich.console import Console

from tests.bench.load.client import Client
from tests.bench.load.plan import Plan
from tests.bench.load.result import Result, read, summary, table, write
from tests.bench.load.running import Load, measured, shown
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
        async with shown(load), measured() as meter:
            seconds = await load.run()
            return summary(plan, client.model, load.samples, seconds, meter)


def main(*arguments: str) -> int:
    try:
        plan = CliApp.run(Plan, cli_args=list(arguments))
    except ValidationError as wrong:
        faults = [f"--{'.'.join(map(str, fault['loc'])).replace('_', '-')}: {fault['msg']}" for fault in wrong.errors()]
        raise SystemExit("\n".join(faults)) from None
    others = [read(file) for file in plan.beside]
    result = uvloop.run(put_load(plan))
    console = Console()
    console.print(table([result, *others]))
    if plan.result:
        write(result, plan.result)
    if warning := result.generator.warning:
        console.print(warning, style="bold yellow")
    return 1 if result.failed == result.requests else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
