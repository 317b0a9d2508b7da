"""Answers with a long list are encoded in pieces, apart from the event loop, to the same bytes."""

from __future__ import annotations

import pytest

from penstock.api.http.bodies import Items
from penstock.api.http.errors import as_json, listed_as_json
from penstock.pipeline.protocol.items import InputText, Message
from penstock.pipeline.tasks import MANY_VALUES


@pytest.mark.parametrize("count", [0, 1, MANY_VALUES, MANY_VALUES + 1, 2 * MANY_VALUES, 2 * MANY_VALUES + 1])
async def test_long_list_has_the_same_bytes(count: int) -> None:
    items = tuple(Message(f"msg_{at}", "completed", "user", (InputText('"data":[]'),)) for at in range(count))
    body = Items(items, "a", None, has_more=False)
    assert (await listed_as_json(body, "data")).body == as_json(body).body
