"""A server whose models start as they are used.  Nothing of the product is imported here."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

UP = "I am up."
"""What each model says."""

MODELS = ("responses", "chat", "messages", "node")


@dataclass(frozen=True)
class Starting:
    """The server, each of whose models is up once a file of its name is in the folder."""

    url: str
    folder: Path


@contextmanager
def starting_server(penstock: str, folder: Path) -> Iterator[Starting]:
    """Run one, which often gives its streams a sign of life, for the length of a block."""
    server = [
        "env",
        f"PYTHONPATH={ROOT}",
        str(Path(penstock).with_name("python")),
        "-m",
        "tests.support.harmony_server",
    ]
    lines = [f'engine-wait = "{PATIENCE}s"', 'keep-alive = "0.1s"']
    for name in MODELS:
        command = shlex.join([*server, UP, f"--waits-for={folder / name}"])
        lines += [f"[models.{name}]", f"command = {json.dumps(command)}"]
    (folder / "penstock.toml").write_text("\n".join(lines))
    url = f"http://127.0.0.1:{free_port()}"
    serve = [penstock, "serve", "--store=none", "--no-sandbox", f"--port={url.rpartition(':')[2]}"]
    with running_process(serve, f"{url}/health", folder / "serve.log", folder=folder):
        yield Starting(url, folder)
