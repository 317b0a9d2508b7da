"""The Files API, in OpenAI's form and in Anthropic's, on both databases."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from penstock.api.http.auth import Keys
from penstock.api.limits import admission as admissions
from penstock.api.limits.admission import Admission
from penstock.api.limits.table import KeyLimits
from penstock.api.start.assembly import database
from penstock.extensions.tools.files.stored_files import CHUNK
from penstock.extensions.tools.resources import files, upload_form
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.store import writer
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store
from tests.support.api_clients import openai_client
from tests.support.server import DEFAULTS, HELLO, ScriptedServer, running_server, script

Json = dict[str, Any]

FORM = {"Content-Type": "multipart/form-data; boundary=b"}
ANTHROPIC = {"anthropic-version": "2023-06-01", "anthropic-beta": "files-api-2025-04-14"}


ONE, OTHER = "sk-one-0123456789", "sk-other-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
async def served(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with running_server(ScriptedEngine(script(HELLO)), store_at, resources=["files"]) as served:
        yield served


async def rows(store: Store) -> list[int]:
    return [(await store.context.read(f"select count(*) from {name}"))[0][0] for name in ("files", "file_chunks")]


async def wait_until_empty(store: Store) -> None:
    async with asyncio.timeout(120):
        while await rows(store) != [0, 0]:
            await asyncio.sleep(0.01)


async def send(served: ScriptedServer, form: Any, **headers: str) -> tuple[int, Json]:
    async with served.client.post(f"{served.url}/v1/files", data=form, headers=headers) as answer:
        return answer.status, await answer.json()


def form(content: Any = b"Hello", name: str = "a.txt", **fields: str) -> aiohttp.FormData:
    made = aiohttp.FormData(quote_fields=False)
    for key, value in ({"purpose": "user_data"} | fields).items():
        made.add_field(key, value)
    content = BytesIO(content) if isinstance(content, bytes) else content
    made.add_field("file", content, filename=name, content_type="text/plain")
    return made


async def test_openai_python_manages_files(sdk: openai.AsyncOpenAI) -> None:
    content = bytes(range(256)) * 5_000
    made = await sdk.files.create(file=("report.pdf", content, "application/pdf"), purpose="user_data")
    assert re.fullmatch("file-[0-9a-f]{32}", made.id)
    assert (made.bytes, made.filename, made.purpose, made.status) == (
        len(content),
        "report.pdf",
        "user_data",
        "processed",
    )
    assert (made.object, made.expires_at) == ("file", None)
    assert await sdk.files.retrieve(made.id) == made
    assert await sdk.files.wait_for_processing(made.id) == made
    answer = await sdk.files.content(made.id)
    assert answer.content == content
    assert answer.response.headers["Content-Type"] == "application/pdf"
    assert [file async for file in sdk.files.list()] == [made]
    deleted = await sdk.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    for ask in (sdk.files.retrieve, sdk.files.content, sdk.files.delete):
        with pytest.raises(openai.NotFoundError, match=f"No such File object: {made.id}"):
            await ask(made.id)


async def test_openai_python_lists_files(sdk: openai.AsyncOpenAI) -> None:
    purposes: list[Any] = ["user_data", "vision", "user_data", "batch", "user_data"]
    made = [await sdk.files.create(file=("a", b"x"), purpose=purpose) for purpose in purposes]
    assert [file async for file in sdk.files.list(limit=2)] == made[::-1]
    assert [file async for file in sdk.files.list(limit=2, order="asc", purpose="user_data")] == made[::2]
    page = await sdk.files.list(after=made[1].id)
    assert (page.data, page.has_more) == (made[:1], False)
    wrongs: list[Any] = [{"limit": 0}, {"limit": 10_001}, {"order": "up"}]
    for wrong in wrongs:
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.files.list(**wrong)
        assert refused.value.param == next(iter(wrong))
    with pytest.raises(openai.NotFoundError) as missing:
        await sdk.files.list(after="file-none")
    assert missing.value.param == "after"


async def test_file_expires_when_its_upload_says(sdk: openai.AsyncOpenAI, served: ScriptedServer) -> None:
    made = await sdk.files.create(
        file=("a", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 3_600}
    )
    assert made.expires_at == made.created_at + 3_600
    for seconds in (3_599, 2_592_001):
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.files.create(
                file=("a", b"x"), purpose="user_data", expires_after={"anchor": "created_at", "seconds": seconds}
            )
        assert refused.value.param == "expires_after.seconds"


async def test_anthropic_python_manages_files(claude: anthropic.AsyncAnthropic) -> None:
    made = await claude.beta.files.upload(file=("a.csv", b"a,b", "text/csv"), expires_in_seconds=7_200)
    assert (made.filename, made.mime_type, made.size_bytes, made.type) == ("a.csv", "text/csv", 3, "file")
    assert made.downloadable
    assert isinstance(made.expires_at, datetime)
    assert (made.expires_at - made.created_at).total_seconds() == 7_200
    assert await claude.beta.files.retrieve_metadata(made.id) == made
    assert await (await claude.beta.files.download(made.id)).read() == b"a,b"
    others = [await claude.beta.files.upload(file=(str(number), b"x")) for number in range(4)]
    every = [*reversed(others), made]
    assert [file async for file in claude.beta.files.list(limit=2)] == every
    assert [file async for file in claude.beta.files.list(ids=[made.id, "file-none", others[0].id])] == [
        made,
        others[0],
    ]
    deleted = await claude.beta.files.delete(made.id)
    assert (deleted.id, deleted.type) == (made.id, "file_deleted")
    with pytest.raises(anthropic.NotFoundError) as missing:
        await claude.beta.files.retrieve_metadata(made.id)
    body: Any = missing.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "not_found_error"
    assert missing.value.request_id


async def test_older_clients_of_anthropic_list_by_ids(served: ScriptedServer, claude: anthropic.AsyncAnthropic) -> None:
    made = [(await claude.beta.files.upload(file=(str(number), b"x"))).id for number in range(5)][::-1]

    async def listed(query: str) -> tuple[list[str], bool]:
        async with served.client.get(f"{served.url}/v1/files?limit=2{query}", headers=ANTHROPIC) as answer:
            page = await answer.json()
            assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
            return [file["id"] for file in page["data"]], page["has_more"]

    assert await listed("") == (made[:2], True)
    assert await listed(f"&after_id={made[1]}") == (made[2:4], True)
    assert await listed(f"&after_id={made[3]}") == (made[4:], False)
    assert await listed(f"&before_id={made[4]}") == (made[2:4], True)
    assert await listed(f"&before_id={made[2]}") == (made[:2], False)
    for query in ("after_id=a&before_id=b", "after_id=file-none", "limit=1001"):
        async with served.client.get(f"{served.url}/v1/files?{query}", headers=ANTHROPIC) as answer:
            assert answer.status in (400, 404)
            assert (await answer.json())["type"] == "error"


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\Users\\ann\\cv.docx", "cv.docx"),
        ("a\tb.txt", "a_b.txt"),
        ("..", "file"),
        ("日本.pdf", "日本.pdf"),
        ('say "hi".txt', 'say "hi".txt'),
    ],
)
async def test_names_lose_folders_and_control_characters(served: ScriptedServer, name: str, kept: str) -> None:
    body = (
        f'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="{_quoted(name)}"\r\n\r\nx\r\n--b--\r\n'
    )
    status, made = await send(served, body.encode(), **FORM)
    assert (status, made["filename"]) == (200, kept)
    async with served.client.get(f"{served.url}/v1/files/{made['id']}/content") as answer:
        assert answer.content_disposition is not None
        assert answer.content_disposition.filename == kept
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.content_type == "application/octet-stream"


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        ('filename="C:\\dir\\x.txt"', "x.txt"),
        ('filename="C:\\\\dir\\\\x.txt"', "x.txt"),
        ('filename="a%22b.txt"', 'a"b.txt'),
        ('filename="a\\"b.txt"', 'a"b.txt'),
        ('filename="a%0D%0Ab.txt"', "a__b.txt"),
        ('filename="100%.txt"', "100%.txt"),
        ('filename="a%20b.txt"', "a%20b.txt"),
        ("filename=plain.txt", "plain.txt"),
        ("filename=\"x.txt\"; filename*=utf-8''%E2%82%AC.txt", "\u20ac.txt"),
        ("filename*=utf-8''%E2%82%AC.txt; filename=\"x.txt\"", "\u20ac.txt"),
        ('filename="in\u200bvoice.pdf"', "in_voice.pdf"),
    ],
)
async def test_names_are_read_as_clients_write_them(served: ScriptedServer, written: str, kept: str) -> None:
    part = f'--b\r\nContent-Disposition: form-data; name="file"; {written}\r\n\r\nx\r\n'
    status, made = await send(served, f"{PURPOSE}{part}{END}".encode(), **FORM)
    assert (status, made["filename"]) == (200, kept)


@pytest.mark.parametrize("field", ["name", "filename", "filename*", "purpose", "x y"])
async def test_names_in_a_form_may_have_any_bytes(served: ScriptedServer, field: str) -> None:
    for value in (b'"\xff\xfe"', b'"a\xed\xa0\x80b"', b'"a', b"a b", b'"a"; name="b"', b"unicode_escape''%5Cud800"):
        part = b'--b\r\nContent-Disposition: form-data; name="file"; %b=%b\r\n\r\nx\r\n' % (field.encode(), value)
        status, answer = await send(served, PURPOSE.encode() + part + END.encode(), **FORM)
        assert status in (200, 400), answer


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"')


@pytest.mark.parametrize(
    ("asked", "content_range", "content"),
    [
        ("bytes=0-0", "bytes 0-0/10", b"0"),
        ("bytes=2-4", "bytes 2-4/10", b"234"),
        ("bytes=7-", "bytes 7-9/10", b"789"),
        ("bytes=-3", "bytes 7-9/10", b"789"),
        ("bytes=4-99", "bytes 4-9/10", b"456789"),
        ("bytes=0-9", None, b"0123456789"),
        ("bytes=5-2", None, b"0123456789"),
        ("bytes=1-2,4-5", None, b"0123456789"),
        ("lines=1-2", None, b"0123456789"),
    ],
)
async def test_content_has_ranges(
    served: ScriptedServer, asked: str, content_range: str | None, content: bytes
) -> None:
    _, made = await send(served, form(b"0123456789"))
    async with served.client.get(f"{served.url}/v1/files/{made['id']}/content", headers={"Range": asked}) as answer:
        assert answer.status == (206 if content_range else 200)
        assert answer.headers.get("Content-Range") == content_range
        assert await answer.read() == content


@pytest.mark.parametrize("content", [b"0123456789", b""])
async def test_head_of_content_is_answered_without_it(served: ScriptedServer, content: bytes) -> None:
    """A range holds for GET alone."""
    _, made = await send(served, form(content))
    url = f"{served.url}/v1/files/{made['id']}/content"
    async with served.client.get(url) as whole, served.client.head(url, headers={"Range": "bytes=2-4"}) as answer:
        assert answer.status == whole.status == 200
        for name in ("Content-Length", "Content-Type", "Content-Disposition", "ETag"):
            assert answer.headers[name] == whole.headers[name]
        assert answer.headers["Content-Length"] == str(len(content))
        assert await answer.read() == b""
    async with served.client.head(f"{served.url}/v1/files/file_none/content") as missing:
        assert missing.status == 404


async def test_range_of_another_file_is_not_cut_out_of_this_one(served: ScriptedServer) -> None:
    _, made = await send(served, form(b"0123456789"))
    url = f"{served.url}/v1/files/{made['id']}/content"
    async with served.client.get(url) as answer:
        tag = answer.headers["ETag"]
    for condition, content in (
        (tag, b"01"),
        ('"other"', b"0123456789"),
        ("Fri, 27 Nov 2026 13:49:30 GMT", b"0123456789"),
    ):
        headers = {"Range": "bytes=0-1", "If-Range": condition}
        async with served.client.get(url, headers=headers) as answer:
            assert await answer.read() == content


async def test_files_have_no_scopes(served: ScriptedServer) -> None:
    async with served.client.get(f"{served.url}/v1/files?scope_id=a", headers=ANTHROPIC) as answer:
        assert (answer.status, "no scopes" in await answer.text()) == (400, True)


async def test_range_after_the_end_is_refused(served: ScriptedServer) -> None:
    _, made = await send(served, form(b"0123456789"))
    url = f"{served.url}/v1/files/{made['id']}/content"
    async with served.client.get(url, headers={"Range": "bytes=10-"}) as answer:
        assert (answer.status, answer.headers["Content-Range"]) == (416, "bytes */10")
        assert (await answer.json())["error"]["param"] == "Range"


PURPOSE = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nuser_data\r\n'
FILE = '--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
END = "--b--\r\n"
WRONG: dict[str, tuple[str, str | None]] = {
    "no file": (PURPOSE + END, "file"),
    "no purpose": (FILE + END, "purpose"),
    "other purpose": (PURPOSE.replace("user_data", "fine-tune") + FILE + END, "purpose"),
    "two files": (PURPOSE + FILE + FILE + END, "file"),
    "two purposes": (PURPOSE + PURPOSE + END, "purpose"),
    "purpose in two forms": (PURPOSE + PURPOSE.replace("purpose", "purpose[a]") + END, "purpose[a]"),
    "purpose in brackets": (PURPOSE.replace("purpose", "purpose[a]") + FILE + END, "purpose"),
    "no end": (FILE.removesuffix("\r\n"), None),
    "no boundary in it": ("nothing", None),
    "nothing": ("", None),
    "no name": ("--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n" + END, None),
    "no headers": ("--b\r\n\r\nx\r\n" + END, None),
    "long headers": ("--b\r\n" + "x: y\r\n" * 10_000 + "\r\nx\r\n" + END, None),
    "long header": (f"--b\r\nx: {'y' * 100_000}\r\n\r\nx\r\n{END}", None),
    "long field": (PURPOSE.replace("user_data", "x" * 5_000) + END, None),
    "many parts": ("".join(PURPOSE.replace("purpose", f"x{number}") for number in range(30)) + END, None),
    "form in a form": (f"--b\r\nContent-Type: multipart/mixed; boundary=c\r\n\r\n--c\r\n\r\nx\r\n--c--\r\n{END}", None),
    "base64": (FILE.replace("\r\n\r\n", "\r\nContent-Transfer-Encoding: base64\r\n\r\n") + END, None),
    "wrong bytes in a field": (PURPOSE.replace("user_data", "\udcff") + END, "purpose"),
}


@pytest.mark.parametrize("which", WRONG)
async def test_wrong_form_is_refused_and_leaves_nothing(served: ScriptedServer, which: str) -> None:
    body, param = WRONG[which]
    status, answer = await send(
        served, body.encode(errors="surrogateescape"), **{"Content-Type": "multipart/form-data; boundary=b"}
    )
    assert (status, answer["error"]["type"]) == (413 if which == "long field" else 400, "invalid_request_error")
    assert answer["error"]["param"] == param
    await wait_until_empty(served.store)


async def test_purpose_may_follow_the_file(served: ScriptedServer) -> None:
    body = aiohttp.FormData()
    body.add_field("file", b"Hello", filename="a.txt")
    body.add_field("purpose", "vision")
    status, made = await send(served, body)
    assert (status, made["purpose"], made["bytes"]) == (200, "vision", 5)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "multipart/form-data"}, 400),
        ({"Content-Type": f"multipart/form-data; boundary={'b' * 80}"}, 400),
        ({"Content-Type": "multipart/mixed; boundary=b"}, 415),
        ({"Content-Type": "application/json"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=b", "Content-Encoding": "gzip"}, 415),
    ],
)
async def test_other_bodies_are_refused(served: ScriptedServer, headers: dict[str, str], status: int) -> None:
    assert (await send(served, b"--b--\r\n", **headers))[0] == status


async def test_pages_of_other_sites_upload_nothing(served: ScriptedServer) -> None:
    """A form needs no preflight, so that only the headers of a browser tell whose page sends it."""
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert (await send(served, form(), **headers))[0] == 403
    async with served.client.post(f"{served.url}/v1/responses", data=form()) as answer:
        assert answer.status == 415
    assert await rows(served.store) == [0, 0]


async def endless(*, size: int, then: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    for _ in range(size >> 16):
        yield bytes(1 << 16)
    if then is not None:
        await then.wait()


async def test_upload_larger_than_a_body_is_stored_up_to_its_own_limit(store_at: str) -> None:
    settings = DEFAULTS.model_copy(update={"max_upload_bytes": 3 * CHUNK})
    async with running_server(
        ScriptedEngine(script(HELLO)), store_at, resources=["files"], settings=settings, max_body_bytes=10_000
    ) as served:
        status, made = await send(served, form(endless(size=3 * CHUNK)))
        assert (status, made["bytes"]) == (200, 3 * CHUNK)
        await served.delete(f"/v1/files/{made['id']}")
        for content in (endless(size=4 * CHUNK), bytes(3 * CHUNK + 1), bytes(8 * CHUNK)):
            status, refused = await send(served, form(content))
            assert (status, refused["error"]["code"]) == (413, "request_too_large")
        await wait_until_empty(served.store)


async def test_client_that_leaves_in_mid_upload_leaves_nothing(served: ScriptedServer) -> None:
    going_on = asyncio.Event()
    upload = asyncio.create_task(send(served, form(endless(size=4 * CHUNK, then=going_on))))
    async with asyncio.timeout(120):
        while not (await rows(served.store))[1]:
            await asyncio.sleep(0.01)
    upload.cancel()
    await asyncio.wait([upload])
    await wait_until_empty(served.store)


async def test_slow_upload_is_ended(served: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload_form, "SECONDS", 0.05)
    monkeypatch.setattr(upload_form, "SLOWEST", 1 << 30)
    status, refused = await send(served, form(endless(size=CHUNK, then=asyncio.Event())))
    assert (status, refused["error"]["code"]) == (408, "request_timeout")
    await wait_until_empty(served.store)


async def test_too_many_uploads_at_once_are_refused(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key has half of the places, so that another one still has some."""
    monkeypatch.setattr(files, "MOST_AT_ONCE", 2)
    keys, resources = Keys(given=[ONE, OTHER]), ["files"]
    async with running_server(ScriptedEngine(script(HELLO)), store_at, resources=resources, keys=keys) as served:
        going_on = asyncio.Event()
        first = asyncio.create_task(send(served, form(endless(size=2 * CHUNK, then=going_on)), **bearer(ONE)))
        async with asyncio.timeout(120):
            while not (await rows(served.store))[1]:
                await asyncio.sleep(0.01)
        assert (await send(served, form(), **bearer(ONE)))[0] == 503
        assert (await send(served, form(), **bearer(OTHER)))[0] == 200
        going_on.set()
        assert (await first)[0] == 200
        assert (await send(served, form(), **bearer(ONE)))[0] == 200


