"""The core runs without the libraries that only extensions need, and without the tools."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.core_alone import core_modules
from tests.support.paths import ROOT

ANSWERS = ["200 completed", "404 input[0].content[0].file_id"]


def printed(*arguments: str) -> list[str]:
    command = (sys.executable, "-m", "tests.support.core_alone", *arguments)
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


@pytest.mark.parametrize("besides", [(), ("penstock.extensions",)])
def test_no_module_of_the_core_needs_an_extension_or_its_libraries(besides: tuple[str, ...]) -> None:
    assert printed("imports", *besides) == [str(len(list(core_modules())))]


@pytest.mark.parametrize(
    ("besides", "option", "routes"),
    [
        ((), "--mcp-config mcp", ["files 200", "vector_stores 404"]),
        (
            ("penstock.extensions.tools", "penstock.extensions.programs"),
            "--mcp-config mcp",
            ["files 404", "vector_stores 404"],
        ),
    ],
)
def test_a_server_serves_what_is_left(besides: tuple[str, ...], option: str, routes: list[str], tmp_path: Path) -> None:
    hosts, refused, *answers = printed("serves", str(tmp_path), *besides)
    assert (hosts, refused) == ("hosts []", option)
    assert answers == [*ANSWERS, *routes]
