"""``python -m pipeline``, as its users run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.__main__ import main
from tests.streams import read_sse

ROOT = Path(__file__).parents[2]
RECORDING = str(ROOT / "fixtures/harmony/function_call")

Run = Callable[..., bytes]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run(*arguments: str) -> bytes:
        monkeypatch.setattr("sys.argv", ["pipeline", *arguments])
        main()
        return capsysbinary.readouterr().out

    return run


def test_the_readme_shows_the_flow(run: Run) -> None:
    """The picture in the README is the one that the code draws."""
    assert run("show").decode() in (ROOT / "README.md").read_text()


def test_a_replay_gives_the_recorded_events(run: Run) -> None:
    """Replaying the tokens of a fixture writes its stream of events; from a later stage it is the same."""
    replayed = run("replay", RECORDING)
    assert [event.__struct_config__.tag for event in read_sse(replayed)][-1] == "response.completed"
    assert run("replay", RECORDING, "--since", "emit") == replayed


def test_a_missing_recording_is_named(run: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """A wrong path is answered in one line, with the status of a usage error."""
    with pytest.raises(SystemExit) as ended:
        run("replay", "fixtures/harmony/nothing")
    assert ended.value.code == 2
    assert b"there is no recording fixtures/harmony/nothing" in capsysbinary.readouterr().err
