"""The picture of the README: `python -m tests.support.killed` kills a server, and keeps what its client prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from openai import APIConnectionError, OpenAI, Stream
from openai.types.responses import ResponseStreamEvent
from rich.console import Console
from rich.text import Text

from tests.support.paths import ROOT
from tests.support.processes import free_port, running_process

PICTURE = ROOT / "docs/killed.svg"
COLUMNS = 96
SERVE = "penstock serve --engine replay:recorded --replay-speed 0.2x --resume-interrupted"
RECORDED = ROOT / "extensions/workbench"
QUESTION = "Write a function that adds two numbers."
CUT = "def add"
"""Words of the answer at which its server is killed."""

_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)
"""Fonts, which a reader's browser would fetch from elsewhere."""


def run(console: Console) -> None:
    """Kill a server in the middle of an answer, start it again, and print what its client reads."""
    port = free_port()
    url = f"http://127.0.0.1:{port}/v1"
    with (
        tempfile.TemporaryDirectory(prefix="penstock-") as folder,
        OpenAI(base_url=url, api_key="none", max_retries=0) as client,
    ):
        with _server(port, Path(folder), console) as server:
            _type(console, "client>", f'create(input="{QUESTION}", background=True, stream=True)')
            stream = client.responses.create(model="tiny-gpt-oss", input=QUESTION, background=True, stream=True)
            name = _follow(stream, console, server)
        with _server(port, Path(folder), console):
            _type(console, "client>", "retrieve(response.id, stream=True)")
            _follow(client.responses.retrieve(name, stream=True), console)
            _type(console, "client>", "retrieve(response.id).status")
            console.print(Text(str(client.responses.retrieve(name).status)))


def _type(console: Console, prompt: str, command: str) -> None:
    console.print(Text.assemble((prompt, "bold cyan" if prompt == "client>" else "bold green"), f" {command}"))


def _server(port: int, folder: Path, console: Console) -> AbstractContextManager[subprocess.Popen[bytes]]:
    _type(console, "server$", f"{SERVE} &")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {"PATH": path, "PENSTOCK_PORT": str(port), "PENSTOCK_STORE": str(folder / "store.sqlite3")}
    command = ["bash", "-c", f"cd {RECORDED} && exec {SERVE}"]
    return running_process(command, f"http://127.0.0.1:{port}/ready", folder / "log", environment)


def _follow(
    stream: Stream[ResponseStreamEvent], console: Console, server: subprocess.Popen[bytes] | None = None
) -> str:
    """Print the text of a stream, kill its server in the middle if one is given, and return the id of the response."""
    text = name = ""
    try:
        for event in stream:
            if event.type == "response.created":
                name = event.response.id
            elif event.type == "response.output_text.delta":
                text += event.delta
                if server and CUT in text:
                    server.kill()
        console.print(Text(text))
    except APIConnectionError as error:
        console.print(Text(text))
        _type(console, "server$", "kill -9 %1")
        console.print(Text(f"{type(error).__name__}: {error}", "bold red"))
    return name


if __name__ == "__main__":
    recorded = Console(record=True, width=COLUMNS)
    run(recorded)
    drawn = recorded.export_svg(title="An answer outlives its server", unique_id="killed")
    PICTURE.write_text(_FONTS.sub("", drawn))
