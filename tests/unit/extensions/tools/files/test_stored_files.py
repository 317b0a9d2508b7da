"""Stored files: what is written is read, nothing of an unfinished upload is found, and nothing of one is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from hashlib import sha256
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from penstock.extensions.tools.files import stored_files
from penstock.extensions.tools.files.stored_files import StoredFile, StoredFiles
from penstock.pipeline.errors import StoredFileNotFound, StoreFailed
from penstock.services.store import writer
from penstock.services.store.database import DatabaseUnavailable, Unit
from penstock.services.store.store import Store
from tests.support.examples import examples
from tests.support.stored_responses import execute_sql
from tests.support.stores import FaultyDatabase, database_at

LONG = 3600.0

_numbers = count()


async def stored(store: Store, *pieces: bytes, owner: str = "ann", at: float | None = None, **named: Any) -> StoredFile:
    async with store.part(StoredFiles).uploading(owner, at) as upload:
        for piece in pieces:
            await upload.write(piece)
        return await upload.finish(**{"filename": "a.txt", "purpose": "user_data", **named})


async def rows(store: Store) -> tuple[int, int]:
    """Return the numbers of files and of chunks."""
    counts = [await store.context.read(f"select count(*) from {table}") for table in ("files", "file_chunks")]
    return counts[0][0][0], counts[1][0][0]


async def wait_for_rows(store: Store, files_left: int = 0, chunks_left: int = 0) -> None:
    """Wait until a deletion in the background is done."""
    async with asyncio.timeout(120):
        while await rows(store) != (files_left, chunks_left):
            await asyncio.sleep(0)


async def read(store: Store, file: StoredFile, start: int = 0, end: int | None = None) -> bytes:
    return b"".join([chunk async for chunk in store.part(StoredFiles).chunks(file, start, end)])


@given(st.lists(st.binary(max_size=30), max_size=8), st.integers(0, 250), st.integers(0, 250))
@examples(40, [HealthCheck.function_scoped_fixture])
async def test_what_was_written_is_read_from_any_place_to_any_other(
    store: Store, pieces: Sequence[bytes], start: int, end: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_files, "CHUNK", 7)
        file = await stored(store, *pieces, media_type="text/plain", expires_at=4e9)
    assert await store.part(StoredFiles).get(file.id, "ann") == file
    whole = b"".join(pieces)
    assert (file.bytes, file.sha256) == (len(whole), sha256(whole).hexdigest())
    assert await read(store, file) == whole
    assert await read(store, file, start, end) == whole[start:end]


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([1e9, 2e9])), max_size=8),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(["a", "b", None]),
)
@examples(25, [HealthCheck.function_scoped_fixture])
async def test_pages_list_each_file_once_in_order(
    store: Store, made: list[tuple[str, float]], limit: int, newest_first: bool, purpose: str | None
) -> None:
    owner = f"owner {next(_numbers)}"
    new = [await stored(store, owner=owner, purpose=name, at=at) for name, at in made]
    expected = sorted(
        (file for file in new if purpose in (None, file.purpose)), key=lambda file: (file.created_at, file.id)
    )
    listed: list[StoredFile] = []
    while page := await store.part(StoredFiles).page(
        owner, limit=limit, after=listed[-1].id if listed else None, newest_first=newest_first, purpose=purpose
    ):
        assert len(page) <= limit
        listed += page
    assert listed == (expected[::-1] if newest_first else expected)


async def test_file_is_not_found_before_its_upload_is_finished(store: Store, other: Store) -> None:
    async with store.part(StoredFiles).uploading("ann") as upload:
        await upload.write(bytes(stored_files.CHUNK + 1))
        assert await rows(store) == (1, 1)
        assert await store.bytes_of("ann") == stored_files.CHUNK
        for server in (store, other):
            assert await server.part(StoredFiles).get(upload.id, "ann") is None
            assert await server.part(StoredFiles).page("ann", limit=10) == []
            assert not await server.part(StoredFiles).delete(upload.id, "ann")
        file = await upload.finish("a.txt", "user_data")
    assert (
        await other.part(StoredFiles).get(file.id, "ann")
        == file
        == (await store.part(StoredFiles).page("ann", limit=10))[0]
    )
    assert await store.bytes_of("ann") == stored_files.CHUNK + 1
    assert await store.bytes_of(None) == stored_files.CHUNK + 1


async def test_files_of_others_do_not_exist(store: Store) -> None:
    file = await stored(store, b"secret")
    assert await store.part(StoredFiles).get(file.id, "bob") is None
    assert not await store.part(StoredFiles).delete(file.id, "bob")
    assert await store.part(StoredFiles).page("bob", limit=10) == []
    with pytest.raises(StoredFileNotFound):
        await store.part(StoredFiles).page("bob", limit=10, after=file.id)
    assert await store.bytes_of("bob") == 0
    assert await read(store, file) == b"secret"


@pytest.mark.parametrize("name", ["", "file-1", "\0", "\ud800", "x" * 600, "'; drop table files"])
async def test_unknown_id_is_not_found(store: Store, name: str) -> None:
    assert await store.part(StoredFiles).get(name, "ann") is None
    assert not await store.part(StoredFiles).delete(name, "ann")
    with pytest.raises(StoredFileNotFound):
        await store.part(StoredFiles).page("ann", limit=10, after=name)


class Broken(Exception):
    """The client is gone."""


@pytest.mark.parametrize("size", [0, 10, stored_files.CHUNK + 1])
async def test_upload_that_breaks_off_leaves_nothing(store: Store, size: int) -> None:
    with pytest.raises(Broken):
        async with store.part(StoredFiles).uploading("ann") as upload:
            await upload.write(bytes(size))
            raise Broken
    await wait_for_rows(store)
    assert await store.bytes_of("ann") == 0


async def test_upload_that_is_cancelled_in_a_commit_leaves_nothing(store: Store) -> None:
    async def receive() -> None:
        async with store.part(StoredFiles).uploading("ann") as upload:
            for _ in range(1_000):
                await upload.write(bytes(stored_files.CHUNK))

    task = asyncio.create_task(receive())
    while not await store.bytes_of("ann"):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await wait_for_rows(store)


async def test_upload_that_meets_an_outage_leaves_nothing(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "READ_WAIT", 0.0)  # the outage is longer than any read waits
    faulty = FaultyDatabase(database_at(store_at))
    store = Store(faulty)
    await store.open()
    with pytest.raises(StoreFailed):
        async with store.part(StoredFiles).uploading("ann") as upload:
            await upload.write(bytes(stored_files.CHUNK))
            faulty.is_down = True
            await upload.write(bytes(stored_files.CHUNK))
    for _ in range(100):
        await asyncio.sleep(0)
    faulty.is_down = False
    await wait_for_rows(store)
    await store.close()


class Unsure(FaultyDatabase):
    """A database that carries writes out without an answer while it ``is_unsure``."""

    is_unsure = False

    async def write(self, units: Sequence[Unit]) -> list[tuple[int, ...]]:
        counts = await super().write(units)
        if self.is_unsure:
            raise DatabaseUnavailable("The connection is lost.")
        return counts


async def test_no_chunk_stays_of_a_file_whose_deletion_has_no_answer(store_at: str) -> None:
    """The next sweep is long after."""
    unsure = Unsure(database_at(store_at))
    store = Store(unsure)
    await store.open()
    file = await stored(store, bytes(stored_files.CHUNK))
    unsure.is_unsure = True
    with pytest.raises(StoreFailed):
        await store.part(StoredFiles).delete(file.id, "ann")
    unsure.is_unsure = False
    await wait_for_rows(store)
    await store.close()


async def test_uploads_of_a_dead_server_are_deleted(store: Store, other: Store) -> None:
    await store.servers.join("http://a")
    await other.servers.join("http://b")
    kept = await stored(store, b"whole")
    async with store.part(StoredFiles).uploading("ann") as upload:
        await upload.write(bytes(stored_files.CHUNK))
        await other.part(StoredFiles).recover()
        assert await rows(store) == (2, 2)
        await execute_sql(store, f"update servers set beat_at = 0 where id = '{store.server_id}'")
        await store.part(StoredFiles).recover()  # it never takes its own
        assert await rows(store) == (2, 2)
        await other.part(StoredFiles).recover()
        await wait_for_rows(store, 1, 1)
        with pytest.raises(StoreFailed, match="given up"):
            await upload.finish("a.txt", "user_data")
    assert await read(other, kept) == b"whole"


async def test_expired_file_is_not_found_and_swept(store: Store) -> None:
    lasting = await stored(store, b"x", expires_at=time.time() + LONG)
    expired = await stored(store, b"y", expires_at=time.time() - 1)
    assert await store.part(StoredFiles).get(expired.id, "ann") is None
    assert await store.part(StoredFiles).page("ann", limit=10) == [lasting]
    assert not await store.part(StoredFiles).delete(expired.id, "ann")
    assert await rows(store) == (2, 2)
    await store.sweep(LONG, LONG)
    assert await rows(store) == (1, 1)


async def test_deleted_file_leaves_nothing_and_ends_its_readers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_files, "CHUNK", 100)
    monkeypatch.setattr(stored_files, "_STEP", 250)
    file, kept = await stored(store, bytes(1_000)), await stored(store, b"kept")
    reading = store.part(StoredFiles).chunks(file)
    assert await anext(reading) == bytes(100)
    assert await store.part(StoredFiles).delete(file.id, "ann")
    assert not await store.part(StoredFiles).delete(file.id, "ann")
    await wait_for_rows(store, 1, 1)
    with pytest.raises(StoredFileNotFound):
        await anext(reading)
    assert await read(store, kept) == b"kept"


async def test_chunks_without_a_file_are_swept(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is killed while it deletes a file leaves such chunks."""
    monkeypatch.setattr(stored_files, "CHUNK", 10)
    kept = await stored(store, bytes(30))
    await stored(store, bytes(35))
    await execute_sql(store, f"delete from files where id <> '{kept.id}'")
    assert await rows(store) == (1, 7)
    await store.sweep(LONG, LONG)
    assert await rows(store) == (1, 3)
