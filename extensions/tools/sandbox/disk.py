"""The disk space that a sandbox uses: the folder of its container, and deleted files that are still open."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeAlias

from penstock.extensions.tools.sandbox.users import reading_as

File: TypeAlias = tuple[int, int]
"""Device and inode."""

MOST_FILES: Final = 4096
"""The most files of a sandbox; empty ones take memory too."""

_BLOCK: Final = 512
"""Bytes of a block in ``st_blocks``, as in stat(2)."""
_GONE: Final = (FileNotFoundError, ProcessLookupError)
_MAPPED: Final = re.compile(r"^\S+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+) +(/.*) \(deleted\)$", re.MULTILINE)
"""A line of ``/proc/PID/maps`` about a deleted file: its device, its inode and its path."""


def exceeds(folder: str, home: str, first: int, user: int | None, most: int) -> bool:
    """True if a sandbox uses more than ``most`` bytes or `MOST_FILES` files, or hides what it uses.

    ``home`` is the path of the folder inside.  ``first`` is the pid of its first process, which all others descend
    from, and ``user`` its user if that is another than the server's.  A deleted file that is mapped but not open counts
    as ``most`` bytes, as its size cannot be seen.
    """
    try:
        size, files = _in_folder(folder, most)
        held: dict[File, int] = {}
        with reading_as(user):
            for pid in _descendants(first):
                held |= _held(pid, (folder, home), most)
    except OSError:  # a folder or process that may not be looked at
        return True
    return size + sum(held.values()) > most or files > MOST_FILES


def _in_folder(folder: str, most: int) -> tuple[int, int]:
    """Return the bytes and the files below ``folder``; stop counting at the limits."""
    size, files, pending = 0, 0, [folder]
    while pending and size <= most and files <= MOST_FILES:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    files += 1
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
        except FileNotFoundError:  # code may delete what is being counted
            continue
    return size, files


def _descendants(first: int) -> Iterator[int]:
    pending = [first]
    while pending:
        pid = pending.pop()
        yield pid
        for task in _listed(f"/proc/{pid}/task"):
            pending += map(int, _text(f"/proc/{pid}/task/{task}/children").split())


def _held(pid: int, homes: tuple[str, ...], unseen: int) -> dict[File, int]:
    """Return the bytes of each deleted file that a process holds.

    A thread may have descriptors of its own, and outlive the first one, in which the kernel then shows nothing.
    """
    held: dict[File, int] = {}
    maps = ""
    for task in _listed(f"/proc/{pid}/task"):
        place = f"/proc/{pid}/task/{task}"
        try:
            held |= _open_and_deleted(f"{place}/fd")
            maps = maps or _text(f"{place}/maps")
        except PermissionError:
            if not _is_ending(place):
                raise
    for major, minor, inode, path in _MAPPED.findall(maps):
        if path.startswith(homes):  # not memory that processes share
            held.setdefault((os.makedev(int(major, 16), int(minor, 16)), int(inode)), unseen)
    return held


def _open_and_deleted(folder: str) -> dict[File, int]:
    held: dict[File, int] = {}
    for number in _listed(folder):
        with suppress(*_GONE):
            found = Path(folder, number).stat()
            if stat.S_ISREG(found.st_mode) and not found.st_nlink:
                held[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK
    return held


def _is_ending(place: str) -> bool:
    """True for a zombie and the like: it has no memory left, and the kernel gives its descriptors to root."""
    return not any(map(int, _text(f"{place}/statm").split()))


def _text(path: str) -> str:
    """Return the text of a file; empty if it is gone."""
    with suppress(*_GONE):
        return Path(path).read_text(errors="replace")
    return ""


def _listed(folder: str) -> list[str]:
    """Return the names in ``folder``; none if it is gone."""
    with suppress(*_GONE):
        return [path.name for path in Path(folder).iterdir()]
    return []
