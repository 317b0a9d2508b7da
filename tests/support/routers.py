"""Routers of other makes between a server and its engines; ``make test-deploy`` unpacks them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port

UNPACKED = ROOT / ".cache/deploy/router"
"""vLLM's router, with what it imports beyond the packages of the tests."""

COMMAND = "import sys; from vllm_router.launch_router import main; main()"


@asynccontextmanager
async def running_router(engines: Sequence[str], policy: str, log: Path) -> AsyncGenerator[str, None]:
    """Run vLLM's router over some engines for the length of a block; yield its URL."""
    port, metrics = free_port(), free_port()
    options = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--policy", policy)
    environment = {**os.environ, "PYTHONPATH": str(UNPACKED)}
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            COMMAND,
            *options,
            "--worker-urls",
            *engines,
            stdout=file,
            stderr=file,
            env=environment,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        await _wait_for(f"{url}/v1/models", process, log)
        yield url
    finally:
        with suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE)


async def _wait_for(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(PATIENCE):
        while process.returncode is None:
            with suppress(aiohttp.ClientError):
                if (await session.get(url)).status == 200:
                    return
            await asyncio.sleep(0.1)
    raise RuntimeError(f"The router has ended: {log}")
