from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.oracles.entrypoints.__main__ import FOLDERS, STAND_INS, SUITE, substituted


def test_each_failing_test_is_explained_once() -> None:
    assert SUITE.verdicts()


@given(st.sampled_from(sorted(STAND_INS)), st.text("abc = \n"))
def test_names_of_models_are_replaced(name: str, around: str) -> None:
    assert substituted(f'{around}"{name}"{around}') == f'{around}"{STAND_INS[name]}"{around}'
    assert STAND_INS[name] in FOLDERS


@given(st.from_regex(r"[\w.-]+/[\w.-]+", fullmatch=True).filter(lambda name: name not in STAND_INS))
def test_other_texts_stay(text: str) -> None:
    assert substituted(f'"{text}"') == f'"{text}"'


@pytest.mark.io
@pytest.mark.slow
def test_each_test_has_one_result(tmp_path: Path) -> None:
    for name in ("one", "two"):
        test = tmp_path / SUITE.root / f"{name}/test_{name}.py"
        test.parent.mkdir(parents=True)
        test.write_text(f"def test_{name}(): pass\n")
    found = [result["test"] for name in ("one", "two") for result in SUITE.results(tmp_path, [name], {})]
    assert found == ["one/test_one.py::test_one", "two/test_two.py::test_two"]
