"""The ``penstock`` command as its users run it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from penstock.api.cli.__main__ import COMMANDS, main
from penstock.stages.responses import responses_pipeline
from tests.support.paths import ROOT

Run = Callable[..., bytes]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run(*arguments: str) -> bytes:
        monkeypatch.setattr("sys.argv", ["penstock", *arguments])
        main()
        return capsysbinary.readouterr().out

    return run


def test_readme_shows_drawn_pipeline(run: Run) -> None:
    """The drawing in the README equals the output of the code."""
    assert run("show").decode() in (ROOT / "README.md").read_text()


def test_readme_of_stages_shows_the_factory() -> None:
    assert inspect.getsource(responses_pipeline) in (ROOT / "stages" / "README.md").read_text()


def test_unknown_command_lists_the_known_ones(run: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """A usage error names all commands."""
    with pytest.raises(SystemExit) as ended:
        run("reply")
    assert ended.value.code == 2
    told = capsysbinary.readouterr().err.decode()
    assert all(f"\n  {command} " in told for command in COMMANDS)


@pytest.mark.io
@pytest.mark.parametrize("arguments", [["show"], ["replay", "fixtures/harmony/greeting", "--sse"]])
def test_command_ends_quietly_without_a_reader(arguments: list[str]) -> None:
    """A closed pipe, as that of ``head``, is no error."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "penstock.api.cli", *arguments]
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
