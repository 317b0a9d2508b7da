"""The use of approvals: every answer names the one response that has an approval, also while others want it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import StoreFailed
from penstock.services.store.approvals import StoredApprovals
from penstock.services.store.database import Statement
from penstock.services.store.store import Store

OWNER, APPROVAL = "owner", "mcpr_1"


class Table:
    """The table of used approvals, in memory; ``pauses`` are the turns of the loop that each call takes."""

    def __init__(self, pauses: Sequence[int], *, is_away: bool) -> None:
        self._pauses = iter(pauses)
        self._is_away = is_away
        self._rows: dict[tuple[Any, ...], str] = {}
        self.writer = self

    async def carry_out(self, statements: Sequence[Statement]) -> None:
        await self._wait()
        for statement in statements:
            owner, name, response_id = statement.arguments[:3]
            self._rows.setdefault((owner, name), str(response_id))
        await self._wait()

    async def read(self, sql: str, owner: str, *names: str) -> list[tuple[str, str]]:
        await self._wait()
        found = [(name, self._rows[owner, name]) for name in names if (owner, name) in self._rows]
        await self._wait()
        return found

    async def _wait(self) -> None:
        for _ in range(next(self._pauses, 0)):
            await asyncio.sleep(0)
        if self._is_away:
            raise StoreFailed("The store is away.")


@given(
    st.lists(st.integers(0, 9), min_size=40, max_size=40),
    st.lists(st.integers(0, 9), min_size=9, max_size=9),
    st.booleans(),
)
def test_every_answer_names_the_response_that_has_the_approval(
    pauses: list[int], starts: list[int], is_away: bool
) -> None:
    async def run() -> None:
        table: Any = Table(pauses, is_away=is_away)
        here = StoredApprovals(table)
        servers = [here, here, here if is_away else StoredApprovals(table)]

        async def use(number: int) -> str:
            for _ in range(starts[number]):
                await asyncio.sleep(0)
            return await servers[number % 3].use(OWNER, APPROVAL, f"resp_{number}")

        async def look(number: int) -> str | None:
            for _ in range(starts[number]):
                await asyncio.sleep(0)
            return (await servers[number % 3].used(OWNER, [APPROVAL])).get(APPROVAL)

        users = await asyncio.gather(*map(use, range(6)), *map(look, range(6, 9)))
        assert len({user for user in users if user is not None}) == 1
        assert {(await server.used(OWNER, [APPROVAL]))[APPROVAL] for server in servers} <= set(users)

    asyncio.run(run())


@pytest.mark.slow
async def test_any_number_of_approvals_and_items_may_be_looked_up(store: Store) -> None:
    """A database takes only so many arguments in one statement: SQLite 32,766, PostgreSQL 65,535."""
    ids = [f"mcpr_{number}" for number in range(70_000)]
    await store.approvals.use(OWNER, ids[-1], "resp_1")
    assert await StoredApprovals(store.context).used(OWNER, ids) == {ids[-1]: "resp_1"}
    assert await store.conversations.find("conv_1", OWNER, ids) == {}
    assert await store.items(ids, OWNER) == {}
