"""Claude Code, started by ``penstock launch`` as on the page of clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launched_agents import AgentServer, Launched
from tests.support.paths import ROOT
from tests.support.processes import wait_for_midnight

PROGRAMS = ROOT / "tests/live/claude/node/node_modules/.bin"


@pytest.fixture(autouse=True)
def _one_day() -> None:
    """Begin no session shortly before midnight: Claude Code names the day, so that later prompts would differ."""
    wait_for_midnight(within=240)


@pytest.fixture
def claude(penstock: str, agents: AgentServer, tmp_path: Path) -> Launched:
    return Launched(penstock, "claude", str(PROGRAMS), tmp_path, agents.url)
