"""Ingestion: the background work on the files of vector stores.

Each server takes files that no living server works on, from the owners in turns, and works on a few at once.  All that
is left to do is in the store, so that another server goes on if one is killed: it reads the file anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from penstock.extensions.tools.files.file_reader import FileReader, NotRead
from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.search.chunking import Cut, chunks
from penstock.extensions.tools.search.embedder import Embedder, NotEmbedded
from penstock.extensions.tools.search.terms import terms
from penstock.extensions.tools.search.vector_stores import Chunk, Claimed, FileError, StoredVectorStores
from penstock.pipeline.errors import DiskFull, StoreFailed
from penstock.pipeline.logs import current_response
from penstock.pipeline.tasks import beside, in_thread, wait_at_most
from penstock.services.store.store import Store
from penstock.stages.models.harmony.vocabulary import load_encoding

logger = logging.getLogger(__name__)

AT_ONCE = 2
"""Files that a server reads for vector stores at once."""

GROUP = 64
"""Chunks that are stored, and embedded, together."""

LOOK_SECONDS = 2.0
"""Seconds between two looks for files that other servers have left."""

RETRIES = 3
"""Requests for the same vectors after one that has failed."""

RETRY_SECONDS = 1.0
"""Seconds before the first of them; each pause is twice the one before."""


class _GivenUp(Exception):
    """The file has left its vector store, or another server has taken over."""


class Ingestion:
    """Works on the files of the vector stores of ``store``, for the length of the block `running`."""

    def __init__(self, store: Store, reader: FileReader, embedder: Embedder | None = None) -> None:
        self._store = store
        self._stores = store.part(StoredVectorStores)
        self._reader = reader
        self._embedder = embedder
        self._woken = asyncio.Event()
        self._working: dict[int, str] = {}
        """The owners of the files that this server works on, by the number of the file."""

    def wake(self) -> None:
        """Look for files at once."""
        self._woken.set()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None, None]:
        """Work for the length of the block; at its end, release what is not done."""
        await in_thread(load_encoding)  # while this is built, nothing else computes
        async with beside(*(self._work() for _ in range(AT_ONCE))):
            yield

    async def _work(self) -> None:
        while True:
            self._woken.clear()
            try:
                while claimed := await self._next():
                    await self._done(claimed)
            except StoreFailed as error:
                logger.warning("Files of vector stores have to wait for the store: %s", error)
            except Exception:
                logger.exception("A bug in the work on files of vector stores")
            await wait_at_most(LOOK_SECONDS, self._woken)  # work may also come from another server

    async def _next(self) -> Claimed | None:
        """Claim a file of an owner of whose files the fewest are worked on; None if there is none."""
        waiting = await self._stores.waiting(AT_ONCE + 1)
        busy = list(self._working.values())
        for owner, number in sorted(waiting, key=lambda each: busy.count(each[0])):
            if number not in self._working:
                self._working[number] = owner
                try:
                    claimed = await self._stores.claim(number)
                except BaseException:
                    del self._working[number]
                    raise
                if claimed is not None:
                    return claimed
                del self._working[number]
        return None

    async def _done(self, claimed: Claimed) -> None:
        """Do all that is left to do with a file."""
        number = claimed.file.number
        try:
            current_response.set(claimed.file.id)
            if claimed.work == "read":
                with suppress(_GivenUp):
                    await self._read(claimed)
            again = await self._stores.claim(number)
            if again is not None and again.work != "read":
                await self._stores.clear(number)
                await self._stores.cleared(number)
        except BaseException:
            with suppress(StoreFailed):  # this server can claim the file again
                await self._stores.release(number)
            raise
        finally:
            current_response.set("-")
            del self._working[number]

    async def _read(self, claimed: Claimed) -> None:
        try:
            await self._ingest(claimed)
        except NotRead as error:
            await self._fail(claimed, "unsupported_file" if error.is_unsupported else "invalid_file", str(error))
        except NotEmbedded as error:
            await self._fail(claimed, "server_error", f"The server of --embeddings fails. {error}")
        except DiskFull as error:
            await self._fail(claimed, "server_error", error.message)
        except (StoreFailed, _GivenUp):
            raise
        except Exception:
            logger.exception("A file could not be read for a vector store")
            await self._fail(claimed, "server_error", "Internal error.")

    async def _fail(self, claimed: Claimed, code: str, message: str) -> None:
        logger.info("A file of a vector store failed, %s: %s", code, message)
        await self._stores.fail(claimed.file.number, FileError(code, message))  # type: ignore[arg-type]

    async def _ingest(self, claimed: Claimed) -> None:
        """Read a file anew, and store its chunks."""
        file = claimed.file
        await self._stores.clear(file.number)
        stores = await self._stores.find([file.vector_store_id], claimed.owner)
        if not stores:  # it has left since the replacement of a file was claimed
            await self._stores.give_up(file.number)
        for store in stores:
            text = await self._text(claimed)
            cuts = chunks(text, *file.chunking, load_encoding())
            size = place = 0
            while group := await in_thread(_chunks, cuts, store.number):
                vectors = await self._vectors([chunk.text for chunk in group])
                data = None if vectors is None else vectors.tobytes()
                if not await self._stores.append(file.number, place, group, data):
                    raise _GivenUp
                place += len(group)
                size += sum(len(chunk.text.encode()) + len(chunk.terms.encode()) for chunk in group) + len(data or b"")
            if not await self._stores.complete(file.number, size, place, file.vector_store_id):
                raise _GivenUp

    async def _text(self, claimed: Claimed) -> str:
        files = self._store.part(StoredFiles)
        stored = await files.get(claimed.file.id, claimed.owner)
        if stored is None:
            raise NotRead("It does not exist any more.")
        if stored.bytes > self._reader.limits.bytes:
            raise NotRead(f"It is larger than {self._reader.limits.bytes:,} bytes.")
        data = await files.content(stored)
        text = await self._reader.text_of(data, stored.filename, stored.media_type, claimed.owner)
        return text.replace("\0", " ")

    async def _vectors(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        if self._embedder is None:
            return None
        for attempt in range(RETRIES):
            with suppress(NotEmbedded):
                return await self._embedder.embed(texts)
            await asyncio.sleep(RETRY_SECONDS * 2**attempt)
        return await self._embedder.embed(texts)


def _chunks(cuts: Iterator[Cut], number: int) -> list[Chunk]:
    return [Chunk(cut.text, cut.fresh, terms(cut.text, number)) for cut in islice(cuts, GROUP)]
