from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.server import ScriptedServer
from tests.support.stored_responses import ITEMS, store_response, stored_conversation, stored_response

pytestmark = pytest.mark.usefixtures("store_at")

WIRE: list[dict[str, Any]] = [msgspec.to_builtins(item, str_keys=True) for item in ITEMS]


def listed(item: dict[str, Any]) -> Any:
    return msgspec.json.decode(msgspec.json.encode(item))


async def pages(served: ScriptedServer, path: str, limit: int) -> list[dict[str, Any]]:
    items, after = list[dict[str, Any]](), ""
    while True:
        status, page = await served.get(f"{path}?order=asc&limit={limit}{after}")
        assert status == 200
        items += page["data"]
        if not page["has_more"]:
            return items
        after = f"&after={page['last_id']}"


@pytest.mark.parametrize("limit", [1, 7, 100])
async def test_items_of_every_type_are_listed(served: ScriptedServer, limit: int) -> None:
    await served.store.conversations.create(stored_conversation(), "", ITEMS)
    await store_response(served.store, stored_response("resp_1", *ITEMS))
    for path in ("/v1/conversations/conv_1/items", "/v1/responses/resp_1/input_items"):
        assert await pages(served, path, limit) == [listed(item) for item in WIRE]


async def test_items_of_every_type_are_found_and_deleted(served: ScriptedServer) -> None:
    await served.store.conversations.create(stored_conversation(), "", ITEMS)
    for item in WIRE:
        path = f"/v1/conversations/conv_1/items/{item['id']}"
        assert await served.get(path) == (200, listed(item))
        assert (await served.delete(path))[0] == 200
        assert (await served.get(path))[0] == 404
    assert await pages(served, "/v1/conversations/conv_1/items", 100) == []
