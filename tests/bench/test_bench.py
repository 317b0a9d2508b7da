"""What `make bench` writes down, on figures that are quick to find."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.bench.figures import Comparison, Figure
from tests.bench.goals import Goal
from tests.bench.inprocess import in_process
from tests.bench.measuring import Found
from tests.bench.report import document, write


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports
async def test_both_frontends_are_measured_in_process(tmp_path: Path) -> None:
    """Every size of step is there with a cost of both, and comes out in the tables and the JSON."""
    compared = await in_process(rounds=1, tokens=64, depths=(0,))
    assert [found.load["step"] for found in compared] == [1, 8]
    assert all(found.ours.median > 0 < found.peer.median for found in compared)
    goal = Goal("P1", "ids to SSE bytes", "us", 0.5, 1.0, 10.0, 0.05, 0.06)
    found = Found([goal], {"in process": compared})
    assert "| P1 | ids to SSE bytes | at most 1 us, 0.06 of vLLM's | 0.5 | 10 | 0.050 | yes |" in document(found)
    write(found, tmp_path)
    assert len(json.loads((tmp_path / "bench.json").read_text())["comparisons"]["in process"]) == 2


def test_ratios_are_those_within_a_round() -> None:
    """A machine that is slow for one round slows both."""
    assert Comparison({}, Figure((1.0, 10.0, 1.1)), Figure((2.0, 20.0, 2.2))).ratio == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("ours", "ratio", "verdict"), [(0.5, 0.05, "yes"), (3.0, 0.05, "by ratio"), (0.5, 0.5, "no"), (3.0, 0.5, "no")]
)
def test_a_slow_machine_is_told_apart_from_a_slow_server(ours: float, ratio: float, verdict: str) -> None:
    """The bound in microseconds is that of one machine; the ratio holds anywhere."""
    assert Goal("P1", "", "us", ours, 1.0, 1.0, ratio, 0.06).verdict == verdict
