"""The servers of two releases over one store: this code, and the wheel of the last release."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from zipfile import ZipFile

from tests.support.paths import FIXTURES, ROOT
from tests.support.server_process import ServerProcess, penstock, serving_process

(WHEEL,) = (FIXTURES / "releases").glob("*.whl")

Program = Callable[..., None]

_ENGINE = f"{ROOT / 'tests/support/reciting_engine.py'}:engine"
_ARGUMENTS = ("serve", "--engine", _ENGINE, "--heartbeat", "0.2", "--stale-after", "3600", "--no-sandbox")


def _installed(site: str, *arguments: str) -> None:
    """Replace this process by one that runs the ``penstock`` command of the package in that folder."""
    command = [sys.executable, "-m", "penstock.api.cli", *arguments]
    os.execve(sys.executable, command, os.environ | {"PYTHONPATH": site, "PYTHONDONTWRITEBYTECODE": "1"})


@cache
def last_release() -> Program:
    """Return the last release's ``penstock`` command."""
    site = mkdtemp(prefix="penstock-release-")
    with ZipFile(WHEEL) as archive:
        archive.extractall(site)
    return partial(_installed, site)


this_release: Program = penstock


@asynccontextmanager
async def running_release(
    program: Program, store: str, folder: Path, *options: str
) -> AsyncGenerator[ServerProcess, None]:
    """Run a server of a release, whose engine recites the messages of the user."""
    async with serving_process(program, _ARGUMENTS, store, folder, *options) as server:
        yield server
