from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.api.runs.heap import WORTHWHILE_BYTES, Heap

PEAK = """
from pathlib import Path
from penstock.api.runs.heap import Heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

heap, before = Heap(), resident()
pieces = [bytearray(b"x" * 65_000) for _ in range(4_000)]
kept = pieces[::100] + [bytearray(9_000)]
del pieces
peak = resident()
print(heap.tidy(), heap.tidy(), peak - before, resident() - before)
"""


@pytest.mark.io
@pytest.mark.slow
def test_memory_goes_back_after_a_peak() -> None:
    result = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=120)
    first, second, peak, after = result.stdout.split()
    assert (first, second) == ("True", "False")
    assert int(after) < 32 << 20 < WORTHWHILE_BYTES < int(peak)


class Scripted(Heap):
    """A heap with a number of free bytes."""

    free = 0

    def __post_init__(self) -> None:
        self._trim = lambda _: 0

    @property
    def free_bytes(self) -> int:
        return self.free


def test_heap_is_trimmed_when_enough_has_become_free_since() -> None:
    heap, trimmed = Scripted(), list[bool]()
    for free in (1, 2, 3, 2, 1, 3):
        heap.free = free * WORTHWHILE_BYTES // 2
        trimmed.append(heap.tidy())
    assert trimmed == [False, True, False, False, False, True]


def test_heap_without_glibc_is_left_alone() -> None:
    heap = Heap()
    heap._trim = heap._info = None
    assert (heap.free_bytes, heap.tidy()) == (0, False)
