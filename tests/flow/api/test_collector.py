from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.api.runs import housekeeping
from penstock.api.runs.housekeeping import collect_if_due, tune_gc

ALL = 2


class Knot:
    """A reference cycle, which only the garbage collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def looks() -> Iterator[list[int]]:
    """The generations of the collections that run, once the server has settled."""
    seen: list[int] = []

    def see(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    before = gc.get_threshold()
    tune_gc()
    gc.callbacks.append(see)
    yield seen
    gc.callbacks.remove(see)
    gc.set_threshold(*before)
    gc.unfreeze()


def test_large_request_causes_no_full_collection(looks: list[int]) -> None:
    kept = [[number] for number in range(100_000)]
    assert looks
    assert ALL not in looks
    assert len(kept) == 100_000


def test_cyclic_garbage_is_freed_without_a_full_collection(looks: list[int]) -> None:
    knots = [weakref.ref(Knot()) for _ in range(100_000)]
    left = sum(knot() is not None for knot in knots)
    assert ALL not in looks
    assert left < 30_000


@pytest.mark.parametrize("running", [0, 1])
def test_full_collection_waits_for_a_moment_without_requests(
    looks: list[int], running: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "DUE", 0)
    gc.collect(1)
    collect_if_due(running)
    assert (ALL in looks) == (not running)


def test_overdue_collection_waits_no_longer(looks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "OVERDUE", 0)
    gc.collect(1)
    collect_if_due(running=1)
    assert ALL in looks


def test_startup_objects_are_frozen(looks: list[int]) -> None:
    assert gc.get_freeze_count() > 10_000