ROOM = 2 * writer.RESERVE
"""Bytes of a small disk."""


@asynccontextmanager
async def on_a_small_disk(folder: Path) -> AsyncGenerator[tuple[ScriptedServer, SqliteDatabase], None]:
    """Serve with a file whose size SQLite limits, as a small disk would."""
    disk = SqliteDatabase(folder / "store.sqlite3")
    async with running_server(
        ScriptedEngine(script(HELLO)), disk, resources=["files", "vector_stores"], max_body_bytes=ROOM
    ) as served:
        ((size,),) = disk._writing.execute("pragma page_size")
        disk._writing.execute(f"pragma max_page_count = {ROOM // size}")
        yield served, disk


@pytest.mark.parametrize("is_declared", [True, False])
async def test_upload_leaves_room_for_deletions(is_declared: bool, tmp_path: Path) -> None:
    async with on_a_small_disk(tmp_path) as (served, disk):
        status, kept = await send(served, form(bytes(2 * CHUNK)))
        assert status == 200
        status, refused = await send(served, form(bytes(2 * ROOM) if is_declared else endless(size=2 * ROOM)))
        assert (status, refused["error"]["code"]) == (507, "insufficient_storage")
        assert "almost full. Delete" in refused["error"]["message"]
        async with asyncio.timeout(120):
            while await rows(served.store) != [1, 2]:
                await asyncio.sleep(0.01)
        assert await disk.room() >= writer.RESERVE
        assert (await send(served, form()))[0] == 200
        assert (await served.delete(f"/v1/files/{kept['id']}"))[0] == 200


