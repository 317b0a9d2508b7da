"""Demo: a recorded answer passes the stages before your eyes; then a server answers with it.  No GPU, no vLLM."""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
import webbrowser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from penstock.api.cli import serve
from penstock.api.cli.arguments import Parser
from penstock.extensions.workbench import inspect, replay
from penstock.pipeline.distribution import vllm_requirement

RECORDINGS = Path(__file__).with_name("recorded")
"""Answers of a tiny gpt-oss, which come with penstock."""

SHOWN = RECORDINGS / "cities"

INTRODUCTION = """\
The request to a tiny gpt-oss was to compare two cities. What it wrote now passes the stages of penstock, in the time
that it took: the tokens become items, and the items events of the Responses API.
"""

AS_A_PAGE = "\nThe same answer as a page, with the tokens that caused each item and event:\n"

NEXT = """
A server now starts that answers with such recordings, and whose live page shows what passes the stages. Ctrl-C ends it.
Then:

  penstock serve --engine http://HOST:8000    serve a gpt-oss of a vLLM server elsewhere
  pip install '{vllm}'         or install vLLM here, with an NVIDIA GPU, and
  penstock serve openai/gpt-oss-20b           serve a model of this machine
"""

READY_SECONDS = 60.0
"""Seconds in which the server has to be ready before its page is opened."""


def main(arguments: Sequence[str]) -> None:
    """Show a recorded answer on its way through the stages, and serve it, without a GPU."""
    parser = Parser(prog="penstock demo", description=__doc__)
    parser.add_argument("--port", type=int, default=8000, help="the port of the server (8000)")
    parser.add_argument(
        "--open", action=argparse.BooleanOptionalAction, default=_has_desktop(), help="open the page of the server"
    )
    chosen = parser.parse_args(arguments)
    print(INTRODUCTION, flush=True)
    replay.main([str(SHOWN), "--speed", "1x"])
    with tempfile.TemporaryDirectory(prefix="penstock-demo-") as folder:
        print(AS_A_PAGE, flush=True)
        inspect.main([str(SHOWN), str(Path(folder, "cities.html"))])
        print(NEXT.format(vllm=vllm_requirement()), flush=True)
        if chosen.open:
            threading.Thread(target=_open_when_ready, args=(f"http://127.0.0.1:{chosen.port}",), daemon=True).start()
        options = {"--engine": f"replay:{RECORDINGS}", "--replay-speed": "1x", "--log-level": "WARNING"}
        options |= {"--port": str(chosen.port), "--store": str(Path(folder, "store.sqlite3"))}
        options |= {"--record": str(Path(folder, "recordings"))}
        serve.main(["--live", *(word for option in options.items() for word in option)])


def _has_desktop() -> bool:
    """Return True if a browser can have a window; in a terminal it would take the place of the server's output."""
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _open_when_ready(url: str) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until:
        with suppress(URLError, TimeoutError), urlopen(f"{url}/ready", timeout=5):  # noqa: S310 - it is http
            webbrowser.open(url)
            return
        time.sleep(0.2)
