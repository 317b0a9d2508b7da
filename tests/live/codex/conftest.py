"""Codex in a folder of its own, with a server that has room for its prompts (`make test-codex`).

Nothing of the user's is read or written: home, settings and project are temporary.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.live.clients.conftest import pytest_addoption, pytest_sessionstart, url

__all__ = ["pytest_addoption", "pytest_sessionstart", "url"]

Json = dict[str, Any]

PROGRAM = Path(__file__).parent / "node" / "node_modules" / "@openai" / "codex" / "bin" / "codex.js"
SETTINGS = """\
model = "tiny-gpt-oss"
model_provider = "penstock"
model_context_window = 16384
check_for_update_on_startup = false

[model_providers.penstock]
name = "penstock"
base_url = "{url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false
"""
SECONDS = 180


@dataclass(frozen=True)
class Codex:
    """The program, and the project that it works on."""

    node: str
    home: Path
    project: Path

    def events(self, *arguments: str) -> list[Json]:
        """What ``codex exec`` tells about one run, which ends well."""
        command = [self.node, str(PROGRAM), "exec", *arguments, "--json", "--skip-git-repo-check"]
        command.append("--dangerously-bypass-approvals-and-sandbox")
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.home), "CODEX_HOME": str(self.home)}
        pipe = subprocess.PIPE
        with subprocess.Popen(
            command,
            cwd=self.project,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                told, complained = process.communicate(timeout=SECONDS)
            finally:  # the program is a child of the one that was started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert process.returncode == 0, told + complained
        return [json.loads(line) for line in told.splitlines()]


@pytest.fixture
def codex(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Codex:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (home / "config.toml").write_text(SETTINGS.format(url=url))
    return Codex(str(request.config.getoption("--node")), home, project)
