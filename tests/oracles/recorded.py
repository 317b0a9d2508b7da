"""Runs of the tests of other servers, in a process of their own, under a plug-in that records their outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.oracles.sources import CACHE, Release


def recorded(release: Release, recorder: str) -> list[dict[str, Any]] | None:
    """Return what the tests of a release have shown to a plug-in as it is now; None if they have not run."""
    kept = _kept(release, recorder)
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else None


def run_recorded(release: Release, recorder: str, folder: Path, environment: Mapping[str, str], *options: str) -> None:
    """Run tests below a folder under a plug-in, which writes records into the file ``PARSER_CASES``."""
    written = CACHE / f"{release.project}.part"
    written.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PARSER_CASES": str(written),
        "PYTHONPATH": str(Path(__file__).parent),
        "PYTHONDONTWRITEBYTECODE": "1",
        **environment,
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", recorder, "-p", "no:cacheprovider", "-c", os.devnull]
    command += ["--rootdir", ".", "--tb=no", "--continue-on-collection-errors", *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not written.exists():
        raise RuntimeError(f"The tests of {release.project} did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    written.rename(_kept(release, recorder))


def _kept(release: Release, recorder: str) -> Path:
    return release.result(Path(__file__).with_name(f"{recorder}.py"))
