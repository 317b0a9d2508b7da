"""The ``penstock`` command, as its users run it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from pipeline.__main__ import main
from pipeline.protocol.response import Response
from tests.streams import final, read_sse

ROOT = Path(__file__).parents[2]
RECORDING = str(ROOT / "fixtures/harmony/function_call")
SERVED = ROOT / "fixtures/harmony/served_python"

Run = Callable[..., bytes]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run(*arguments: str) -> bytes:
        monkeypatch.setattr("sys.argv", ["penstock", *arguments])
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
    assert run("replay", RECORDING, "--from", "emit") == replayed


def test_a_missing_recording_is_named(run: Run, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    """A wrong path is answered in one line, with the status of a usage error."""
    with pytest.raises(SystemExit) as ended:
        run("replay", "fixtures/harmony/nothing")
    assert ended.value.code == 2
    told = capsysbinary.readouterr().err.decode()
    assert told.startswith("penstock: fixtures/harmony/nothing/")
    assert told.endswith(": there is no recording here: No such file or directory\n")


def test_what_tools_did_is_replayed(run: Run) -> None:
    """Where tools ran between the turns, a replay goes on behind them, unless it is told to go on even later."""
    replayed = run("replay", str(SERVED))
    assert final(read_sse(replayed)) == msgspec.json.decode((SERVED / "response.json").read_bytes(), type=Response)
    assert run("replay", str(SERVED), "--from", "emit") == replayed
    assert run("replay", str(SERVED), "--from", "persist") == replayed


@pytest.mark.parametrize(
    ("recording", "stage", "reason"),
    [
        (SERVED, "parse", b"tools ran between the turns"),
        (SERVED, "generate", b"tools ran between the turns"),
        (RECORDING, "converse", b"asks a model"),
        (RECORDING, "render", b"asks a model"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    run: Run, capsysbinary: pytest.CaptureFixture[bytes], recording: Path | str, stage: str, reason: bytes
) -> None:
    """A replay that would leave out what a model or a tool said is a usage error, with its reason."""
    with pytest.raises(SystemExit) as ended:
        run("replay", str(recording), "--from", stage)
    assert ended.value.code == 2
    assert reason in capsysbinary.readouterr().err
