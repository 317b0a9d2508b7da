from __future__ import annotations

from stages.persist.store import Store
from tests.stages.persist.samples import stored


async def test_an_unknown_id_is_none(store: Store) -> None:
    """What was never kept is not an error."""
    assert await store.get("resp_none", "") is None
    assert await store.chain("resp_none", "") == ()