async def test_uploads_at_once_leave_room_for_deletions(tmp_path: Path) -> None:
    async with on_a_small_disk(tmp_path) as (served, disk):
        sent = await asyncio.gather(*(send(served, form(endless(size=ROOM // 8))) for _ in range(12)))
        assert 507 in {status for status, _ in sent} <= {200, 507}
        assert await disk.room() >= writer.RESERVE
        for status, made in sent:
            assert status != 200 or (await served.delete(f"/v1/files/{made['id']}"))[0] == 200


async def test_large_bodies_and_chunks_leave_room_for_deletions(tmp_path: Path) -> None:
    async with on_a_small_disk(tmp_path) as (served, disk):
        kept: Json = {}
        while await disk.room() >= writer.RESERVE + 2 * CHUNK:
            status, kept = await send(served, form(b"word " * (CHUNK // 5)))
            assert status == 200
        large = "a" * 3 * writer.BULK
        message = {"type": "message", "role": "user", "content": large}
        for path, body in (("responses", {"input": large}), ("conversations", {"items": [message]})):
            status, refused = await post_large(served, path, body)
            assert (status, refused["error"]["code"]) == (507, "insufficient_storage")
        assert (await post_large(served, "responses", {"input": large, "store": False}))[0] != 507
        assert (await served.post({"input": "Hi"}))[0] == 200
        _, searched = await served.post({}, "/v1/vector_stores")
        status, added = await served.post({"file_id": kept["id"]}, f"/v1/vector_stores/{searched['id']}/files")
        async with asyncio.timeout(120):
            while added["status"] == "in_progress":
                _, added = await served.get(f"/v1/vector_stores/{searched['id']}/files/{kept['id']}")
        assert "almost full" in added["last_error"]["message"]
        assert (await served.delete(f"/v1/files/{kept['id']}"))[0] == 200


async def post_large(served: ScriptedServer, path: str, body: Json) -> tuple[int, Json]:
    data, url = BytesIO(json.dumps(body).encode()), f"{served.url}/v1/{path}"
    async with served.client.post(url, data=data, headers={"Content-Type": "application/json"}) as answer:
        return answer.status, await answer.json()


async def test_key_stores_again_once_it_has_deleted(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key is at its limit if what it wants to store does not fit, and its bytes are then read again soon."""
    monkeypatch.setattr(admissions, "FRESH", 1e9)
    monkeypatch.setattr(admissions, "FRESH_IF_FULL", 0.0)
    admission = Admission(tables={"default": KeyLimits(stored_bytes=3 * CHUNK)})
    async with running_server(
        ScriptedEngine(script(HELLO)), store_at, resources=["files"], admission=admission
    ) as served:
        status, made = await send(served, form(bytes(2 * CHUNK)))
        assert status == 200
        assert (await send(served, form(bytes(2 * CHUNK))))[0] == 429
        assert (await served.delete(f"/v1/files/{made['id']}"))[0] == 200
        assert (await send(served, form(bytes(2 * CHUNK))))[0] == 200


async def test_full_disk_in_mid_upload_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may fill the disk, too."""
    monkeypatch.setattr(writer, "RESERVE", -(1 << 40))
    disk = SqliteDatabase(tmp_path / "store.sqlite3")
    async with running_server(ScriptedEngine(script(HELLO)), disk, resources=["files"]) as served:
        disk._writing.execute("pragma max_page_count = 500")
        status, refused = await send(served, form(endless(size=6 * CHUNK)))
        assert (status, refused["error"]["type"]) == (503, "server_error")
        await wait_until_empty(served.store)
        assert (await send(served, form()))[0] == 200
        assert (await served.post({"input": "Hi"}))[0] == 200


async def test_files_count_as_stored_bytes_of_their_key(store_at: str) -> None:
    admission = Admission(tables={"default": KeyLimits(stored_bytes=3 * CHUNK)})
    async with running_server(
        ScriptedEngine(script(HELLO)), store_at, resources=["files"], admission=admission
    ) as served:
        status, made = await send(served, form(bytes(2 * CHUNK)))
        assert status == 200
        for content in (bytes(2 * CHUNK), endless(size=2 * CHUNK)):
            status, refused = await send(served, form(content))
            assert (status, refused["error"]["code"]) == (429, "insufficient_quota")
        assert (await send(served, form(bytes(1_000))))[0] == 200
        await served.delete(f"/v1/files/{made['id']}")


async def test_files_of_another_key_do_not_exist(store_at: str) -> None:
    keys = Keys(given=["key-of-ann-0000000000", "key-of-bob-0000000000"])
    async with running_server(ScriptedEngine(script(HELLO)), store_at, resources=["files"], keys=keys) as served:
        ann, bob = (openai_client(served.url, f"key-of-{name}-0000000000") for name in ("ann", "bob"))
        async with ann, bob:
            made = await ann.files.create(file=("a", b"x"), purpose="user_data")
            assert (await bob.files.list()).data == []
            for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(made.id)
            assert (await ann.files.content(made.id)).content == b"x"
        status, refused = await send(served, form(), **ANTHROPIC)
        assert (status, refused["type"], refused["error"]["type"]) == (401, "error", "authentication_error")


async def test_server_without_a_store_has_no_files() -> None:
    async with running_server(ScriptedEngine(script(HELLO)), database("none"), resources=["files"]) as served:
        served.store.keeps = False
        for answer in (await send(served, form()), await served.get("/v1/files"), await served.get("/v1/files/file-1")):
            assert answer[0] == 400
            assert "--store none" in json.dumps(answer[1])


async def test_deleted_file_breaks_its_download_off(served: ScriptedServer) -> None:
    _, made = await send(served, form(bytes(40 * CHUNK)))
    async with served.client.get(f"{served.url}/v1/files/{made['id']}/content", read_bufsize=1 << 10) as answer:
        await answer.content.readexactly(10)
        await served.delete(f"/v1/files/{made['id']}")
        await wait_until_empty(served.store)
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
