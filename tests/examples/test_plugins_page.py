"""The package of ``docs/PLUGINS.md`` is built and found as the page says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "PLUGINS.md").read_text()


@pytest.mark.io
def test_package_of_the_page_adds_its_stage(tmp_path: Path) -> None:
    [project] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(project)
    shutil.copy(Path(__file__).with_name("redact_emails.py"), tmp_path / "penstock_redact.py")
    (tmp_path / "test_redact.py").touch()
    building = [sys.executable, "-m", "uv", "build", "--wheel", "--no-build-isolation", "--python", sys.executable]
    subprocess.run([*building, "--quiet", str(tmp_path)], check=True)
    [wheel] = (tmp_path / "dist").glob("penstock_redact-1.0-*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    showing = [sys.executable, "-m", "penstock.api.cli", "show", "--with", "redact"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    shown = subprocess.run(showing, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert re.search(r"^  redact +: ParsedFrame", shown, re.MULTILINE)
