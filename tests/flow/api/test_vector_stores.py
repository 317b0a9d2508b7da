"""The vector stores API: objects, pages, files, batches and searches, each answer of the form of the SDK's types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import openai
import pytest
from openai.types import StaticFileChunkingStrategyObject, VectorStore, VectorStoreSearchResponse
from openai.types.vector_stores import VectorStoreFile, VectorStoreFileBatch

from penstock.api.http.auth import Keys
from penstock.extensions.tools.files.file_reader import FileReader, NotRead
from penstock.extensions.tools.files.stored_files import StoredFiles
from penstock.extensions.tools.resources.vector_stores import POLL_AFTER_MS
from penstock.extensions.tools.search.vector_stores import StoredVectorStores
from tests.support.api_clients import openai_client
from tests.support.server import ScriptedServer
from tests.support.vector_stores import DOCUMENTS, Json, new_store, search_server, uploaded

STORES = "/v1/vector_stores"


@pytest.fixture
async def served(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with search_server(store_at) as served:
        yield served


@pytest.fixture
async def files(served: ScriptedServer) -> list[str]:
    return [await uploaded(served.store, name, text) for name, text in DOCUMENTS.items()]


def strict(kind: Any, answer: Json) -> Json:
    """Check that an answer has exactly the fields of an SDK's type, and return it."""
    assert kind.model_validate(answer, strict=True).to_dict().keys() == answer.keys()
    return answer


async def found(served: ScriptedServer, store: str, query: Any, **fields: Any) -> list[str]:
    status, answer = await served.post({"query": query, **fields}, f"{STORES}/{store}/search")
    assert status == 200, answer
    for result in answer["data"]:
        VectorStoreSearchResponse.model_validate(result, strict=True)
        assert 0 < result["score"] <= 1
    return [result["filename"] for result in answer["data"]]


