"""Codex in a folder of its own, with the server of the other clients (`make clients`).

Home, settings and project are temporary, so no file of the user is read or written.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.client_server import Codex

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


@pytest.fixture
def codex(request: pytest.FixtureRequest, url: str, tmp_path: Path) -> Codex:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    (home / "config.toml").write_text(SETTINGS.format(url=url))
    return Codex(str(request.config.getoption("--node")), home, project)
