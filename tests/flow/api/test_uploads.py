"""The Uploads API: files in parts, on both databases, with openai-python."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from functools import partial
from hashlib import md5
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Upload
from openai.types.upload_create_params import UploadCreateParams
from openai.types.uploads import UploadPart

from penstock.api.http.auth import Keys
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.extensions.tools.files import stored_uploads
from penstock.extensions.tools.files.stored_files import CHUNK, StoredFiles
from penstock.extensions.tools.files.stored_uploads import StoredUploads
from penstock.extensions.tools.resources import uploads
from penstock.extensions.tools.resources.uploads import UploadObject, UploadPartObject
from penstock.pipeline.protocol.params.files import CreateUpload
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store.database import Statement, Unit
from tests.support.api_clients import openai_client
from tests.support.sdk_types import fields_of
from tests.support.server import HELLO, ScriptedServer, running_server, script

CONTENT = random.Random(1).randbytes(3 * CHUNK + 100)


@pytest.fixture
async def served(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), store_at, resources=["files", "uploads"]) as served:
        yield served


@pytest.fixture
async def sdk(served: ScriptedServer) -> AsyncGenerator[openai.AsyncOpenAI, None]:
    async with openai_client(served.url) as sdk:
        yield sdk


async def begun(sdk: openai.AsyncOpenAI, size: int = 6, **fields: Any) -> Upload:
    given: dict[str, Any] = {"filename": "a.txt", "mime_type": "text/plain", "purpose": "user_data", **fields}
    return await sdk.uploads.create(bytes=size, **given)


async def part_rows(served: ScriptedServer) -> int:
    ((count,),) = await served.store.context.read("select count(*) from files where upload_id is not null")
    return int(count)


async def no_chunks_but(served: ScriptedServer, count: int) -> None:
    async with asyncio.timeout(120):
        while (await served.store.context.read("select count(*) from file_chunks"))[0][0] != count:
            await asyncio.sleep(0.01)


async def test_helper_of_the_sdk_uploads_a_file(
    sdk: openai.AsyncOpenAI, served: ScriptedServer, tmp_path: Path
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(CONTENT)
    made = await sdk.uploads.upload_file_chunked(
        file=path, mime_type="application/jsonl", purpose="batch", part_size=CHUNK + 7, md5=md5(CONTENT).hexdigest()
    )
    assert (made.status, made.bytes, made.filename) == ("completed", len(CONTENT), "lines.jsonl")
    assert made.file is not None
    assert (made.file.bytes, made.file.filename, made.file.purpose) == (len(CONTENT), "lines.jsonl", "batch")
    assert (await sdk.files.content(made.file.id)).content == CONTENT
    assert [file async for file in sdk.files.list()] == [made.file]
    assert await part_rows(served) == 0
    await no_chunks_but(served, 4)


async def test_helper_of_the_sdk_uploads_bytes(sdk: openai.AsyncOpenAI) -> None:
    made = await sdk.uploads.upload_file_chunked(
        file=b"Sun.", filename="a.txt", bytes=4, mime_type="text/plain", purpose="user_data"
    )
    assert made.file is not None
    assert (await sdk.files.content(made.file.id)).content == b"Sun."


async def test_parts_stand_in_the_order_that_the_client_names(sdk: openai.AsyncOpenAI) -> None:
    upload = await begun(sdk)
    one, two, spare = [await sdk.uploads.parts.create(upload.id, data=data) for data in (b"one", b"two", b"oops")]
    assert (one.object, one.upload_id) == ("upload.part", upload.id)
    assert [file async for file in sdk.files.list()] == []
    with pytest.raises(openai.NotFoundError):
        await sdk.files.content(spare.id)
    made = await sdk.uploads.complete(upload.id, part_ids=[two.id, one.id])
    assert made.file is not None
    assert (await sdk.files.content(made.file.id)).content == b"twoone"


async def test_completion_that_is_sent_again_makes_no_second_file(sdk: openai.AsyncOpenAI) -> None:
    upload = await begun(sdk)
    part = await sdk.uploads.parts.create(upload.id, data=b"abcdef")
    made = await asyncio.gather(*(sdk.uploads.complete(upload.id, part_ids=[part.id]) for _ in range(4)))
    made.append(await sdk.uploads.complete(upload.id, part_ids=[part.id]))
    files = {each.file.id for each in made if each.file}
    assert [file.id async for file in sdk.files.list()] == list(files)


@pytest.mark.parametrize("late", ["parts", "chunks"])
@pytest.mark.parametrize("ending", ["complete", "cancel"])
async def test_completion_says_how_another_request_has_ended_the_upload(
    sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, ending: str, late: str
) -> None:
    """It ends between two steps of the completion: before the parts are found, or before they are read."""
    upload = await begun(sdk)
    part = await sdk.uploads.parts.create(upload.id, data=b"abcdef")
    find, read, ended = StoredFiles.parts, StoredFiles.chunks, list[Any]()

    async def end_it() -> None:
        monkeypatch.setattr(StoredFiles, "parts", find)
        monkeypatch.setattr(StoredFiles, "chunks", read)
        end = sdk.uploads.cancel if ending == "cancel" else partial(sdk.uploads.complete, part_ids=[part.id])
        ended.append(await end(upload.id))

    async def find_late(*given: Any) -> Any:
        await end_it()
        return await find(*given)

    async def read_late(*given: Any) -> AsyncGenerator[bytes, None]:
        await end_it()
        async for chunk in read(*given):
            yield chunk

    monkeypatch.setattr(StoredFiles, late, find_late if late == "parts" else read_late)
    asking = sdk.uploads.complete(upload.id, part_ids=[part.id])
    if ending == "complete":
        assert await asking == ended[0]
        return
    with pytest.raises(openai.BadRequestError, match="is cancelled"):
        await asking
    assert [file async for file in sdk.files.list()] == []


async def test_upload_is_completed_by_another_server(store_at: str, tmp_path: Path) -> None:
    def server() -> Any:
        return running_server(ScriptedEngine(script(HELLO)), store_at, resources=["files", "uploads"])

    async with server() as one, server() as two, openai_client(one.url) as first, openai_client(two.url) as second:
        upload = await begun(first)
        parts = [await sdk.uploads.parts.create(upload.id, data=b"abc") for sdk in (first, second)]
        names = [part.id for part in parts]
        made = await asyncio.gather(*(sdk.uploads.complete(upload.id, part_ids=names) for sdk in (first, second)))
        assert made[0] == made[1]
        assert len([file async for file in first.files.list()]) == 1


@pytest.mark.parametrize(
    ("names", "md5_of", "param"),
    [
        ([0], None, "part_ids"),
        ([0, 1, 2], None, "part_ids"),
        ([0, 0], None, "part_ids"),
        ([0, "part_none"], None, "part_ids[1]"),
        ([], None, "part_ids"),
        ([0, 1], b"twoone", "md5"),
        ([0, 1], "no checksum", "md5"),
    ],
)
async def test_wrong_completion_is_refused_and_can_be_mended(
    sdk: openai.AsyncOpenAI, names: list[Any], md5_of: bytes | str | None, param: str
) -> None:
    upload = await begun(sdk)
    parts = [(await sdk.uploads.parts.create(upload.id, data=data)).id for data in (b"one", b"two", b"x")]
    checksum: Any = {} if md5_of is None else {"md5": md5(md5_of).hexdigest() if isinstance(md5_of, bytes) else md5_of}
    named = [parts[each] if isinstance(each, int) else each for each in names]
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.uploads.complete(upload.id, part_ids=named, **checksum)
    assert refused.value.param == param
    assert [file async for file in sdk.files.list()] == []
    made = await sdk.uploads.complete(upload.id, part_ids=parts[:2], md5=md5(b"onetwo").hexdigest().upper())
    assert made.status == "completed"


async def test_cancelled_upload_takes_nothing_more(sdk: openai.AsyncOpenAI, served: ScriptedServer) -> None:
    upload = await begun(sdk)
    part = await sdk.uploads.parts.create(upload.id, data=b"abcdef")
    for _ in range(2):
        cancelled = await sdk.uploads.cancel(upload.id)
        assert cancelled == upload.model_copy(update={"status": "cancelled", "file": None})
    await refused_as(sdk, upload.id, part.id, "cancelled")
    assert await part_rows(served) == 0
    await no_chunks_but(served, 0)


async def refused_as(sdk: openai.AsyncOpenAI, upload_id: str, part_id: str, state: str) -> None:
    for ask in (
        sdk.uploads.parts.create(upload_id, data=b"x"),
        sdk.uploads.complete(upload_id, part_ids=[part_id]),
    ):
        with pytest.raises(openai.BadRequestError, match=f"is {state}") as refused:
            await ask
        assert refused.value.param == "upload_id"


async def test_completed_upload_cannot_be_cancelled(sdk: openai.AsyncOpenAI) -> None:
    upload = await begun(sdk)
    part = await sdk.uploads.parts.create(upload.id, data=b"abcdef")
    await sdk.uploads.complete(upload.id, part_ids=[part.id])
    with pytest.raises(openai.BadRequestError, match="is completed"):
        await sdk.uploads.cancel(upload.id)


async def test_upload_expires_and_is_swept(
    sdk: openai.AsyncOpenAI, served: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = await begun(sdk)
    assert upload.expires_at - upload.created_at == 3_600
    monkeypatch.setattr(stored_uploads, "LASTS", -1.0)
    late = await begun(sdk)
    part = await sdk.uploads.parts.create(upload.id, data=b"abcdef")
    await refused_as(sdk, late.id, part.id, "expired")
    for name in ("files", "uploads"):
        await served.store.context.database.write([moved(f"update {name} set expires_at = expires_at - 100000")])
    for kind in (StoredFiles, StoredUploads):
        await served.store.part(kind).sweep()
    await no_chunks_but(served, 0)
    with pytest.raises(openai.NotFoundError, match=f"No such Upload object: {upload.id}"):
        await sdk.uploads.cancel(upload.id)


def moved(sql: str) -> Any:
    return Unit((Statement(sql, ()),), counted=True)


async def test_limits_of_bytes(
    sdk: openai.AsyncOpenAI, served: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PART", 4)
    with pytest.raises(openai.BadRequestError, match="--max-upload-bytes") as refused:
        await begun(sdk, size=(512 << 20) + 1)
    assert refused.value.param == "bytes"
    upload = await begun(sdk)
    with pytest.raises(openai.APIStatusError) as large:
        await sdk.uploads.parts.create(upload.id, data=b"12345")
    assert large.value.status_code == 413
    parts = [await sdk.uploads.parts.create(upload.id, data=b"123") for _ in range(5)]
    with pytest.raises(openai.BadRequestError, match="cancel it"):
        await sdk.uploads.parts.create(upload.id, data=b"123")
    made = await sdk.uploads.complete(upload.id, part_ids=[part.id for part in parts[3:]])
    assert made.status == "completed"
    assert await part_rows(served) == 0


async def test_bytes_of_parts_count_as_those_of_their_key(store_at: str) -> None:
    keys = Keys(given=("sk-one-0123456789", "sk-other-0123456789"))
    admission = Admission(tables={"default": KeyLimits(stored_bytes=2 * CHUNK)})
    served = running_server(
        ScriptedEngine(script(HELLO)), store_at, resources=["files", "uploads"], keys=keys, admission=admission
    )
    async with served as server, openai_client(server.url, "sk-one-0123456789") as sdk:
        with pytest.raises(openai.APIStatusError) as full:
            await begun(sdk, size=3 * CHUNK)
        upload = await begun(sdk, size=2 * CHUNK - 100)
        assert full.value.status_code == 429
        part = await sdk.uploads.parts.create(upload.id, data=bytes(CHUNK))
        assert await server.store.bytes_of(None) >= CHUNK
        with pytest.raises(openai.RateLimitError):
            await sdk.uploads.parts.create(upload.id, data=bytes(CHUNK))
        async with openai_client(server.url, "sk-other-0123456789") as other:
            for ask in (
                other.uploads.cancel(upload.id),
                other.uploads.parts.create(upload.id, data=b"x"),
                other.uploads.complete(upload.id, part_ids=[part.id]),
            ):
                with pytest.raises(openai.NotFoundError):
                    await ask


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes", 0),
        ("bytes", "6"),
        ("filename", ""),
        ("mime_type", 5),
        ("purpose", "fine-tune"),
        ("expires_after", {"anchor": "created_at", "seconds": 5}),
    ],
)
async def test_wrong_field_is_refused(served: ScriptedServer, field: str, value: Any) -> None:
    body = {"bytes": 6, "filename": "a.txt", "mime_type": "text/plain", "purpose": "batch", field: value}
    status, answer = await served.post(body, "/v1/uploads")
    assert status == 400
    assert answer["error"]["param"].partition(".")[0] == field


async def test_file_of_an_upload_expires_when_it_says(sdk: openai.AsyncOpenAI) -> None:
    after: dict[str, Any] = {"anchor": "created_at", "seconds": 7_200}
    upload = await begun(sdk, expires_after=after, filename="../up/a.txt", mime_type="no type")
    part = await sdk.uploads.parts.create(upload.id, data=b"abcdef")
    made = await sdk.uploads.complete(upload.id, part_ids=[part.id])
    assert made.file is not None
    assert (made.file.expires_at or 0) - made.file.created_at == 7_200
    assert made.file.filename == "a.txt"


@pytest.mark.parametrize(
    ("ours", "theirs"), [(UploadObject, Upload), (UploadPartObject, UploadPart)], ids=["upload", "part"]
)
def test_objects_have_the_fields_of_the_sdk(ours: Any, theirs: Any) -> None:
    assert set(ours.__struct_fields__) == theirs.model_fields.keys()


def test_creation_has_the_fields_of_the_sdk() -> None:
    assert CreateUpload.model_fields.keys() == fields_of(UploadCreateParams).keys()
