"""A take, with a disk that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.frames import TokenChunk
from penstock.pipeline.recordings.format import FORMAT, Header
from penstock.pipeline.recordings.redaction import Redaction
from penstock.pipeline.recordings.take import BEGUN, OVER, Take


def test_lost_take_is_not_written_further(tmp_path: Path) -> None:
    """Frames that wait when the take is lost are dropped, so a cut file has no gap and no end."""
    take = Take(tmp_path / "resp", Header(FORMAT), 0.0, Redaction())
    track = take.track("generate", ("generate",))
    track.take_in(0.0, BEGUN)
    track.take_in(1.0, TokenChunk((1,)))
    take.save()
    written = track.path.read_bytes()
    take.lose(OSError("the disk is full"))
    for said in (TokenChunk((2,)), TokenChunk((3,)), OVER):
        track.take_in(2.0, said)
        take.save()
    assert track.path.read_bytes() == written


def test_files_of_a_dead_servers_run_are_removed(tmp_path: Path) -> None:
    """Files of two runs of a response do not mix; other files stay."""
    for name in ("request.json", "response.json", "conversed.jsonl", "notes.txt"):
        (tmp_path / name).write_text("old")
    take = Take(tmp_path, Header(FORMAT), 0.0, Redaction())
    take.track("generate", ("generate",)).take_in(0.0, BEGUN)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_lost_take_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line covers all its files, and none gets an end, even if the loss comes after the last frame."""
    take = Take(tmp_path / "resp", Header(FORMAT), 0.0, Redaction())
    tracks = [take.track(stage, ("generate", "parse")) for stage in ("generate", "parse")]
    for track in tracks:
        track.take_in(0.0, BEGUN)
    for _ in tracks:
        take.lose(OSError("the disk is full"))
    assert [record.getMessage() for record in caplog.records] == ["The recording of resp is cut: the disk is full"]
    assert all(track.is_cut for track in tracks)


def test_deleted_file_is_not_created_again(tmp_path: Path) -> None:
    """It would have neither a header nor its first frames."""
    take = Take(tmp_path / "resp", Header(FORMAT), 0.0, Redaction())
    track = take.track("generate", ("generate",))
    track.take_in(0.0, BEGUN)
    track.take_in(1.0, TokenChunk((1,)))
    take.save()
    track.path.unlink()
    track.take_in(2.0, TokenChunk((2,)))
    with pytest.raises(FileNotFoundError):
        take.save()
    assert not track.path.exists()
