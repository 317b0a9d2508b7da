from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from penstock.extensions.rollouts.forms import TRIED
from tests.oracles.trainers import TRAINERS, columns, defined, made_by_hand, read_back

MODULE = """
import a_trainer_that_is_not_installed

class Metrics(BaseModel):
    seconds: float = 0.0

class Output(BaseModel):
    metrics: Metrics
    ids: List[int]

class Trainer(a_trainer_that_is_not_installed.Trainer):
    def train(self):
        def doubled(number):
            return number * TWO
"""


@pytest.fixture(name="module")
def _module(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    return path


def test_definitions_run_without_what_their_module_imports(module: Path) -> None:
    found = defined(module, "Metrics", "Output", "doubled", BaseModel=BaseModel, TWO=2)
    assert found.doubled(3) == 6
    assert found.Output(metrics={}, ids=[1]).metrics.seconds == 0.0
    with pytest.raises(ValidationError):
        found.Output(metrics={}, ids=["one"])


def test_definition_that_is_gone_is_named(module: Path) -> None:
    with pytest.raises(AssertionError, match="has not all of"):
        defined(module, "Output", "Removed")


@pytest.mark.parametrize("form", TRIED)
def test_trainer_is_given_rows_of_both_kinds_of_files(form: str) -> None:
    as_lines, as_table = read_back(form, [*made_by_hand()])
    assert TRAINERS.keys() == TRIED.keys()
    assert (as_lines, len(as_lines)) == (as_table, 9)


def test_column_of_which_nothing_is_known_is_none() -> None:
    rows = [{"a": 1, "b": None, "c": None}, {"a": 2, "b": 3, "c": None}]
    assert columns(rows, "abc") == {"a": [1, 2], "b": [None, 3], "c": None}
