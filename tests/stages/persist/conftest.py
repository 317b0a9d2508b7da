from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stages.persist.sqlite import SqliteStore


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store is to be, in a folder that is not there yet."""
    return tmp_path / "folder" / "responses.sqlite3"


@pytest.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    """An open store."""
    store = SqliteStore(path)
    yield store
    await store.close()
