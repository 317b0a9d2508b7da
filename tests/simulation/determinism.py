"""The clock and the randomness of this process, which a simulation replaces.

Import this module before all others but the standard library: some bind these functions when they are imported.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

EPOCH = 1_799_999_980.0
"""The time of day, in seconds since 1970, at which each simulation begins: 20 seconds before the end of an hour."""

_monotonic, _urandom = time.monotonic, os.urandom

_now: Callable[[], float] | None = None
_bytes: random.Random | None = None


def _simulated(real: Callable[[], float], offset: float = 0.0) -> Callable[[], float]:
    def read() -> float:
        return real() if _now is None else _now() + offset

    return read


def _random_bytes(count: int) -> bytes:
    return _urandom(count) if _bytes is None else _bytes.randbytes(count)


time.monotonic = _simulated(time.monotonic)
time.perf_counter = _simulated(time.perf_counter)
time.thread_time = _simulated(time.thread_time)
time.time = _simulated(time.time, EPOCH)
os.urandom = _random_bytes
random._urandom = _random_bytes  # type: ignore[attr-defined] # bound when the module was imported


def real_seconds() -> float:
    """Return the seconds of the machine's own monotonic clock."""
    return _monotonic()


@contextmanager
def deterministic(now: Callable[[], float], seed: str) -> Iterator[None]:
    """Take the time from ``now``, and all randomness from ``seed``, for the length of a block."""
    global _now, _bytes  # noqa: PLW0603 - a process has one clock
    _now, _bytes = now, random.Random(f"{seed} bytes")
    random.seed(f"{seed} global")
    try:
        yield
    finally:
        _now = _bytes = None
