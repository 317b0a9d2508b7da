"""The garbage collector of a server."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from api.collector import settle

ALL = 2


class Knot:
    """What only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The generations that are looked at, in a server that has settled."""
    seen: list[int] = []

    def see(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    settle()
    gc.callbacks.append(see)
    yield seen
    gc.callbacks.remove(see)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_a_large_request_stops_nobody_for_all_that_lives(looks: list[int]) -> None:
    """A hundred thousand values are made without one look at everything."""
    kept = [[number] for number in range(100_000)]
    assert looks
    assert ALL not in looks
    assert len(kept) == 100_000


def test_what_only_the_collector_can_free_is_freed(looks: list[int]) -> None:
    """Garbage does not wait for a look at everything."""
    knots = [weakref.ref(Knot()) for _ in range(100_000)]
    left = sum(knot() is not None for knot in knots)
    assert ALL not in looks
    assert left < 30_000


def test_what_a_server_starts_with_is_left_alone(looks: list[int]) -> None:
    """No look takes longer because of it."""
    assert gc.get_freeze_count() > 10_000
