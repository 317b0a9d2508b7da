"""The writer: a thread that writes what is queued, so that no stream waits for encoding or for the disk."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1
"""Seconds between two rounds of writing to disk."""

ENTRIES_AT_ONCE = 32
"""Entries that the thread handles before it gives up the GIL, so that the event loop can run."""

LAST_WRITES_SECONDS = 5.0
"""Seconds that a server waits for the disk when it stops."""


class SavedFolder(Protocol):
    """A folder that is written to by the thread alone."""

    def save(self) -> None:
        """Write what was added."""

    def lose(self, error: Exception) -> None:
        """Stop recording after an error."""


class QueuedFile(Protocol):
    """A file to which entries of the queue belong."""

    @property
    def folder(self) -> SavedFolder:
        """The folder of the file."""
        ...

    def add(self, at: float, entry: Any) -> None:
        """Handle an entry of the queue."""


AnyFile = TypeVar("AnyFile", bound=QueuedFile)


def make_folder(folder: Path) -> None:
    """Create the folder if it does not exist.  Raise `OSError` if it is not writable."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"no recording can be written to {folder}: {error.strerror}") from error


@dataclass
class Writer(Generic[AnyFile]):
    """Writes recordings into ``folder``, every ``pause`` seconds.  Raises `OSError` if it is not writable."""

    folder: Path
    pause: float = PAUSE_SECONDS
    waiting: deque[tuple[AnyFile, float, Any]] = field(default_factory=deque)
    """The queue for the thread: the file, the time, and what the file adds."""

    def __post_init__(self) -> None:
        make_folder(self.folder)
        self._closing = Event()
        self.thread = Thread(target=self._write_until_closed, name="recorder", daemon=True)
        self.thread.start()

    async def close(self) -> None:
        """Write what is queued, waiting for the disk at most `LAST_WRITES_SECONDS` seconds."""
        self._closing.set()
        await asyncio.to_thread(self.thread.join, LAST_WRITES_SECONDS)
        if self.thread.is_alive():
            logger.warning("%s is too slow: recordings of the last responses are cut", self.folder)

    def _write_until_closed(self) -> None:
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(self.pause)
            changed: dict[SavedFolder, None] = {}
            for count in range(len(self.waiting)):
                if count % ENTRIES_AT_ONCE == 0:
                    time.sleep(0)  # release the GIL: another thread may be waiting for it
                file, at, entry = self.waiting.popleft()
                changed[file.folder] = None
                try:
                    file.add(at, entry)
                except Exception as error:  # noqa: BLE001 - it is logged, and the file lacks its end
                    file.folder.lose(error)
            for folder in changed:
                try:
                    folder.save()
                except OSError as error:
                    folder.lose(error)
