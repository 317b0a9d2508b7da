from __future__ import annotations

from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.dialects.messages.places import Block, Places

BLOCKS: st.SearchStrategy[list[Block]] = st.lists(
    st.tuples(st.integers(0, 10**6), st.none() | st.integers(0, 10**6)), max_size=3
)


@given(st.lists(st.tuples(st.integers(0, 10**6), BLOCKS), min_size=1, max_size=5))
def test_each_part_has_its_place(items: list[tuple[int, list[Block]]]) -> None:
    places = Places()
    for message, blocks in items:
        places.add(message, blocks)
    for item, (message, blocks) in enumerate(items):
        whole = f"messages[{message}]"
        parts = [
            f"{whole}.content[{outer}]" + ("" if inner is None else f".content[{inner}]") for outer, inner in blocks
        ]
        found = [places.of(item, part) for part in chain([None], range(len(blocks) + 1))]
        assert found == [whole, *parts, whole]
