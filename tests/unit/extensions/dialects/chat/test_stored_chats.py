"""The rows of stored completions, in both databases."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.extensions.dialects.chat import stored_chats
from penstock.extensions.dialects.chat.stored_chats import StoredChats
from penstock.services.store.store import Store
from tests.support.stored_responses import begun_response, stored_response

LONG = 3600.0
"""A retention time in seconds that keeps everything in these tests."""

AT_ONCE = -60.0
"""A retention time in seconds after which everything that has ended is expired."""


async def store_chat(store: Store, response_id: str, **fields: Any) -> None:
    stored = stored_response(response_id, **fields)
    store.part(StoredChats).record(stored.response, "", [0])
    store.begin(begun_response(stored))
    await store.end(stored, None)


async def rows(store: Store) -> tuple[int, ...]:
    tables = ("stored_chats", "stored_chat_metadata")
    return tuple([int((await store.context.read(f"select count(*) from {table}"))[0][0]) for table in tables])


async def ids(store: Store, **asked: Any) -> list[str]:
    found = await store.part(StoredChats).page("", limit=10, **asked)
    assert found is not None
    return [response.id for response in found]


async def test_completion_is_found_once_its_response_has_ended(store: Store) -> None:
    chats, stored = store.part(StoredChats), stored_response("resp_1")
    chats.record(stored.response, "", [0])
    assert (await ids(store), await chats.get("resp_1", "")) == ([], None)
    store.begin(begun_response(stored))
    assert (await ids(store), await chats.get("resp_1", "")) == ([], None)
    await store.end(stored, None)
    assert (await ids(store), await chats.get("resp_1", "")) == (["resp_1"], stored.response)
    assert await chats.get("resp_1", "another") is None


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_response_without_an_answer_is_no_completion(store: Store, status: str) -> None:
    await store_chat(store, "resp_1", status=status)
    assert await ids(store) == []


async def test_completion_goes_with_its_response(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store_chat(store, "resp_1", metadata={"a": "1", "b": "2"})
    await store.sweep(LONG, LONG)
    assert await ids(store) == ["resp_1"]
    await store.sweep(AT_ONCE, AT_ONCE)
    assert await ids(store) == []
    assert await rows(store) == (1, 2)  # its response might not be stored yet
    monkeypatch.setattr(stored_chats, "KEPT", AT_ONCE)
    await store.sweep(LONG, LONG)
    assert await rows(store) == (0, 0)


async def test_sweep_keeps_the_metadata_of_others(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await store_chat(store, "resp_1", metadata={"a": "1"})
    await store_chat(store, "resp_2", metadata={"a": "2"})
    await store.delete("resp_1", "")
    monkeypatch.setattr(stored_chats, "KEPT", AT_ONCE)
    await store.sweep(LONG, LONG)
    assert await store.part(StoredChats).metadata(["resp_2"]) == {"resp_2": {"a": "2"}}
    assert await rows(store) == (1, 1)


async def test_metadata_of_another_key_stays(store: Store) -> None:
    await store_chat(store, "resp_1", metadata={"a": "1"})
    chats = store.part(StoredChats)
    await chats.label("resp_1", "another", {"a": "2", "b": "2"})
    await chats.forget("resp_1", "another")
    assert await chats.metadata(["resp_1", "resp_2"]) == {"resp_1": {"a": "1"}, "resp_2": {}}


async def test_order_is_that_of_creation_and_then_of_ids(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, at in (("resp_b", 2.0), ("resp_c", 1.0), ("resp_a", 2.0)):
        monkeypatch.setattr(stored_chats, "time", SimpleNamespace(time=lambda at=at: at))
        await store_chat(store, name)
    assert await ids(store) == ["resp_c", "resp_a", "resp_b"]
    assert await ids(store, newest_first=True) == ["resp_b", "resp_a", "resp_c"]
    assert await ids(store, after="resp_a") == ["resp_b"]
    assert await ids(store, after="resp_a", newest_first=True) == ["resp_c"]
    assert await store.part(StoredChats).page("", limit=10, after="resp_x") is None
