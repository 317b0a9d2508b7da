"""The interface to what reads the files of requests, which is an extension.

The host ``files`` of the group ``penstock.hosts`` is a function that takes the `HostSettings`, and returns the `Files`.
Nothing here imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.pipeline.errors import InvalidRequest, StoredFileNotFound
from penstock.pipeline.plugins import HOSTS, optional_function
from penstock.pipeline.protocol.items import FileReading, InputFile, InputImage
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.protocol.readings import file_instead, image_instead
from penstock.services.file_marks import safe_name
from penstock.services.tools import HostSettings

if TYPE_CHECKING:
    from penstock.services.store.store import Store

UNREAD = "This server reads no files."

_FILES = "files"
"""The entry point that opens what reads files."""


class PlacedFile(NamedTuple):
    """A file in an item, or an image that is a stored file."""

    item_id: str
    part: InputFile | InputImage
    path: str | None = None
    """The place of the part in the request, if the client sends it now; else it is of the conversation before."""

    @property
    def file_id(self) -> str | None:
        """The id of a stored file; None if the client sends the file itself, or its URL."""
        return self.part.file_id if isinstance(self.part.file_id, str) else None

    def not_found(self) -> StoredFileNotFound:
        """Return the error about an id that names no file of the client."""
        return StoredFileNotFound(shortened(self.file_id or ""), param=self.path and f"{self.path}.file_id")

    def instead(self, name: str, reason: str) -> str:
        """Return the sentence that the model reads in the place of a file with a name."""
        return image_instead(reason) if isinstance(self.part, InputImage) else file_instead(name, reason)


class Files(Protocol):
    """Reads the files of requests."""

    async def read_all(
        self, files: Sequence[PlacedFile], owner: str, store: Store, *, sees_images: bool = False
    ) -> Sequence[FileReading]:
        """Return what the model reads for each file of an owner, whose ids name files in the ``store``.

        Raises `InvalidRequest` with the path of a file that the client sends now, if it cannot be read, and
        `StoredFileNotFound` for its id.  In the place of any other, the model then reads a sentence.
        """
        ...


class NoFiles:
    """A server that reads no files, and so knows no ids of files."""

    async def read_all(
        self, files: Sequence[PlacedFile], owner: str, store: Store, *, sees_images: bool = False
    ) -> Sequence[FileReading]:
        return [_unread(file) for file in files]


def no_files(_: HostSettings) -> NoFiles:
    """Read no files."""
    return NoFiles()


def _unread(file: PlacedFile) -> str:
    name = getattr(file.part, "filename", "")
    name = safe_name(name if isinstance(name, str) else "")
    if file.path is None:
        return file.instead(name, UNREAD)
    if file.file_id is not None:
        raise file.not_found()
    raise InvalidRequest(f"The file {name!r} cannot be read. {UNREAD}", param=file.path)


def open_files(settings: HostSettings | None = None) -> Files:
    """Return what reads files with these settings; each has a cache and processes of its own."""
    opens: Callable[[HostSettings], Files] = optional_function(_FILES, HOSTS) or no_files
    return opens(settings or HostSettings())
