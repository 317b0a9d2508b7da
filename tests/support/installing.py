"""uv, with the places of packages that pip is configured with."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from tests.support.paths import ROOT

LOCKED = ("--constraints", ROOT / ".locks" / "test.txt")
"""Options of uv for the versions that tests run with, which are on this machine already."""

PATIENTLY = {"UV_HTTP_RETRIES": "10", "UV_HTTP_TIMEOUT": "300"}
"""Variables with which uv waits for an index that is slow, and asks one again that fails."""


def script(name: str) -> ModuleType:
    """Return a program of `.locks`."""
    folder = str(ROOT / ".locks")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module(name)


def installer() -> ModuleType:
    """Return the program that installs with uv."""
    return script("install")


def output_of(command: Sequence[str | Path], folder: Path, **environment: str) -> str:
    """Return the output of a command; it must succeed."""
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def uv_command(
    *command: str | Path, installs: Sequence[str | Path], torch_backend: str | None = None
) -> tuple[list[str | Path], dict[str, str]]:
    """Return a command of uv with what it ``installs``, and its environment."""
    options, variables = installer().options_for_uv(torch_backend)
    return [sys.executable, "-m", "uv", *command, *options, *installs], PATIENTLY | variables


def uv(folder: Path, *command: str | Path, installs: Sequence[str | Path] = (), **environment: str) -> str:
    """Return the output of a command of uv with what it ``installs``."""
    words, variables = uv_command(*command, installs=installs)
    return output_of(words, folder, **variables, **environment)
