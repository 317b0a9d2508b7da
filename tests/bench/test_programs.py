"""A program finds what the calls of a model find, for fewer tokens; ``--regen`` writes the tables."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import pytest

from tests.bench.program_tasks import TASKS, Task
from tests.bench.programs import ONE, SEVERAL, Costs, measure, share, short_table, tables
from tests.support.paths import ROOT

pytestmark = [pytest.mark.io, pytest.mark.slow]

PAGE, FILE = ROOT / "docs" / "PROGRAMS.md", ROOT / "tests" / "bench" / "programs.txt"
TABLE = re.compile(r"(?<=^```text\n)task .*?(?=\n```$)", re.DOTALL | re.MULTILINE)
GOAL, MANY = 0.1, 20
"""The share of tokens that a program should need, and from how many calls on."""

EXCEPTIONS = {"reports"}
"""Tasks with many calls for which a program needs more than `GOAL` of the tokens of calls at once."""


@pytest.fixture(scope="module")
def found() -> Mapping[Task, Costs]:
    return asyncio.run(measure())


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_each_way_finds_the_facts(task: Task, found: Mapping[Task, Costs]) -> None:
    answers = {way: cost.answer for way, cost in found[task].items()}
    assert answers == dict.fromkeys(answers, task.facts)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_model_speaks_twice_if_it_writes_a_program(task: Task, found: Mapping[Task, Costs]) -> None:
    assert {cost.turns for (_, way), cost in found[task].items() if way not in (ONE, SEVERAL)} == {2}


def test_program_of_many_calls_needs_a_tenth_of_the_tokens(found: Mapping[Task, Costs]) -> None:
    many = [task for task in TASKS if task.calls >= MANY]
    assert {task.name for task in many if share(found[task], ONE, served=False) > GOAL} == set()
    assert {task.name for task in many if share(found[task], SEVERAL, served=False) > GOAL} == EXCEPTIONS


def test_page_has_the_figures(found: Mapping[Task, Costs], pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--regen"):
        PAGE.write_text(TABLE.sub(lambda _: short_table(found), PAGE.read_text()))
        FILE.write_text(tables(found))
    assert TABLE.findall(PAGE.read_text()) == [short_table(found)]
    assert FILE.read_text() == tables(found)
