"""OwnedFiles: the stored files of one owner, as the parts of its requests name them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.pipeline.errors import StoredFileNotFound
from penstock.pipeline.protocol.params.json_body import shortened
from penstock.pipeline.tasks import LARGE, apart
from penstock.services.store.files import StoredFile, StoredFiles


@dataclass(frozen=True)
class OwnedFiles:
    """The files of an ``owner``."""

    files: StoredFiles
    owner: str

    async def find(self, file_id: str, path: str) -> StoredFile:
        """Return a file; raises `StoredFileNotFound` with the path of its id if there is none, or none any more."""
        if (file := await self.files.get(file_id, self.owner)) is None:
            is_sent = path.endswith("]")  # else it is of a conversation that this parameter continues
            raise StoredFileNotFound(shortened(file_id), param=f"{path}.file_id" if is_sent else path)
        return file

    async def content(self, file: StoredFile) -> bytes:
        """Return the bytes of a file."""
        pieces = [piece async for piece in self.files.chunks(file)]
        return await apart(file.bytes > LARGE, b"".join, pieces)
