from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.extensions.rollouts.sessions import rollouts
from tests.bench.many_recordings import TURNS, WROTE, write_recordings
from tests.bench.rollouts import OUTPUTS, exported

pytestmark = pytest.mark.io


def test_each_session_of_many_is_one_path_with_all_its_tokens(tmp_path: Path) -> None:
    sessions = [list(tokens) for tokens in write_recordings(tmp_path, 4 * TURNS)]
    found = [path for session in rollouts([tmp_path]) for path in session.paths]
    assert [path.token_ids.tolist() for path in found] == sessions
    assert [path.mask.count(1) for path in found] == [TURNS * WROTE] * 4
    assert not any(path.cut or path.branch for path in found)


@pytest.mark.parametrize(("form", "out"), OUTPUTS.items())
def test_memory_of_an_export_does_not_grow_with_the_recordings(form: str, out: str, tmp_path: Path) -> None:
    """The smaller number of turns is more than a group of rows has."""
    peaks = []
    for turns in (2_000, 6_000):
        recordings = tmp_path / str(turns) / "recordings"
        assert sum(1 for _ in write_recordings(recordings, turns)) == turns // TURNS
        peaks.append(exported(recordings, form, out).peak)
    assert peaks[1] - peaks[0] < 16


def test_rows_are_those_of_the_sessions(tmp_path: Path) -> None:
    sessions = [list(tokens) for tokens in write_recordings(tmp_path / "recordings", 2 * TURNS)]
    exported(tmp_path / "recordings", "penstock", "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["token_ids"] for row in rows] == sessions
