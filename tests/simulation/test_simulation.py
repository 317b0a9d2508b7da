from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.simulation.planted import PLANTED
from tests.support.paths import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.io]


def simulation(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, as it replaces the clock of its process."""
    command = [sys.executable, "-m", "tests.simulation", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_servers_keep_their_promises_and_a_seed_repeats_its_trace() -> None:
    many, one = simulation("--count", "6"), simulation("--seed", "5")
    assert many.returncode == 0, many.stdout + many.stderr
    assert one.stdout.splitlines()[0] == many.stdout.splitlines()[5]


@pytest.mark.thorough
def test_old_faults_are_found_if_they_are_put_back() -> None:
    found = simulation("--planted", "--count", "40")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.thorough
def test_promises_hold_over_postgresql_and_a_seed_repeats_its_trace() -> None:
    many, one = simulation("--postgres", "--count", "4"), simulation("--postgres", "--seed", "3")
    assert many.returncode == 0, many.stdout + many.stderr
    assert one.stdout.splitlines()[0] == many.stdout.splitlines()[3]


@pytest.mark.thorough
def test_faults_of_the_store_in_postgresql_are_found() -> None:
    found = simulation("--postgres", "--planted", "--count", "10")
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.thorough
def test_a_fault_is_shrunk_to_the_actions_that_show_it() -> None:
    fault = PLANTED["other-owners"]
    chosen = ("--seed", str(fault.seed), "--kinds", ",".join(fault.kinds), "--plant", "other-owners")
    whole, shrunk = simulation(*chosen), simulation(*chosen, "--shrink")
    kept = re.search(r"--only ([0-9,]+)", shrunk.stdout)
    assert kept, shrunk.stdout + shrunk.stderr
    assert 2 <= len(kept[1].split(",")) < whole.stdout.count(" begins ")
    again = simulation(*chosen, "--only", kept[1])
    assert "of another owner was answered with 200" in again.stdout
