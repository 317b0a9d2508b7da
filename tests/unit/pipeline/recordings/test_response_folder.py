"""A folder, with a disk that fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.pipeline.frames import TokenChunk
from penstock.pipeline.recordings.format import FORMAT, Header
from penstock.pipeline.recordings.redaction import Redaction
from penstock.pipeline.recordings.response_folder import BEGUN, OVER, ResponseFolder


def test_lost_folder_is_not_written_further(tmp_path: Path) -> None:
    """Frames that wait when the folder is lost are dropped, so a cut file has no gap and no end."""
    folder = ResponseFolder(tmp_path / "resp", Header(FORMAT), 0.0, Redaction())
    file = folder.junction("generate", ("generate",))
    file.add(0.0, BEGUN)
    file.add(1.0, TokenChunk((1,)))
    folder.save()
    written = file.path.read_bytes()
    folder.lose(OSError("the disk is full"))
    for entry in (TokenChunk((2,)), TokenChunk((3,)), OVER):
        file.add(2.0, entry)
        folder.save()
    assert file.path.read_bytes() == written


def test_files_of_a_dead_servers_run_are_removed(tmp_path: Path) -> None:
    for name in ("request.json", "response.json", "conversed.jsonl", "notes.txt"):
        (tmp_path / name).write_text("old")
    folder = ResponseFolder(tmp_path, Header(FORMAT), 0.0, Redaction())
    folder.junction("generate", ("generate",)).add(0.0, BEGUN)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_lost_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = ResponseFolder(tmp_path / "resp", Header(FORMAT), 0.0, Redaction())
    files = [folder.junction(stage, ("generate", "parse")) for stage in ("generate", "parse")]
    for file in files:
        file.add(0.0, BEGUN)
    for _ in files:
        folder.lose(OSError(28, "the disk is full"))
    assert [record.getMessage() for record in caplog.records] == [
        "The recording of resp is cut: OSError: No space left on device"
    ]
    assert all(file.is_cut for file in files)


def test_deleted_file_is_not_created_again(tmp_path: Path) -> None:
    """It would have neither a header nor its first frames."""
    folder = ResponseFolder(tmp_path / "resp", Header(FORMAT), 0.0, Redaction())
    file = folder.junction("generate", ("generate",))
    file.add(0.0, BEGUN)
    file.add(1.0, TokenChunk((1,)))
    folder.save()
    file.path.unlink()
    file.add(2.0, TokenChunk((2,)))
    with pytest.raises(FileNotFoundError):
        folder.save()
    assert not file.path.exists()
