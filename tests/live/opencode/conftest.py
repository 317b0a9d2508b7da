"""opencode, started by ``penstock launch`` as on the page of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched_agents import AgentServer, Launched
from tests.support.paths import ROOT

PROGRAMS = ROOT / "tests/live/opencode/node/node_modules/opencode-linux-x64-baseline/bin"


@pytest.fixture
def opencode(penstock: str, agents: AgentServer, tmp_path: Path) -> Launched:
    return Launched(penstock, "opencode", str(PROGRAMS), tmp_path, agents.url)
