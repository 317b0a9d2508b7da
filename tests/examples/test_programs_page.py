"""``docs/PROGRAMS.md``: its programs run as they stand there, and print what it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.processes import PATIENCE, free_port, running_process

PAGE = (ROOT / "docs" / "PROGRAMS.md").read_text()
[COMMAND] = re.findall(r"^penstock (serve .*?) +#", PAGE, re.MULTILINE)
FILES = dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
[PRINTED] = re.findall(r"^python spent\.py\n```\n\n```text\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)

pytestmark = [pytest.mark.io, pytest.mark.slow]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder, address = tmp_path_factory.mktemp("programs"), f"127.0.0.1:{free_port()}"
    command = [Path(sys.executable).with_name("penstock"), *COMMAND.split(), "--port", address.partition(":")[2]]
    variables = {"PENSTOCK_STORE": str(folder / "store")}
    with running_process(command, f"http://{address}/ready", folder / "log", variables, ROOT):
        yield address


@pytest.mark.parametrize("name", FILES)
def test_file_prints_what_the_page_shows(name: str, address: str) -> None:
    code = FILES[name].replace("127.0.0.1:8000", address)
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ran.stdout, ran.stderr) == (PRINTED, "")


def test_page_has_both_sdks() -> None:
    assert list(FILES) == ["spent", "spent_messages"]
