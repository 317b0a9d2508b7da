"""The file of the audit log: whole lines, whatever happens to the file, the disk or the process."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import pytest

from penstock.extensions.audit import audit_file
from penstock.extensions.audit.audit_file import AuditFile

pytestmark = pytest.mark.io

SMALL = 1_000
"""Bytes of a file that is soon full."""


def line(number: int, of: str = "") -> bytes:
    return json.dumps({"number": number, "of": of}).encode() + b"\n"


@contextmanager
def opened(path: Path, most_bytes: int = 2**30, most_files: int = 3) -> Iterator[AuditFile]:
    file = AuditFile(path, most_bytes, most_files)
    file.open()
    try:
        yield file
    finally:
        file.close()


def numbers(*paths: Path) -> list[int]:
    return [json.loads(text)["number"] for path in paths for text in path.read_text().splitlines() if text]


def rotated(path: Path) -> Sequence[Path]:
    """The files of a log, oldest first."""
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda each: -int(each.suffix[1:]))
    return [*older, path]


def test_lines_are_written_in_order_for_the_owner_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    for start in (0, 100):
        with opened(path) as file:
            for number in range(start, start + 100):
                file.note(line(number))
    assert numbers(path) == list(range(200))
    assert path.stat().st_mode & 0o777 == 0o600


def test_full_files_are_renamed_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with opened(path, SMALL, 3) as file:
        for number in range(200):
            file.note(line(number))
    files = rotated(path)
    assert [each.name for each in files] == ["audit.jsonl.3", "audit.jsonl.2", "audit.jsonl.1", "audit.jsonl"]
    assert all(each.stat().st_size <= SMALL for each in files)
    kept = numbers(*files)
    assert kept == list(range(kept[0], 200))


def test_line_larger_than_a_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with opened(path, 10) as file:
        for number in range(2):
            file.note(line(number))
    assert numbers(*rotated(path)) == [0, 1]


@pytest.mark.parametrize("way", ["renamed", "deleted", "emptied"])
def test_file_that_others_take_away_is_made_anew(tmp_path: Path, way: str) -> None:
    path = tmp_path / "audit.jsonl"
    with opened(path) as file:
        file.note(line(1))
    with opened(path) as file:
        if way == "renamed":
            path.rename(tmp_path / "old")
        elif way == "deleted":
            path.unlink()
        else:
            os.truncate(path, 0)
        file.note(line(2))
    assert numbers(path) == [2]


def test_cut_line_of_a_crash_harms_no_other(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(line(1) + b'{"numb')
    with opened(path) as file:
        file.note(line(2))
    assert path.read_bytes() == line(1) + b'{"numb\n' + line(2)


def append(path: Path, name: str, count: int) -> None:
    file = AuditFile(path, 20_000, 1_000)
    file.open()
    for number in range(count):
        file.note(line(number, name))
    file.close()


def test_processes_share_a_file_without_mixing_or_losing_lines(tmp_path: Path) -> None:
    """Each renames it when it is full."""
    path, count = tmp_path / "audit.jsonl", 2_000
    context = multiprocessing.get_context("forkserver")
    writers = [context.Process(target=append, args=(path, str(name), count)) for name in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    found = [json.loads(text) for each in rotated(path) for text in each.read_text().splitlines()]
    for name in range(3):
        assert [each["number"] for each in found if each["of"] == str(name)] == list(range(count))
    assert len(rotated(path)) > 3


def append_for_ever(path: Path) -> None:
    file = AuditFile(path, 2**30, 3)
    file.open()
    while True:
        file.note(line(1, "x" * 500))  # most of them are lost


def test_line_that_a_kill_cuts_is_the_last_and_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    writer = multiprocessing.get_context("forkserver").Process(target=append_for_ever, args=(path,))
    writer.start()
    while not path.exists() or path.stat().st_size < 500_000:
        pass
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    whole = [text for text in path.read_text().split("\n") if text][:-1]
    assert {json.loads(text)["number"] for text in whole} == {1}
    with opened(path) as file:
        file.note(line(2))
    assert json.loads(path.read_text().splitlines()[-1])["number"] == 2


def test_full_disk_waits_and_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A write that was cut is repeated on a line of its own."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(audit_file, "PAUSE", 0.0)
    write, left = os.write, [3, 0, 0]

    def full(descriptor: int, data: bytes) -> int:
        if not left:
            return write(descriptor, data)
        if room := left.pop(0):
            return write(descriptor, data[:room])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    path = tmp_path / "audit.jsonl"
    with opened(path) as file:
        file.note(line(1))
        while left:
            pass
        file.note(line(2))
    assert path.read_bytes() == line(1)[:3] + b"\n" + line(1) + line(2)
    assert caplog.messages == [
        f"The audit log cannot be written, and waits: {path}: No space left on device",
        "The audit log is written again",
    ]


def test_disk_that_stays_full_loses_lines_and_counts_them(caplog: pytest.LogCaptureFixture) -> None:
    with opened(Path("/dev/full")) as file:
        for number in range(3):
            file.note(line(number))
    assert caplog.messages[-1] == "3 lines of the audit log were lost"


def test_too_many_waiting_lines_are_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The event loop never waits for the file."""
    monkeypatch.setattr(audit_file, "MOST_WAITING", 10)
    may_write, write = Event(), os.write

    def slow(descriptor: int, data: bytes) -> int:
        may_write.wait()
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", slow)
    path = tmp_path / "audit.jsonl"
    with opened(path) as file:
        for number in range(25):
            file.note(line(number))
        may_write.set()
    assert numbers(path) == list(range(10))
    assert file.lost == 15
    assert caplog.messages == [
        f"Lines of the audit log are lost: 10 wait to be written to {path}",
        "15 lines of the audit log were lost",
    ]
