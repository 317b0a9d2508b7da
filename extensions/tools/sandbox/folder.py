"""The folder of a container: made, locked, read and written by the server, while code of a model may change it.

No name in it is trusted.  A file is opened name by name from the folder's own descriptor, and no link is followed, so
that no path leaves the folder.  A file that is none, such as a pipe, opens without waiting and is refused.  If the
server is root, it looks at the folder with the rights of the container's user.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.extensions.tools.sandbox.disk import MOST_FILES
from penstock.extensions.tools.sandbox.users import USERS, SandboxUser, reading_as
from penstock.services.containers import FolderFull, FoundFile, NoSuchFile

PREFIX: Final = "penstock-sandbox-"
_MAKING: Final = ".penstock-making-"
"""The prefix of a folder that has no lock yet, which `sweep` leaves alone."""

DEEPEST: Final = 32
"""Folders within each other in which files are listed."""

LONGEST_PATH: Final = 1024
"""Bytes of the path of a file that is listed."""

CHUNK: Final = 2**18
"""Bytes that are read or written at once."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_INTO: Final = _READ | os.O_DIRECTORY
_WRITE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_log = logging.getLogger(__name__)


class Folder:
    """A folder of this server for one container, and the user that owns it; `remove` removes both."""

    def __init__(self, *, drops_user: bool) -> None:
        self.user = SandboxUser() if drops_user else None
        made = Path(tempfile.mkdtemp(prefix=_MAKING))
        try:
            if self.user:
                os.chown(made, self.user.id, self.user.id)
        except OSError:
            made.rmdir()
            raise
        self._fd = os.open(made, _INTO)
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        self.path = made.rename(made.with_name(PREFIX + made.name.removeprefix(_MAKING)))

    @property
    def user_id(self) -> int | None:
        """The user of the container, if that is another one than the server's."""
        return self.user.id if self.user else None

    def files(self) -> list[FoundFile]:
        """Return the files in the order of their paths: at most `MOST_FILES`, with printable paths, and not hidden."""
        with reading_as(self.user_id):
            return sorted(self._found(), key=lambda file: file.path)

    def read(self, path: str, most: int) -> bytes:
        """Return the first ``most`` bytes of a file; raises `NoSuchFile`."""
        with self.opened(path) as file:
            parts, left = [], most
            while left > 0 and (part := os.read(file, min(CHUNK, left))):
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Open a file for reading for the length of a block; raises `NoSuchFile`."""
        file = self.open(path)
        try:
            yield file
        finally:
            os.close(file)

    def open(self, path: str) -> int:
        """Return the descriptor of a file, for reading; raises `NoSuchFile`."""
        *folders, name = path.split("/")
        with reading_as(self.user_id):
            try:
                with self._within(folders) as at:
                    file = os.open(name, _READ, dir_fd=at)
            except OSError as error:
                raise NoSuchFile from error
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise NoSuchFile

    def begin(self) -> tuple[int, str]:
        """Return the descriptor and the name of a new file, hidden until `finish`; raises `FolderFull`."""
        name = f".penstock-upload-{secrets.token_hex(8)}"
        with reading_as(self.user_id):
            try:
                return os.open(name, _WRITE, 0o644, dir_fd=self._fd), name
            except OSError as error:
                raise FolderFull from error

    def finish(self, hidden: str, name: str) -> FoundFile:
        """Give the file of `begin` a name, in the place of another file, and return it; raises `FolderFull`."""
        if not is_name(name):
            raise FolderFull
        with reading_as(self.user_id):
            try:
                os.rename(hidden, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
                found = os.stat(name, dir_fd=self._fd, follow_symlinks=False)
            except OSError as error:
                raise FolderFull from error
        return FoundFile(name, found.st_size, found.st_mtime_ns, found.st_ino)

    def abandon(self, hidden: str) -> None:
        """Remove the file of `begin`."""
        with reading_as(self.user_id), suppress(OSError):  # code in the container may have deleted it
            os.unlink(hidden, dir_fd=self._fd)

    def delete(self, path: str) -> None:
        """Delete a file; raises `NoSuchFile`."""
        *folders, name = path.split("/")
        with reading_as(self.user_id):
            try:
                with self._within(folders) as at:
                    os.unlink(name, dir_fd=at)
            except OSError as error:
                raise NoSuchFile from error

    async def remove(self) -> None:
        """Remove the folder with ``rm``, because its tree may exceed Python's recursion limit."""
        await _remove(self.path)
        os.close(self._fd)
        if self.user:
            self.user.release()

    def _found(self) -> Iterator[FoundFile]:
        pending: list[tuple[str, ...]] = [()]
        seen = 0
        while pending:
            folders = pending.pop()
            # Code may delete or replace a folder between its listing and this.
            with suppress(OSError), self._within(folders) as at, os.scandir(at) as entries:
                for entry in entries:
                    if (seen := seen + 1) > MOST_FILES:
                        return
                    path = "/".join((*folders, entry.name))
                    if not _is_listed(path):
                        continue
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        yield FoundFile(path, found.st_size, found.st_mtime_ns, found.st_ino)
                    elif stat.S_ISDIR(found.st_mode) and len(folders) < DEEPEST:
                        pending.append((*folders, entry.name))

    @contextmanager
    def _within(self, folders: list[str] | tuple[str, ...]) -> Iterator[int]:
        """Open a folder in the folder for the length of a block, name by name; raises `OSError`."""
        at = os.dup(self._fd)
        try:
            for name in folders:
                inner = os.open(name, _INTO, dir_fd=at) if is_name(name) else _refuse(name)
                os.close(at)
                at = inner
            yield at
        finally:
            os.close(at)


def is_name(name: str) -> bool:
    """Return True if a file may have this name: printable, and no path."""
    return name not in ("", ".", "..") and "/" not in name and name.isprintable() and _octets(name) <= 240


def _octets(name: str) -> int:
    return len(name.encode("utf-8", "surrogateescape"))


def _refuse(name: str) -> int:
    raise FileNotFoundError(name)


def _is_listed(path: str) -> bool:
    name = path.rpartition("/")[2]
    return is_name(name) and _octets(path) <= LONGEST_PATH and not name.startswith(".")


async def sweep() -> None:
    """Remove the folders that a killed server has left: they have no lock."""
    for path in await asyncio.to_thread(_leftovers):
        await _remove(path)


def _leftovers() -> list[Path]:
    own = {os.geteuid(), *(USERS if os.geteuid() == 0 else ())}
    left = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another server has its lock, or has removed it
            folder = os.open(path, _INTO)
            try:
                if os.fstat(folder).st_uid in own:
                    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    left.append(path)
            finally:
                os.close(folder)
    return left


async def _remove(folder: Path) -> None:
    command = ("rm", "-rf", "--", str(folder))
    done = await asyncio.to_thread(subprocess.run, command, stderr=subprocess.DEVNULL, check=False)
    if done.returncode:
        _log.warning("the folder of a sandbox cannot be removed: %s", folder)
