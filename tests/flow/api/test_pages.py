from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http.pagination import PageRequest
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.items import Item, Message

orders = st.sampled_from(["asc", "desc"])


def listed(names: list[str]) -> list[Item]:
    return [Message(f"msg_{name}", "completed", "user", ()) for name in names]


def walked(items: list[Item], limit: int, order: str) -> list[Item]:
    """The items that a client gets by requesting page after page, as openai-python does."""
    read, after = list[Item](), None
    while True:
        page = PageRequest(limit, order, after).of(items)
        assert len(page.data) == limit or not page.has_more
        assert (page.first_id, page.last_id) == ((page.data[0].id, page.data[-1].id) if page.data else (None, None))
        read += page.data
        if not page.has_more:
            return read
        after = page.last_id


@given(size=st.integers(0, 50), limit=st.integers(1, 60), order=orders)
def test_pages_join_to_the_list(size: int, limit: int, order: str) -> None:
    items = listed([str(number) for number in range(size)])
    assert walked(items, limit, order) == (items if order == "asc" else items[::-1])


@given(names=st.lists(st.sampled_from("abc"), max_size=20), limit=st.integers(1, 5), order=orders)
def test_pages_end_with_repeated_ids(names: list[str], limit: int, order: str) -> None:
    """Items that share an id, which a client may have sent, never lead back to an earlier page."""
    assert len(walked(listed(names), limit, order)) <= len(names)


def test_unknown_position_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'x{100}[.]{3}'") as caught:
        PageRequest(1, "asc", "x" * 1000).of(listed(["a"]))
    assert caught.value.param == "after"
