"""The code of ``docs/ENGINES.md`` runs as it stands there."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from penstock.api.settings import Settings
from penstock.pipeline.core import source_of
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import pipeline
from tests.support.event_streams import checked, final
from tests.support.fixture_cases import item_texts
from tests.support.paths import HARMONY, ROOT

PAGE = (ROOT / "docs" / "ENGINES.md").read_text()
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
[CHECK] = re.findall(r"```python\n([^`]*check_engine[^`]*)```", PAGE)
[SHOUT] = re.findall(r"```python\n(# shout.py\n.*?)```", (ROOT / "docs" / "STAGES.md").read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the page names, from which Python imports."""
    shutil.copy(Path(__file__).with_name("echo_engine.py"), tmp_path)
    shutil.copytree(HARMONY / "greeting", tmp_path / "greeting")
    (tmp_path / "shout.py").write_text(SHOUT)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("echo_engine", "shout"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_conformance_test_of_the_page_passes(folder: Path) -> None:
    (folder / "check.py").write_text(CHECK)
    runpy.run_path(str(folder / "check.py"))


async def test_regression_test_of_the_page_passes(folder: Path) -> None:
    (folder / "test_shout.py").write_text(FILES["test_shout.py"])
    page = runpy.run_path(str(folder / "test_shout.py"))
    await page["test_stage_alone"]()
    await page["test_response"]()


@pytest.mark.io
def test_pytest_is_quiet_with_the_settings_of_the_page(tmp_path: Path) -> None:
    [settings] = re.findall(r"^ +```toml\n(.*?)^ +```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "pyproject.toml").write_text(dedent(settings))
    (tmp_path / "test_stage.py").write_text("async def test_stage() -> None:\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ("1 passed" in ended.stdout, "Warning" in ended.stdout + ended.stderr) == (True, False)


async def test_the_backend_of_the_page_answers(folder: Path) -> None:
    (folder / "hello_backend.py").write_text(FILES["hello_backend.py"])
    options: dict[str, Any] = {"engine": [f"{folder / 'hello_backend.py'}:engine"], "store": "none", "sandbox": False}
    request = CreateResponse(model="hello", input="Hi")
    async with pipeline(Settings(**options)) as responses, responses.open(source_of([request])) as events:
        response = final(checked([event async for event in events]))
    assert (response.status, item_texts(response)) == ("completed", ["Hello!"])
