"""The selection of responses to record, by a header or by the id."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict

from penstock.pipeline.frames import Origin
from penstock.pipeline.recordings.sampling import ALWAYS, Condition
from tests.support.examples import examples

IDS = [f"resp_{sha256(bytes([number % 256, number // 256])).hexdigest()[:32]}" for number in range(1000)]


@pytest.mark.parametrize(
    ("text", "condition"),
    [
        ("x-record", Condition("x-record")),
        ("x-record=yes", Condition("x-record", "yes")),
        ("x-record=", Condition("x-record", "")),
        ("0.01", Condition(rate=0.01)),
        ("1", ALWAYS),
    ],
)
def test_condition_is_a_rate_or_a_header(text: str, condition: Condition) -> None:
    assert Condition.parse(text) == condition


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "nan", "inf", "", "=yes", "x record", "x:y"])
def test_senseless_condition_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="rate between 0 and 1"):
        Condition.parse(text)


@examples(20)
@given(st.floats(0.01, 1))
def test_rate_selects_about_its_share(rate: float) -> None:
    chosen = [name for name in IDS if Condition(rate=rate).chooses(name, Origin())]
    assert abs(len(chosen) / len(IDS) - rate) < 0.06
    assert all(Condition(rate=min(1, rate * 2)).chooses(name, Origin()) for name in chosen)


def test_header_condition_ignores_response_id() -> None:
    any_value, yes = Condition("x-record"), Condition("x-record", "yes")
    for headers, met in (
        ({}, (False, False)),
        ({"X-Record": "no"}, (True, False)),
        ({"X-RECORD": "yes"}, (True, True)),
    ):
        assert (any_value.is_met_by(CIMultiDict(headers)), yes.is_met_by(CIMultiDict(headers))) == met
    assert [yes.chooses(IDS[0], Origin(recorded=recorded)) for recorded in (True, False)] == [True, False]
    assert not ALWAYS.is_met_by({"": ""})
