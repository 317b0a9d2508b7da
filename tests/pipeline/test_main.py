"""``python -m pipeline``, as its users run it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.streams import read_sse

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-m", "pipeline", *arguments], cwd=ROOT, capture_output=True, check=False)


def test_the_readme_shows_the_flow() -> None:
    """The picture in the README is the one that the code draws."""
    picture = run("show").stdout.decode()
    assert picture in (ROOT / "README.md").read_text()


def test_a_replay_gives_the_recorded_events() -> None:
    """Replaying the tokens of a fixture writes its stream of events; from a later stage it is the same."""
    replayed = run("replay", "fixtures/harmony/function_call").stdout
    assert [event.__struct_config__.tag for event in read_sse(replayed)][-1] == "response.completed"
    assert run("replay", "fixtures/harmony/function_call", "--since", "emit").stdout == replayed


def test_a_missing_recording_is_named() -> None:
    """A wrong path is answered in one line."""
    failed = run("replay", "fixtures/harmony/nothing")
    assert failed.returncode == 2
    assert b"nothing" in failed.stderr
    assert b"Traceback" not in failed.stderr
