"""A server that behaves as ``vllm serve`` does, as far as starts, sleep and ends are concerned.

A command: ``python -m tests.support.scripted_model --port N``.  Options make it go wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from aiohttp import web

MARK = "PROCESS_OF_TEST"
"""Environment variable that marks the processes of one test."""

MODEL = f"{sys.executable} -u {Path(__file__)}"
"""The beginning of a command that starts one."""


def marked(mark: str) -> set[int]:
    """Return the processes with a mark that have not ended."""
    return {pid for pid in _processes() if f"{MARK}={mark}".encode() in _variables(pid)}


def _processes() -> Iterator[int]:
    yield from (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def _variables(pid: int) -> list[bytes]:
    with suppress(OSError):
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return []


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--exit-at-start", type=int, help="print a line, and end with this status")
    parser.add_argument("--until", type=Path, help="fail to start until this file is there")
    parser.add_argument("--slow", type=Path, help="answer nothing until this file is there")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument(
        "--fork", action="store_true", help="start a process, in a session of its own, that ignores SIGTERM"
    )
    parser.add_argument("--refuse", action="append", default=[], help="answer 500 at this path")
    parser.add_argument("--log", type=Path, help="append the paths of POST requests here")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    options = parser.parse_args()
    sys.stdout.write(f"starting on port {options.port}\n")
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fork:
        _leave_a_process()
    if options.exit_at_start is not None or (options.until and not options.until.exists()):
        sys.stdout.write("no such weights\n")
        sys.exit(options.exit_at_start or 1)
    web.run_app(
        _app(options), host=options.host, port=options.port, print=None, handle_signals=not options.ignore_sigterm
    )


def _leave_a_process() -> None:
    waiting = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    process.stdout.readline()


def _app(options: argparse.Namespace) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        if options.log and request.method == "POST":
            with options.log.open("a") as log:
                log.write(f"{request.path_qs}\n")
        while options.slow and not options.slow.exists():
            await asyncio.sleep(0.02)
        if request.path in options.refuse:
            return web.Response(status=500)
        match request.path:
            case "/die":
                os._exit(3)
            case "/hang":
                await asyncio.sleep(3600)
            case "/environment":
                return web.json_response(dict(os.environ))
            case _:
                pass
        return web.json_response({"data": [{"id": "scripted", "max_model_len": 4096}]})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    return app


if __name__ == "__main__":
    main()
