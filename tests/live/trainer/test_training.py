from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from tests.support.paths import ROOT

PROGRAMS = Path(sys.executable).parent
TRAINER = ROOT / ".venv-trainer/bin/python"

pytestmark = pytest.mark.timeout(3600)  # it trains twice

Steps = Sequence[dict[str, Any]]


@pytest.fixture(scope="module", name="runs")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Steps]:
    """The steps of a training, and of one whose rewards are shuffled."""
    out = tmp_path_factory.mktemp("training") / "steps.json"
    subprocess.run([TRAINER, "-m", "tests.live.trainer", PROGRAMS, out], cwd=ROOT, check=True)
    found: dict[str, Steps] = json.loads(out.read_text())
    return found


def thirds(steps: Steps) -> tuple[list[float], list[float]]:
    """The rewards of the sessions of the first third of a training, and of the last."""
    third = len(steps) // 3
    first, last = ([each for step in part for each in step["rewards"]] for part in (steps[:third], steps[-third:]))
    return first, last


def test_rewards_rise(runs: dict[str, Steps]) -> None:
    first, last = thirds(runs["trained"])
    error = (stdev(first) ** 2 / len(first) + stdev(last) ** 2 / len(last)) ** 0.5
    assert fmean(last) - fmean(first) > max(0.2, 5 * error)


def test_shuffled_rewards_teach_nothing(runs: dict[str, Steps]) -> None:
    _, last = thirds(runs["shuffled"])
    assert fmean(last) < 0.3


def test_trainer_finds_the_recorded_log_probabilities(runs: dict[str, Steps]) -> None:
    """Each batch was written by the weights that the trainer has, and read in the same tokens."""
    for step in (step for steps in runs.values() for step in steps):
        assert step["tokens"] > 0
        assert step["worst"] < 1e-3
        assert abs(step["ratio"] - 1) < 1e-4


def test_few_sessions_have_more_than_one_path(runs: dict[str, Steps]) -> None:
    """The template renders a call anew that is no JSON, or whose tool the agent has not."""
    steps = [step for steps in runs.values() for step in steps]
    assert sum(step["cut"] for step in steps) < 0.1 * sum(len(step["rewards"]) for step in steps)


def test_rollouts_name_the_weights_that_wrote_them(runs: dict[str, Steps]) -> None:
    for run, steps in runs.items():
        assert [step["versions"] for step in steps] == [[f"{run}-{number}"] for number in range(len(steps))]
