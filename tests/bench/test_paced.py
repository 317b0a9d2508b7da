from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.bench.measuring import Found, attempt
from tests.bench.paced import FIRST, RATE, Try, delays, next_streams
from tests.bench.readers import ARRIVAL


def test_held_back_token_is_late(tmp_path: Path) -> None:
    begun, step = 100.0, 1 / RATE
    ahead = [(99.0, stream, 1) for stream in (7, 9)]
    single = [(begun + number * step + 0.001, 7, 1) for number in range(4)]
    arrivals = tmp_path / "arrivals"
    blocks = [*ahead, *single, (begun + 3 * step, 9, 4)]
    arrivals.write_bytes(b"".join(ARRIVAL.pack(*block) for block in blocks) + b"half")
    late = delays(arrivals, 2, slice(1, 5), begun)
    assert late == pytest.approx(np.array([[0.001] * 4, [3 * step, 2 * step, step, 0]]))


def test_missing_token_is_endlessly_late(tmp_path: Path) -> None:
    arrivals = tmp_path / "arrivals"
    arrivals.write_bytes(ARRIVAL.pack(1.0, 7, 1))
    assert delays(arrivals, 2, slice(0, 2), 1.0).tolist() == [[0.0, np.inf], [np.inf, np.inf]]


def test_next_try_is_nearer_once_the_limit_is_passed() -> None:
    late, good = (Try(100, 0.001, p99, 1.0) for p99 in (0.03, 0.002))
    assert next_streams([]) == FIRST
    assert [next_streams([good]), next_streams([good, good])] == [160, 160]
    assert [next_streams([late]), next_streams([good, late]), next_streams([late, good])] == [62, 87, 115]


async def test_failing_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def failing() -> None:
        raise RuntimeError("The server is gone")

    found = Found()
    await attempt("servers", found, failing())
    assert found.failed == "RuntimeError('The server is gone')"
    assert "Traceback" in capsys.readouterr().err
