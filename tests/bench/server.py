"""A measured server in a process of its own, over a `SteppedCore`: penstock or vLLM's as users start it, or a bare one.

    python -m tests.bench.server ours|peer|sent|bare|engine|stages PORT [options of vLLM]

Commands arrive as lines of JSON on standard input.  Each result goes to standard output as `MARK` and a line of JSON.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import uvloop

from tests.bench.core import Command, SteppedCore, install

READY = b"ready for clients"
MARK = b"measured: "
MODEL = ".cache/tiny_gpt_oss"
"""It has the vocabulary and tokenizer of gpt-oss; its weights are not loaded."""

NAME = "gpt-oss"
OPTIONS = (
    "--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", "131072", "--max-num-seqs", "4096",
    "--max-num-batched-tokens", "8192", "--kv-cache-memory-bytes", "67108864",  # no core uses it
    "--disable-log-stats",
)  # fmt: skip


async def measuring(cores: list[SteppedCore]) -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        command = msgspec.json.decode(line, type=Command)
        measured = await cores[0].run(command, partial(os.write, sys.stdout.fileno(), READY + b"\n"))
        os.write(sys.stdout.fileno(), MARK + msgspec.json.encode(measured) + b"\n")


async def ours(which: str, port: int, options: list[str], cores: list[SteppedCore]) -> None:
    from penstock.api.cli.serve import serve  # noqa: PLC0415
    from penstock.api.settings import Settings  # noqa: PLC0415 - the peer does not need it
    from tests.bench.bare import serve_bare  # noqa: PLC0415

    with TemporaryDirectory() as folder:
        chosen: dict[str, Any] = {"model": MODEL, "port": port, "store": f"{folder}/store.sqlite3", "sandbox": False}
        settings = Settings(engine_arguments=[*OPTIONS, *options], **chosen)
        await (serve(settings) if which == "ours" else serve_bare(which, settings, cores))


async def peer(port: int, options: list[str]) -> None:
    """Serve vLLM's own server, without its access log, to be fair."""
    from vllm.entrypoints.launchers.api_server.entry import run_server  # noqa: PLC0415 - takes seconds
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args  # noqa: PLC0415
    from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

    parser = make_arg_parser(FlexibleArgumentParser())
    own = ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log", "--uvicorn-log-level", "error"]
    arguments = parser.parse_args(["--model", MODEL, *OPTIONS, *own, *options])
    validate_parsed_serve_args(arguments)
    await run_server(arguments)


async def main(which: str, port: int, options: list[str]) -> None:
    """Serve until standard input ends."""
    cores = install()
    serving = asyncio.create_task(peer(port, options) if which == "peer" else ours(which, port, options, cores))
    await asyncio.wait((serving, asyncio.create_task(measuring(cores))), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
