from __future__ import annotations

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
