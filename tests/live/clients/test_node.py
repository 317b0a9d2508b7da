"""JavaScript clients; each file under ``node/`` is a suite of Node's own test runner."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE

FOLDER = Path(__file__).parent / "node"


@pytest.mark.parametrize("suite", sorted(path.name for path in FOLDER.glob("*.test.mjs")))
def test_node_client_works(suite: str, url: str, documents: str, request: pytest.FixtureRequest) -> None:
    command = [request.config.getoption("--node"), "--test", suite]
    environment = {**os.environ, "BASE_URL": url, "DOCUMENTS_URL": documents}
    ran = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
