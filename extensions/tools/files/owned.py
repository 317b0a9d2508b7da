"""OwnedFiles: the stored files of one owner, as the parts of its requests name them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.extensions.tools.files.stored_files import StoredFile, StoredFiles
from penstock.pipeline.tasks import LARGE_BYTES, apart


@dataclass(frozen=True)
class OwnedFiles:
    """The files of an ``owner``."""

    files: StoredFiles
    owner: str

    async def find(self, file_id: str) -> StoredFile | None:
        """Return a file; None if there is none, or none any more."""
        return await self.files.get(file_id, self.owner)

    async def content(self, file: StoredFile) -> bytes:
        """Return the bytes of a file."""
        pieces = [piece async for piece in self.files.chunks(file)]
        return await apart(file.bytes > LARGE_BYTES, b"".join, pieces)
