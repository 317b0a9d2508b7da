from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    store = Store(SqliteDatabase(tmp_path / "responses.sqlite3"))
    await store.open()
    yield store
    await store.close()