async def test_openai_python_makes_and_searches_a_vector_store(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, files: list[str]
) -> None:
    store = await sdk.vector_stores.create(name="notes", metadata={"a": "b"}, file_ids=files[:1])
    assert (store.name, store.metadata, store.file_counts.total) == ("notes", {"a": "b"}, 1)
    read = await sdk.vector_stores.files.create_and_poll(
        files[1], vector_store_id=store.id, attributes={"kind": "drink", "rank": 2, "hot": True}
    )
    assert (read.status, read.attributes) == ("completed", {"kind": "drink", "rank": 2, "hot": True})
    batch = await sdk.vector_stores.file_batches.create_and_poll(store.id, file_ids=files[2:])
    assert (batch.status, batch.file_counts.completed) == ("completed", 1)
    page = await sdk.vector_stores.search(store.id, query="how long is green tea steeped?", max_num_results=1)
    assert [(hit.filename, hit.file_id, hit.attributes) for hit in page.data] == [("tea.md", files[1], read.attributes)]
    content = await sdk.vector_stores.files.content(files[1], vector_store_id=store.id)
    assert "".join(part.text or "" for part in content.data) == DOCUMENTS["tea.md"]
    listed = [file.id async for file in sdk.vector_stores.files.list(store.id, limit=1)]
    assert sorted(listed) == sorted(files)
    assert (await sdk.vector_stores.files.delete(files[0], vector_store_id=store.id)).deleted
    assert (await sdk.vector_stores.delete(store.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await sdk.vector_stores.retrieve(store.id)


async def test_answers_match_the_sdk_types(served: ScriptedServer, files: list[str]) -> None:
    store = strict(
        VectorStore, await new_store(served, files[:1], expires_after={"anchor": "last_active_at", "days": 2})
    )
    assert store["expires_at"] == store["last_active_at"] + 2 * 86400
    assert store["status"] == "completed"
    assert store["usage_bytes"] > 0
    one = f"{STORES}/{store['id']}"
    _, file = await served.get(f"{one}/files/{files[0]}")
    assert strict(VectorStoreFile, file)["status"] == "completed"
    _, batch = await served.post({"file_ids": files}, f"{one}/file_batches")
    assert strict(VectorStoreFileBatch, batch)["file_counts"]["total"] == 3
    _, changed = await served.post({"name": "new", "expires_after": None}, one)
    assert (strict(VectorStore, changed)["name"], changed["expires_after"], changed["expires_at"]) == (
        "new",
        None,
        None,
    )


FIRST = {"craters of the moon": "moon.txt", "Teas": "tea.md", "水果": "水果.txt", "冷": "水果.txt"}
"""The file that each query finds first."""

HOSTILE = (
    '"', "*", "a AND", "NEAR(", "tea OR -moon", "^tea", "terms:tea", "{tea}", "\0tea\0", "'; drop table files; --",
    "\ud800", "()" * 5_000, "tea " * 8_000, "".join(map(chr, range(1, 3_000))),
)  # fmt: skip


async def test_words_of_many_languages_are_found_and_marks_are_none(served: ScriptedServer, files: list[str]) -> None:
    store = (await new_store(served, files))["id"]
    assert {query: (await found(served, store, query))[0] for query in FIRST} == FIRST
    for query in HOSTILE:
        assert ("tea.md" in await found(served, store, query)) is ("tea" in query), query[:20]


async def test_filter_and_threshold_leave_files_out(served: ScriptedServer, files: list[str]) -> None:
    store = (await new_store(served))["id"]
    each = [
        {"file_id": name, "attributes": {"number": number, "name": str(number)}} for number, name in enumerate(files)
    ]
    await served.post({"files": each}, f"{STORES}/{store}/file_batches")
    await new_store(served)
    await wait_until_read(served, store)
    everything = "the moon tea 水果"
    assert len(await found(served, store, everything)) == 3
    assert await found(served, store, everything, filters={"type": "lt", "key": "number", "value": 1}) == ["moon.txt"]
    both = {"type": "and", "filters": [
        {"type": "gte", "key": "number", "value": 1}, {"type": "in", "key": "name", "value": ["0", "1"]}
    ]}  # fmt: skip
    assert await found(served, store, everything, filters=both) == ["tea.md"]
    assert await found(served, store, everything, ranking_options={"score_threshold": 1.0}) == []
    await served.post({"attributes": {"number": 0}}, f"{STORES}/{store}/files/{files[1]}")
    assert await found(served, store, everything, filters=both) == []


async def wait_until_read(served: ScriptedServer, store: str) -> Json:
    async with asyncio.timeout(120):
        while (answer := (await served.get(f"{STORES}/{store}"))[1])["status"] == "in_progress":
            await asyncio.sleep(0.02)
    return dict(answer)


async def test_pages_go_both_ways(served: ScriptedServer) -> None:
    made = [(await served.post({"name": str(number)}, STORES))[1]["id"] for number in range(5)]
    _, page = await served.get(f"{STORES}?limit=2")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([made[4], made[3]], True)
    _, page = await served.get(f"{STORES}?limit=2&after={page['last_id']}")
    assert [one["id"] for one in page["data"]] == [made[2], made[1]]
    _, page = await served.get(f"{STORES}?limit=2&before={made[0]}")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([made[2], made[1]], True)
    _, page = await served.get(f"{STORES}?limit=9&before={made[2]}&order=asc")
    assert ([one["id"] for one in page["data"]], page["has_more"]) == ([made[0], made[1]], False)
    status, error = await served.get(f"{STORES}?after=vs_none")
    assert (status, error["error"]["param"]) == (400, "after")


async def test_unreadable_files_fail_with_a_reason(served: ScriptedServer) -> None:
    unsupported = await uploaded(served.store, "a.png", b"\x89PNG\r\n\x1a\n0000")
    invalid = await uploaded(served.store, "a.pdf", b"%PDF-1.7 broken")
    store = await new_store(served, [unsupported, invalid])
    assert (store["status"], store["file_counts"]["failed"]) == ("completed", 2)
    errors = {}
    for name in (unsupported, invalid):
        _, file = await served.get(f"{STORES}/{store['id']}/files/{name}")
        errors[name] = strict(VectorStoreFile, file)["last_error"]["code"]
    assert errors == {unsupported: "unsupported_file", invalid: "invalid_file"}
    _, page = await served.get(f"{STORES}/{store['id']}/files?filter=failed")
    assert len(page["data"]) == 2
    _, page = await served.get(f"{STORES}/{store['id']}/files?filter=completed")
    assert page["data"] == []
    _, refused = await served.get(f"{STORES}/{store['id']}/files?filter=done")
    assert refused["error"]["message"].startswith("filter is one of in_progress, ")


async def test_deleted_file_leaves_its_vector_stores_with_all_chunks(served: ScriptedServer, files: list[str]) -> None:
    store = await new_store(served, files)
    assert await served.store.part(StoredFiles).delete(files[1], "")
    assert await found(served, store["id"], "tea") == []
    assert (await served.get(f"{STORES}/{store['id']}"))[1]["file_counts"]["total"] == 2
    await served.ask("DELETE", f"{STORES}/{store['id']}")
    async with asyncio.timeout(120):
        while any([(await served.store.context.read(f"select count(*) from {table}"))[0][0] for table in TABLES]):
            await asyncio.sleep(0.05)


TABLES = ("vector_stores", "vector_store_files", "vector_store_chunks", "vector_store_attributes")


async def test_object_of_another_owner_is_not_found(store_at: str) -> None:
    alice, bob = "key-of-alice-0001", "key-of-bob-000002"
    async with (
        search_server(store_at, keys=Keys(given=(alice, bob))) as served,
        openai_client(served.url, alice) as hers,
        openai_client(served.url, bob) as his,
    ):
        store = await hers.vector_stores.create()
        assert [one.id async for one in his.vector_stores.list()] == []
        for attempt in (
            his.vector_stores.retrieve(store.id),
            his.vector_stores.search(store.id, query="tea"),
            his.vector_stores.files.list(store.id),
            his.vector_stores.delete(store.id),
            his.vector_stores.update(store.id, name="mine"),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        file = await uploaded(served.store, "a.txt", "text", "someone else")
        with pytest.raises(openai.NotFoundError):
            await hers.vector_stores.files.create(store.id, file_id=file)


CHUNKS = {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 51}
HYBRID = {"embedding_weight": 0, "text_weight": 0}
WRONG: list[tuple[str, Json, str]] = [
    ("", {"chunking_strategy": {"type": "static", "static": CHUNKS}}, "chunking_strategy.static"),
    ("", {"expires_after": {"anchor": "last_active_at", "days": 0}}, "expires_after.days"),
    ("/search", {"query": "a", "rewrite_query": True}, "rewrite_query"),
    ("/search", {"query": "a", "max_num_results": 51}, "max_num_results"),
    ("/search", {"query": "a", "ranking_options": {"hybrid_search": HYBRID}}, "ranking_options.hybrid_search"),
    ("/search", {"query": "a", "filters": {"type": "in", "key": "a", "value": 1}}, "filters"),
    ("/file_batches", {}, ""),
]


async def test_wrong_values_are_refused(served: ScriptedServer) -> None:
    store = (await new_store(served))["id"]
    for path, body, param in WRONG:
        status, answer = await served.post(body, f"{STORES}/{store}{path}" if path else STORES)
        assert status == 400, answer
        assert str(answer["error"]["param"] or "").startswith(param), answer


async def test_unread_files_come_with_the_time_to_ask_again(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.tools.search.ingestion.Ingestion.wake", lambda _: None)
    monkeypatch.setattr("penstock.extensions.tools.search.ingestion.LOOK_SECONDS", 3_600)
    async with search_server(store_at) as served, openai_client(served.url) as sdk:
        (file,) = files = [await uploaded(served.store, "a.txt", "text")]
        store = await sdk.vector_stores.create()
        batch = await sdk.vector_stores.file_batches.create(store.id, file_ids=files)
        place: Any = {"vector_store_id": store.id}

        async def waits() -> list[str | None]:
            answers = (
                await sdk.vector_stores.files.with_raw_response.retrieve(file, **place),
                await sdk.vector_stores.file_batches.with_raw_response.retrieve(batch.id, **place),
            )
            return [answer.headers.get("openai-poll-after-ms") for answer in answers]

        assert await waits() == [str(POLL_AFTER_MS)] * 2
        await sdk.vector_stores.file_batches.cancel(batch.id, **place)
        assert await waits() == [None, None]


async def test_cancelled_batch_reads_no_more_files(store_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.tools.search.ingestion.Ingestion.wake", lambda _: None)
    monkeypatch.setattr("penstock.extensions.tools.search.ingestion.LOOK_SECONDS", 0.5)
    async with search_server(store_at) as served:
        files = [await uploaded(served.store, "a.txt", "text") for _ in range(3)]
        store = (await new_store(served))["id"]
        _, batch = await served.post({"file_ids": files}, f"{STORES}/{store}/file_batches")
        one = f"{STORES}/{store}/file_batches/{batch['id']}"
        _, cancelled = await served.post({}, f"{one}/cancel")
        assert (strict(VectorStoreFileBatch, cancelled)["status"], cancelled["file_counts"]["in_progress"]) == (
            "cancelled",
            0,
        )
        _, page = await served.get(f"{one}/files?filter=cancelled")
        assert len(page["data"]) == cancelled["file_counts"]["cancelled"]


class Gate:
    """Holds the reading of files back until it is opened, or has it fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = asyncio.Event()
        self.reached = asyncio.Event()
        self.fails = False
        read = FileReader.text_of

        async def text_of(reader: FileReader, *given: Any) -> str:
            self.reached.set()
            await self.opened.wait()
            if self.fails:
                raise NotRead("It is damaged.")
            return await read(reader, *given)

        monkeypatch.setattr(FileReader, "text_of", text_of)

    def close(self) -> None:
        self.opened.clear()
        self.reached.clear()


STATIC = {"type": "static", "static": {"max_chunk_size_tokens": 100, "chunk_overlap_tokens": 0}}
ENGLISH = {"filters": {"type": "eq", "key": "lang", "value": "en"}}


@pytest.mark.parametrize(
    ("way", "ending"),
    [
        *((way, ending) for way in ("files", "file_batches") for ending in ("completed", "failed")),
        ("file_batches", "cancelled"),
        *(("files", ending) for ending in ("removed", "again", "deleted")),
    ],
)
async def test_file_that_is_added_again_is_found_meanwhile(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch, way: str, ending: str
) -> None:
    gate = Gate(monkeypatch)
    gate.opened.set()
    file = await uploaded(served.store, "lion.txt", "The lion sleeps. " * 200)
    store = (await sdk.vector_stores.create()).id
    place: Any = {"vector_store_id": store}
    strategy: Any = {"chunking_strategy": STATIC}
    first = await sdk.vector_stores.files.create_and_poll(file, **place, attributes={"lang": "en"}, **strategy)
    one, many = f"{STORES}/{store}/files/{file}", len(await found(served, store, "lion", **ENGLISH))
    assert (first.status, many > 1) == ("completed", True)
    gate.close()
    status, answer = await served.post(
        {"file_id": file} if way == "files" else {"file_ids": [file]}, f"{STORES}/{store}/{way}"
    )
    assert status == 200
    await gate.reached.wait()
    _, shown = await served.get(one)
    assert (shown["status"], shown["attributes"]) == ("in_progress", {"lang": "en"})
    assert len(await found(served, store, "lion", **ENGLISH)) == many
    assert (await served.get(f"{one}/content"))[1]["data"]
    match ending:
        case "cancelled":
            await served.post({}, f"{STORES}/{store}/file_batches/{answer['id']}/cancel")
        case "removed":
            await served.delete(one)
        case "again":
            await served.post({"file_id": file, "attributes": {"lang": "en", "n": 1}}, f"{STORES}/{store}/files")
        case "deleted":
            await served.delete(f"{STORES}/{store}")
        case _:
            gate.fails = ending == "failed"
    gate.opened.set()
    await until_done(served)
    status, shown = await served.get(one)
    if ending in ("removed", "deleted"):
        assert status == 404
        return
    wanted = {"lang": "en", "n": 1} if ending == "again" else {"lang": "en"}
    assert (shown["status"], shown["attributes"]) == ("completed" if ending == "again" else ending, wanted)
    assert shown["chunking_strategy"]["static"]["max_chunk_size_tokens"] == 100
    assert len(await found(served, store, "lion", **ENGLISH)) == many
    _, counted = await served.get(f"{STORES}/{store}")
    assert counted["file_counts"]["total"] == 1


async def until_done(served: ScriptedServer) -> None:
    """Wait until nothing is left to do with any file."""
    while await served.store.part(StoredVectorStores).context.read(
        "select 1 from vector_store_files where work is not null"
    ):
        await asyncio.sleep(0.01)


async def test_what_a_repetition_names_takes_effect(
    served: ScriptedServer, sdk: openai.AsyncOpenAI, files: list[str]
) -> None:
    store = (await sdk.vector_stores.create(file_ids=files)).id
    await until_done(served)
    place: Any = {"vector_store_id": store}
    strategy: Any = {"chunking_strategy": STATIC}
    read = await sdk.vector_stores.files.create_and_poll(files[0], **place, attributes={"lang": "de"}, **strategy)
    assert (read.status, read.attributes, read.chunking_strategy) == ("completed", {"lang": "de"}, STATIC_READ)
    read = await sdk.vector_stores.files.create_and_poll(
        files[0], **place, attributes={}, chunking_strategy={"type": "auto"}
    )
    assert (read.status, read.attributes, read.chunking_strategy == STATIC_READ) == ("completed", {}, False)
    assert await found(served, store, "a", filters={"type": "eq", "key": "lang", "value": "de"}) == []
    await until_done(served)
    ((rows,),) = await served.store.part(StoredVectorStores).context.read("select count(*) from vector_store_files")
    assert rows == len(files)


STATIC_READ = StaticFileChunkingStrategyObject.model_validate(STATIC)
