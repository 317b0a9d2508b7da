"""The ``penstock`` command in tests: a fixture for each folder whose tests run it."""

from __future__ import annotations

import pytest

from penstock.api.cli.__main__ import main
from tests.support.processes import CommandResult, RunCommand


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> RunCommand:
    """The ``penstock`` command, as its users run it."""

    def run(*arguments: object) -> CommandResult:
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        written = capsysbinary.readouterr()
        return CommandResult(status, written.out, written.err.decode())

    return run
