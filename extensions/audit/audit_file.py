"""The file of the audit log: whole lines, written by a thread, which several processes append to.

Each line is one write at the end of the file, so that lines of several processes do not mix.  The kernel may cut the
one of a process that is killed: it stays a line of its own.  Another program may move the file away: the next line then
begins a new one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread

from penstock.pipeline import metrics

logger = logging.getLogger(__name__)

MOST_WAITING = 10_000
"""Lines that wait to be written; further ones are lost, and counted."""

PAUSE = 1.0
"""Seconds until a write that has failed is tried again."""

CLOSE_WAIT = 5.0
"""Seconds in which lines are still written at the end."""

MODE = 0o600
"""The permissions of the file."""


@dataclass
class AuditFile:
    """The file at ``path``; when it has ``most_bytes``, it is renamed, and ``most_files`` such files are kept.

    `note` is for the event loop, and never waits.
    """

    path: Path
    most_bytes: int
    most_files: int
    lost: int = 0
    """The lines that were lost."""
    _waiting: deque[bytes] = field(default_factory=deque)
    _changed: Condition = field(default_factory=Condition)
    _closing: bool = False
    _descriptor: int | None = None
    _is_broken: bool = False
    """True if the file may end within a line: after a write that was cut by a full disk."""
    _thread: Thread = field(init=False)

    def __post_init__(self) -> None:
        self._thread = Thread(target=self._run, name="audit", daemon=True)

    def open(self) -> None:
        """Open the file, and begin to write; raises `OSError`."""
        self._reopen()
        self._thread.start()

    def note(self, line: bytes) -> None:
        """Have a line written, which ends with a line break, or count it as lost."""
        with self._changed:
            if len(self._waiting) < MOST_WAITING:
                self._waiting.append(line)
                self._changed.notify()
                return
            self.lost += 1
        metrics.AUDIT_LOST.inc()
        if self.lost == 1:
            logger.error("Lines of the audit log are lost: %d wait to be written to %s", MOST_WAITING, self.path)

    def close(self) -> None:
        """Write what waits, for `CLOSE_WAIT` seconds at most, and close the file; to be called in a thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(CLOSE_WAIT)
        left = len(self._waiting)
        if left or self.lost:
            metrics.AUDIT_LOST.inc(left)
            logger.error("%d lines of the audit log were lost", left + self.lost)

    def _run(self) -> None:
        has_failed = False
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if not self._waiting:
                    break
                line = self._waiting[0]
            try:
                self._write(line)
            except OSError as error:
                if not has_failed:
                    logger.error("The audit log cannot be written, and waits: %s: %s", self.path, error.strerror)  # noqa: TRY400
                has_failed = True
                with self._changed:
                    if self._closing:
                        break
                time.sleep(PAUSE)
                continue
            if has_failed:
                logger.info("The audit log is written again")
                has_failed = False
            with self._changed:
                self._waiting.popleft()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self, line: bytes) -> None:
        descriptor = self._current(len(line))
        whole = b"\n" + line if self._is_broken else line
        written = os.write(descriptor, whole)
        self._is_broken = written < len(whole)
        if self._is_broken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _current(self, size: int) -> int:
        """Return the file at the path: another one than before if it was moved away, or if it is full."""
        if self._descriptor is None or not _is_at(self._descriptor, self.path):
            self._reopen()
        assert self._descriptor is not None
        if 0 < os.fstat(self._descriptor).st_size > self.most_bytes - size:
            self._rotate(self._descriptor)
            self._reopen()
        return self._descriptor

    def _reopen(self) -> None:
        before, self._descriptor = self._descriptor, None
        if before is not None:
            os.close(before)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, MODE)
        size = os.fstat(self._descriptor).st_size
        self._is_broken = size > 0 and os.pread(self._descriptor, 1, size - 1) != b"\n"

    def _rotate(self, descriptor: int) -> None:
        """Rename the files, unless another process has just done so."""
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # ends when the file is closed
        if _is_at(descriptor, self.path):
            for number in range(self.most_files - 1, 0, -1):
                with suppress(FileNotFoundError):
                    self._numbered(number).replace(self._numbered(number + 1))
            self.path.replace(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False
