from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from penstock.services.store.store import Store
from tests.support.stores import open_store


@pytest.fixture
async def other(store_at: str) -> AsyncIterator[Store]:
    async with open_store(store_at) as store:
        yield store
