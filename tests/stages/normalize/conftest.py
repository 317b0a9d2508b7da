from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from stages.persist.sqlite import SqliteStore


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[SqliteStore]:
    store = SqliteStore(tmp_path / "responses.sqlite3")
    yield store
    await store.close()
