"""The code of ``stages/ENGINES.md`` runs as it stands there."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.paths import HARMONY, ROOT

CODE = re.findall(r"```python\n(.*?)```", (ROOT / "stages" / "ENGINES.md").read_text(), re.DOTALL)
[SHOUT] = re.findall(r"```python\n(# shout.py\n.*?)```", (ROOT / "stages" / "README.md").read_text(), re.DOTALL)


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
    (folder / "check.py").write_text(CODE[1])
    runpy.run_path(str(folder / "check.py"))


async def test_regression_test_of_the_page_passes(folder: Path) -> None:
    (folder / "test_shout.py").write_text(CODE[2])
    page = runpy.run_path(str(folder / "test_shout.py"))
    await page["test_stage_alone"]()
    await page["test_response"]()
