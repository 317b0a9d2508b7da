"""`docs/CLIENTS.md`, which names the versions of the clients that `make clients` runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "CLIENTS.md").read_text()
LIVE = ROOT / "tests" / "live"
_, SECTION = PAGE.partition("\n## Tried\n")[0].split("\n## Tested with each change\n")
ROWS = re.findall(r"^\| ([^|(]+?)(?: \((\w+)\))? \| ([0-9.]+) \|", SECTION, re.MULTILINE)


def dependencies(folder: Path) -> dict[str, str]:
    """Return the packages of a folder for npm, with their versions."""
    return dict(json.loads((folder / "package.json").read_text())["dependencies"])


PYTHON = dict(line.split("==") for line in (ROOT / ".locks" / "clients.txt").read_text().split())
NODE = dependencies(LIVE / "clients" / "node")
AGENTS = {
    "Claude Code": dependencies(LIVE / "claude" / "node")["@anthropic-ai/claude-code"],
    "Codex": dependencies(LIVE / "codex" / "node")["@openai/codex"],
    "opencode": dependencies(LIVE / "opencode" / "node")["opencode-linux-x64-baseline"],
}


@pytest.mark.parametrize(("name", "language", "version"), ROWS)
def test_page_names_the_version_that_is_tested(name: str, language: str, version: str) -> None:
    versions = NODE if language == "JavaScript" else AGENTS | NODE | PYTHON
    assert versions[name] == version


def test_page_names_each_client_of_npm() -> None:
    assert NODE.keys() - {"ai", "zod"} <= {name for name, *_ in ROWS}


def test_each_row_names_a_version() -> None:
    assert len(ROWS) == len(re.findall(r"^\| [^|]+ \| \d", SECTION, re.MULTILINE)) > 10


def test_page_of_agents_names_their_versions() -> None:
    text = " ".join(PAGE.partition("\n## Coding agents\n")[2].split())
    for name, version in AGENTS.items():
        assert f"{name} {version}" in text
