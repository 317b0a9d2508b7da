"""A take, with a disk that fails."""

from __future__ import annotations

from pathlib import Path

from pipeline.frames import TokenChunk
from pipeline.record import FORMAT, Header
from pipeline.recording.redact import Redaction
from pipeline.recording.take import BEGUN, OVER, Take


def test_a_lost_take_is_left_as_it_is(tmp_path: Path) -> None:
    """Whatever waited when it was lost is not written: a file that was cut has no hole, and no end."""
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
