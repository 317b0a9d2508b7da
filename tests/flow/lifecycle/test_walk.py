"""Random walks: responses are created, followed, left, cancelled and deleted, and servers stopped and killed.

Each accepted response ends exactly once, each of its readers gets an end or a broken connection, and all readers see
the same bytes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.api_clients import MODES
from tests.support.examples import examples
from tests.support.lifecycle import World
from tests.support.stores import DATABASES, empty_store

WHICH = st.integers(0, 3)

STEPS: st.SearchStrategy[tuple[Any, ...]] = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(MODES)),
    st.tuples(st.just("say"), st.integers(1, 30)),
    st.tuples(st.just("save")),
    st.tuples(st.just("follow"), WHICH, st.integers(-1, 50)),
    st.tuples(st.sampled_from(("leave", "cancel", "delete")), WHICH),
    st.tuples(st.just("stop")),
    st.tuples(st.just("kill")),
)

ALL_AT_ONCE = [("ask", mode) for mode in MODES] + [("follow", which, 3) for which in range(4)]
DEATHS = [*ALL_AT_ONCE, ("say", 12), ("save",), ("say", 3), ("kill",), *ALL_AT_ONCE, ("say", 12), ("stop",), ("kill",)]


@pytest.mark.usefixtures("postgres")  # is up before any example runs
@pytest.mark.parametrize("place", DATABASES)
def test_random_walk_loses_no_response(request: pytest.FixtureRequest, place: str) -> None:
    @examples(12)
    @example(DEATHS)
    @given(st.lists(STEPS, min_size=8, max_size=20))
    def walk(steps: list[tuple[Any, ...]]) -> None:
        asyncio.run(walked(steps))

    async def walked(steps: list[tuple[Any, ...]]) -> None:
        with TemporaryDirectory() as folder:
            async with empty_store(request, place, Path(folder)) as store_at:
                world = World(store_at)
                await world.start()
                try:
                    for name, *arguments in steps:
                        await getattr(world, name)(*arguments)
                    await world.check()
                finally:
                    await world.close()

    walk()
