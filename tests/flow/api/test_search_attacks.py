"""Hostile filters and queries of a search: the largest ones work in each database, all others are a 400."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import pytest

from penstock.pipeline.protocol.params.file_search import MOST_FILTER_LEVELS, MOST_FILTERS, MOST_VALUES
from penstock.pipeline.protocol.params.vector_stores import MOST_QUERIES, MOST_QUERY_CHARACTERS
from tests.support.server import ScriptedServer
from tests.support.tool_servers import answer_markup, play_turns
from tests.support.vector_stores import (
    DOCUMENTS,
    Json,
    embedding_server,
    file_search,
    new_store,
    search_markup,
    search_server,
    uploaded,
)

LARGEST_BODY = 2**26


def comparison(value: Any = "b", key: str = "a", kind: str = "ne") -> Json:
    return {"type": kind, "key": key, "value": value}


def nested(depth: int) -> Json:
    found = comparison()
    for level in range(depth):
        found = {"type": ("and", "or")[level % 2], "filters": [comparison(), found, comparison(kind="gt")]}
    return found


def any_of(*filters: Json) -> Json:
    return {"type": "or", "filters": list(filters)}


def values(count: int) -> Json:
    whole, rest = divmod(count, MOST_FILTERS)
    sizes = [MOST_FILTERS] * whole + [rest] * bool(rest)
    return any_of(*(comparison([str(number) for number in range(size)], kind="nin") for size in sizes))


LARGEST: Mapping[str, Json] = {
    "depth": {"filters": nested(MOST_FILTER_LEVELS)},
    "comparisons": {"filters": any_of(*(comparison(kind="ne") for _ in range(MOST_FILTERS)))},
    "values": {"filters": values(MOST_VALUES)},
    "a pattern": {"filters": comparison("(a+)+$", "(.*)*%_'\"")},
    "NUL": {"filters": comparison("a\0b", "a\0b"), "query": "tea \0"},
    "lone surrogates": {"filters": comparison("\ud800", "\udfff"), "query": "tea \ud800"},
    "a large number": {"filters": comparison(2**63)},
    "nothing": {"filters": comparison("", "")},
    "SQL": {"query": "tea \"*()^:-+' OR 1=1; --"},
    "the longest query": {"query": ("tea é" * MOST_QUERY_CHARACTERS)[:MOST_QUERY_CHARACTERS]},
    "many long queries": {"query": ["tea", *[" ".join(map(str, range(5_000)))] * (MOST_QUERIES - 1)]},
}

TOO_LARGE: Mapping[str, Json] = {
    "depth": {"filters": nested(MOST_FILTER_LEVELS + 1)},
    "a great depth": {"filters": nested(90)},
    "more depth than JSON may have": {"filters": nested(400)},
    "comparisons": {"filters": any_of(any_of(comparison()), *(comparison() for _ in range(MOST_FILTERS)))},
    "filters": {"filters": any_of(*(comparison() for _ in range(10_000)))},
    "values": {"filters": values(MOST_VALUES + 1)},
    "values of a list": {"filters": comparison(["x"] * 100_000, kind="in")},
    "a key": {"filters": comparison(key="a" * 10**6)},
    "a text": {"filters": comparison("b" * 10**6)},
    "a number": {"filters": comparison(10**400)},
    "a query": {"query": "a" * (MOST_QUERY_CHARACTERS + 1)},
    "a megabyte": {"query": "é" * 150_000},
    "queries": {"query": ["a"] * (MOST_QUERIES + 1)},
    "an empty query": {"query": [""]},
}


@pytest.fixture
async def served(store_at: str) -> AsyncGenerator[ScriptedServer, None]:
    async with embedding_server(("tea",)) as embeddings:
        url = embeddings.url
        async with search_server(store_at, embeddings=url, max_body_bytes=LARGEST_BODY) as served:
            yield served


@pytest.fixture
async def store(served: ScriptedServer) -> str:
    return str((await new_store(served, [await uploaded(served.store, "tea.md", DOCUMENTS["tea.md"])]))["id"])


async def test_largest_searches_work(served: ScriptedServer, store: str) -> None:
    for name, fields in LARGEST.items():
        status, answer = await served.post({"query": "tea", **fields}, f"/v1/vector_stores/{store}/search")
        assert (status, len(answer.get("data", ()))) == (200, 1), (name, answer)


async def test_larger_searches_are_refused(served: ScriptedServer, store: str) -> None:
    for name, fields in TOO_LARGE.items():
        status, answer = await served.post({"query": "tea", **fields}, f"/v1/vector_stores/{store}/search")
        assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (name, answer)


async def test_tool_has_the_same_bounds(served: ScriptedServer, store: str) -> None:
    for name, fields in LARGEST.items():
        if "filters" in fields:
            play_turns(served.engine, search_markup("tea"), answer_markup())
            body = {"input": "Hi", "tools": [file_search(store, filters=fields["filters"])]}
            status, answer = await served.post(body)
            assert (status, answer["output"][0]["status"]) == (200, "completed"), (name, answer)
    for name, fields in TOO_LARGE.items():
        if "filters" in fields:
            body = {"input": "Hi", "tools": [file_search(store, filters=fields["filters"])]}
            status, answer = await served.post(body)
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error"), (name, answer)


async def test_body_that_is_cut_or_endless_is_refused(served: ScriptedServer, store: str) -> None:
    nest = '{"type": "and", "filters": ['
    for text in ('{"query": "tea", "filters": ' + nest * 20_000, '{"query": NaN}', json.dumps({"query": "tea"})[:-1]):
        path = f"{served.url}/v1/vector_stores/{store}/search"
        async with served.client.post(path, data=text, headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 400
