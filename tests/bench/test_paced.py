from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.bench.measuring import Found, attempt
from tests.bench.paced import RATE, Try, carried, delays
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


def test_largest_load_in_time_is_carried() -> None:
    late, good = Try(200, 0.01, 0.03, 1.0), Try(100, 0.001, 0.002, 1.0)
    assert (carried([late, good]), carried([late])) == (100, 0)


async def test_failing_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def failing() -> None:
        raise RuntimeError("The server is gone")

    found = Found()
    await attempt("servers", found, failing())
    assert found.failed == "RuntimeError('The server is gone')"
    assert "Traceback" in capsys.readouterr().err
