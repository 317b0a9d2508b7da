"""A server that behaves as ``vllm serve`` does, as far as starts, sleep and ends are concerned, and fails by options.

A command: ``python scripted_model.py --port N``.  It imports nothing that takes time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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
    parser.add_argument("--waits-for", type=Path, help="answer nothing until this file is there")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--note-end", action="store_true", help="append a line for the end, too")
    parser.add_argument("--fork", action="store_true", help="start a process in its own session that ignores SIGTERM")
    parser.add_argument("--refuse", action="append", default=[], help="answer 500 at this path")
    parser.add_argument("--hang", action="append", default=[], help="do not answer at this path")
    parser.add_argument("--die", action="append", default=[], help="end with status 3 at this path")
    parser.add_argument("--log", type=Path, help="append a line for the start, and for each POST request")
    parser.add_argument("--enable-sleep-mode", action="store_true")
    options = parser.parse_args()
    _note(options.log, "start")
    sys.stdout.write(f"It listens on port {options.port}.\n")
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.note_end:
        signal.signal(signal.SIGTERM, lambda *_: _end(options.log))
    if options.fork:
        _leave_a_process()
    if options.exit_at_start is not None:
        sys.stdout.write("There are no such weights.\n")
        sys.exit(options.exit_at_start)
    ThreadingHTTPServer((options.host, options.port), _handler(options)).serve_forever()


def _note(log: Path | None, line: str) -> None:
    if log:
        with log.open("a") as file:
            file.write(f"{line}\n")


def _end(log: Path | None) -> None:
    _note(log, "end")
    os._exit(0)


def _leave_a_process() -> None:
    waiting = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(3600)"
    process = subprocess.Popen([sys.executable, "-c", waiting], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout
    process.stdout.readline()


def _handler(options: argparse.Namespace) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            while (options.waits_for and not options.waits_for.exists()) or path in options.hang:
                time.sleep(0.02)
            if path in ("/die", *options.die):
                os._exit(3)
            answer = {"environment": dict(os.environ), "data": [{"id": "scripted", "max_model_len": 4096}]}
            body = json.dumps(answer).encode()
            self.send_response(500 if path in options.refuse else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            _note(options.log, f"{self.path} {body.decode()}".rstrip())
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
            pass

    return Handler


if __name__ == "__main__":
    main()
