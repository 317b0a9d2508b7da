from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from pipeline.__main__ import main


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    out: bytes
    err: str


Command = Callable[..., Ended]


@pytest.fixture
def penstock(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Command:
    """The ``penstock`` command, as its users run it."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr("sys.argv", ["penstock", *map(str, arguments)])
        status = 0
        try:
            main()
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
        written = capsysbinary.readouterr()
        return Ended(status, written.out, written.err.decode())

    return run
