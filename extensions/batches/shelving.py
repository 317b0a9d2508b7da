"""Shelving: the results of a batch of OpenAI's API become files of its owner, each of which is made once.

The batch names its files before they can be found.  A server that dies on the way leaves files that are not finished,
which are swept, and the next server makes new ones; or finished ones, which it finds by these names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TypeAlias

from penstock.extensions.batches.batch import LineResult, StoredBatch, StoredLine
from penstock.extensions.batches.errors import GivenUp
from penstock.extensions.batches.stored_batches import StoredBatches, Totals
from penstock.pipeline.tasks import in_thread
from penstock.services.store.parts import NewFile
from penstock.services.store.store import Store

PURPOSE = "batch_output"

OutputLine: TypeAlias = Callable[[StoredLine, LineResult], bytes]
"""Returns the line of a file of results, with its newline."""


class Shelving:
    """Makes the files of results of batches."""

    def __init__(self, store: Store, output_line: OutputLine) -> None:
        self._store = store
        self._stored = store.part(StoredBatches)
        self._output_line = output_line

    async def shelve(self, batch: StoredBatch, totals: Totals) -> dict[str, str]:
        """Make the files of a batch that this server ends, one of answers and one of errors, unless one has no line.

        Returns the ids of those that were made now.  Raises `GivenUp` if another server ends the batch by now.
        """
        shelf, succeeded = self._store.files, totals.counts[0]
        assert shelf is not None
        counts = {"output": succeeded, "error": sum(totals.counts) - succeeded}
        named = {"output": batch.output_file_id, "error": batch.error_file_id}
        async with AsyncExitStack() as unfinished:
            made: dict[str, NewFile] = {}
            for name, known in named.items():
                if counts[name] and (known is None or await shelf.get(known, batch.owner) is None):
                    made[name] = await unfinished.enter_async_context(shelf.uploading(batch.owner))
            ids = {name: file.id for name, file in made.items()}
            if ids:
                whole = named | ids
                if not await self._stored.name_files(batch.id, whole["output"], whole["error"]):
                    raise GivenUp
                await self._write(batch.id, made)
                for name, file in made.items():
                    kept = batch.output_expires_after
                    expires_at = None if kept is None else file.created_at + kept
                    await file.finish(f"{batch.id}_{name}.jsonl", PURPOSE, "application/jsonl", expires_at)
        return ids

    async def _write(self, batch_id: str, files: dict[str, NewFile]) -> None:
        after = 0
        while some := await self._stored.results(batch_id, after):
            texts = await in_thread(self._texts, some)
            for name, file in files.items():
                await file.write(texts[name])
            after = some[-1][0].number

    def _texts(self, some: Sequence[tuple[StoredLine, LineResult]]) -> dict[str, bytes]:
        lines: dict[str, list[bytes]] = {"output": [], "error": []}
        for line, result in some:
            lines["output" if result.kind == "succeeded" else "error"].append(self._output_line(line, result))
        return {name: b"".join(of_name) for name, of_name in lines.items()}

    async def withdraw(self, batch: StoredBatch, made: dict[str, str]) -> None:
        """Delete the files that were made here for a batch that another server has ended, unless it has them."""
        shelf, now = self._store.files, await self._stored.get(batch.id, batch.owner)
        assert shelf is not None
        for file_id in made.values():
            if now is None or file_id not in (now.output_file_id, now.error_file_id):
                await shelf.delete(file_id, batch.owner)
