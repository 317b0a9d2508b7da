from __future__ import annotations

import pytest

from penstock.pipeline.logs import counted, duration


@pytest.mark.parametrize(("number", "text"), [(0, "0 recordings"), (1, "1 recording"), (143, "143 recordings")])
def test_counted_noun_has_its_plural(number: int, text: str) -> None:
    assert counted(number, "recording") == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (20, "20 s"), (90, "1.5 min"), (43200, "12 h"), (2592000, "30 d")]
)
def test_duration_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
