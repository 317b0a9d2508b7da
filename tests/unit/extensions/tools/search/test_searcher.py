"""The searcher: filters, and the rankings by words and by meaning, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from penstock.extensions.tools.files.file_reader import FileReader
from penstock.extensions.tools.search.embedder import Embedder, NotEmbedded
from penstock.extensions.tools.search.ingestion import Ingestion
from penstock.extensions.tools.search.kind import FileSearchOptions
from penstock.extensions.tools.search.searcher import Searcher
from penstock.extensions.tools.search.session import FileSearchHost
from penstock.extensions.tools.search.vector_stores import (
    Chunk,
    Chunking,
    NewFile,
    Page,
    StoredVectorStore,
    StoredVectorStores,
)
from penstock.pipeline.frames import with_facts
from penstock.pipeline.protocol.params.file_search import Filters
from penstock.services.store.store import Store
from penstock.testing import ExampleCalls, check_host
from penstock.testing.stages import resolved
from tests.support.examples import examples
from tests.support.vector_stores import embedding_server, uploaded

pytestmark = pytest.mark.io

_numbers = count()

KEYS = ("a", "b", "quote'\"\0")
VALUES = st.sampled_from(["", "x", "Z", "é", "10", "9"]) | st.sampled_from([0, 1, -1.5, 10, 9]) | st.booleans()
ATTRIBUTES = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=3)
COMPARISONS = st.one_of(
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["eq", "ne", "gt", "gte", "lt", "lte"]),
            "key": st.sampled_from(KEYS),
            "value": VALUES,
        }
    ),
    st.fixed_dictionaries(
        {
            "type": st.sampled_from(["in", "nin"]),
            "key": st.sampled_from(KEYS),
            "value": st.lists(VALUES, min_size=1, max_size=3),
        }
    ),
)
FILTERS = st.recursive(
    COMPARISONS,
    lambda inner: st.fixed_dictionaries(
        {"type": st.sampled_from(["and", "or"]), "filters": st.lists(inner, min_size=1, max_size=3)}
    ),
    max_leaves=6,
)


def passes(given: Mapping[str, Any], attributes: Mapping[str, Any]) -> bool:
    """Evaluate a filter as the API describes it."""
    match given:
        case {"type": "and"}:
            return all(passes(inner, attributes) for inner in given["filters"])
        case {"type": "or"}:
            return any(passes(inner, attributes) for inner in given["filters"])
        case {"type": "ne" | "nin" as kind}:
            return not passes({**given, "type": {"ne": "eq", "nin": "in"}[kind]}, attributes)
        case {"type": "in"}:
            return any(passes({**given, "type": "eq", "value": value}, attributes) for value in given["value"])
        case _:
            held, value = attributes.get(given["key"]), given["value"]
    if held is None or sort_of(held) is not sort_of(value):
        return False
    if isinstance(held, str):
        held, value = held.encode(), value.encode()
    compared: dict[str, bool] = {
        "eq": held == value,
        "gt": held > value,
        "gte": held >= value,
        "lt": held < value,
        "lte": held <= value,
    }
    return compared[given["type"]]


def sort_of(value: Any) -> type:
    return bool if isinstance(value, bool) else str if isinstance(value, str) else float


async def new_store(store: Store) -> StoredVectorStore:
    name = f"vs_{next(_numbers)}_{id(store)}"
    await store.part(StoredVectorStores).create(name, "", "", {}, None)
    made = await store.part(StoredVectorStores).get(name, "")
    assert made
    return made


async def filled(store: Store, texts: Sequence[tuple[str, str]], embedder: Embedder | None = None) -> StoredVectorStore:
    """Make a vector store with files of these names and texts, and read them."""
    made, ingestion = await new_store(store), Ingestion(store, FileReader(), embedder)
    files = [NewFile(await uploaded(store, name, text), name, {}, Chunking()) for name, text in texts]
    await store.part(StoredVectorStores).add(made.id, files)
    async with ingestion.running(), asyncio.timeout(120):
        while (found := await store.part(StoredVectorStores).get(made.id, "")) and found.counts.of("in_progress"):
            await asyncio.sleep(0.01)
    assert found
    return found


@given(st.lists(ATTRIBUTES, min_size=1, max_size=5), FILTERS)
@examples(100, [HealthCheck.function_scoped_fixture])
async def test_filters_select_the_files_that_a_simple_evaluator_selects(
    store: Store, files: list[dict[str, Any]], given_filter: dict[str, Any]
) -> None:
    made = await new_store(store)
    new = [NewFile(f"file-{at}", "a.txt", attributes, Chunking()) for at, attributes in enumerate(files)]
    await store.part(StoredVectorStores).add(made.id, new)
    numbers = [number for _, number in await store.part(StoredVectorStores).waiting(10)]
    for number in numbers:
        assert await store.part(StoredVectorStores).claim(number)
        assert await store.part(StoredVectorStores).append(number, 0, [Chunk("t", 0, "t")], None)
        assert await store.part(StoredVectorStores).complete(number, 1, 1)
    readable = await store.part(StoredVectorStores).readable(made.id, given_filter)
    selected = await store.part(StoredVectorStores).files_of(
        [int(number) for number in (readable or "").split(",") if number]
    )
    assert sorted(file.id for file in selected.values()) == [
        f"file-{at}" for at, attributes in enumerate(files) if passes(given_filter, attributes)
    ]


@given(FILTERS)
def test_valid_filters_pass_validation_unchanged(given_filter: dict[str, Any]) -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(Filters)
    assert adapter.validate_python(given_filter).form == given_filter


async def test_long_file_is_read_in_chunks_that_overlap(store: Store) -> None:
    text = " ".join(f"word{number}" for number in range(2_000))
    made = await filled(store, [("long.txt", text)])
    page, _ = await store.part(StoredVectorStores).files(made.id, "", Page())
    assert page[0].chunks > 3
    assert "".join(await store.part(StoredVectorStores).texts(page[0])) == text
    hits = await Searcher(store).search([made], "", ["word1000"], FileSearchOptions())
    assert 1 <= len(hits) <= 2
    assert all("word1000" in hit.text for hit in hits)


async def test_meaning_finds_what_words_do_not(store: Store) -> None:
    async with embedding_server(("car", "automobile"), ("fruit", "apple")) as server:
        embedder = Embedder(server.url)
        texts = [("a.txt", "An automobile has wheels."), ("b.txt", "An apple is red."), ("c.txt", "Nothing of both.")]
        made = await filled(store, texts, embedder)
        searcher = Searcher(store, embedder)
        hits = await searcher.search([made], "", ["car"], FileSearchOptions())
        assert hits[0].file.filename == "a.txt"
        words_only = FileSearchOptions(embedding_weight=0.0, score_threshold=0.5)
        assert [hit.file.filename for hit in await searcher.search([made], "", ["apple"], words_only)] == ["b.txt"]
        server.is_down = True
        assert await searcher.search([made], "", ["car"], FileSearchOptions()) == []
        assert [hit.file.filename for hit in await searcher.search([made], "", ["apple"], FileSearchOptions())] == [
            "b.txt"
        ]
        with pytest.raises(NotEmbedded, match="503"):
            await embedder.embed(["x"])
        await embedder.close()


async def test_file_fails_if_it_cannot_be_embedded(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.extensions.tools.search.ingestion.RETRY_SECONDS", 0.0)
    async with embedding_server(("x",)) as server:
        server.is_down = True
        embedder = Embedder(server.url)
        made = await filled(store, [("a.txt", "text")], embedder)
        ((file,), _) = await store.part(StoredVectorStores).files(made.id, "", Page())
        assert (file.status, file.error and file.error.code) == ("failed", "server_error")
        await embedder.close()


async def test_host_keeps_all_rules(store: Store) -> None:
    made = await filled(store, [("a.txt", "fjords")])
    request = with_facts(await resolved("Hi"), options={"file_search": {"stores": [made.id]}})
    calls = ExampleCalls(("search", '{"queries": ["fjords"]}'), ("search", "{}"))
    await check_host(FileSearchHost(Searcher(store)), calls, request)
