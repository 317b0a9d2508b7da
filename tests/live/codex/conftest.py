"""Codex in a folder of its own, with the server of the other clients (`make clients`).

Home, settings and project are temporary, so no file of the user is read or written.  The settings are those of
``docs/CLIENTS.md``.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.client_server import CODEX_PROGRAM, Codex, Server, running
from tests.support.launched_agents import Launched
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "CLIENTS.md").read_text().partition("\n### Codex\n")[2]
SETTINGS, MODEL = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL)[0] for kind in ("toml", "json"))

FOR_TESTS = """
request_max_retries = 0
stream_max_retries = 0

[analytics]
enabled = false

[features]
shell_snapshot = false  # each command reads the profile, as in a terminal
"""
"""What is added to the settings of the page, whose last table is that of the provider."""


@pytest.fixture
def codex(request: pytest.FixtureRequest, tmp_path: Path) -> Codex:
    home, project = tmp_path / "home", tmp_path / "project"
    home.mkdir()
    project.mkdir()
    return Codex(str(request.config.getoption("--node")), home, project)


@pytest.fixture(autouse=True)
def _same_prompt_everywhere(tmp_path: Path) -> Iterator[None]:
    """Check that no message of Codex depends on the machine or the day, as the tiny model is not sure of all others."""
    yield
    files = list(tmp_path.glob("home/**/sessions/**/*.jsonl"))
    kept = [json.loads(line)["payload"] for file in files for line in file.read_text().splitlines()]
    messages = [json.dumps(item["content"]) for item in kept if item.get("type") == "message"]
    assert messages
    assert not [text for text in messages if str(tmp_path) in text or re.search(r"\d{4}-\d{2}-\d{2}", text)]


@pytest.fixture
def agent(request: pytest.FixtureRequest, penstock: str, tmp_path: Path) -> Launched:
    """Codex as ``penstock launch`` starts it, for a server that is yet to be named."""
    node = Path(str(request.config.getoption("--node"))).parent
    return Launched(penstock, "codex", f"{CODEX_PROGRAM.parents[3] / '.bin'}:{node}", tmp_path, "")


@pytest.fixture
def launched(agent: Launched, server: Server) -> Launched:
    return replace(agent, url=server.url, model="tiny-gpt-oss")


@pytest.fixture
def settle(codex: Codex, url: str) -> Callable[..., None]:
    """Give Codex the settings of the page: ``settle(url, window=..., sockets=..., knows_model=..., lite=...)``."""

    def write(
        url: str = url, *, window: int = 16384, sockets: bool = False, knows_model: bool = True, lite: bool = False
    ) -> None:
        catalog = codex.home / "penstock.json"
        catalog.write_text(changed(MODEL, ": ", context_window=window, use_responses_lite=lite))
        settings = changed(
            SETTINGS,
            " = ",
            model_context_window=window,
            model_catalog_json=str(catalog),
            base_url=url,
            supports_websockets=sockets,
        )
        if not knows_model:
            settings = re.sub(r"^model_catalog_json.*\n", "", settings, flags=re.MULTILINE)
        (codex.home / "config.toml").write_text("check_for_update_on_startup = false\n" + settings + FOR_TESTS)

    return write


def changed(text: str, sign: str, **values: str | int) -> str:
    """The text with other values of these keys, each on a line of its own."""
    for key, value in values.items():
        text, count = re.subn(
            rf'^(\s*"?{key}"?{sign}).*?(,?)$', rf"\g<1>{json.dumps(value)}\2", text, flags=re.MULTILINE
        )
        assert count == 1, key
    return text


@pytest.fixture
def sibling(request: pytest.FixtureRequest, server: Server, tmp_path: Path) -> Iterator[str]:
    """Run another server on the store of the server under test, without a search; yield the base URL for clients."""
    options = [f"--store={server.store}"]
    with running([*shlex.split(request.config.getoption("--serve")), *options], tmp_path / "serve.log") as address:
        yield f"{address}/v1"
