"""JavaScript clients; each file under ``node/`` is a suite of Node's own test runner."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import PATIENCE
from tests.support.starting import UP, Starting

FOLDER = Path(__file__).parent / "node"


def run(request: pytest.FixtureRequest, suite: str, **variables: str) -> None:
    command = [request.config.getoption("--node"), "--test", suite]
    environment = {**os.environ, **variables}
    ran = subprocess.run(
        command, cwd=FOLDER, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("suite", sorted(path.name for path in FOLDER.glob("*.test.mjs")))
def test_node_client_works(
    suite: str, url: str, programming: str, documents: str, request: pytest.FixtureRequest
) -> None:
    run(request, suite, BASE_URL=url, PROGRAMMING_URL=programming, DOCUMENTS_URL=documents)


def test_node_client_waits_for_a_model_that_starts(starting: Starting, request: pytest.FixtureRequest) -> None:
    file = starting.folder / "node"
    run(request, "starting.mjs", BASE_URL=f"{starting.url}/v1", MODEL=file.name, FILE=str(file), TEXT=UP)
