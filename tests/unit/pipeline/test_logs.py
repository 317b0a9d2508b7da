from __future__ import annotations

import logging

import pytest

from penstock.pipeline.logs import Coloured, counted, duration


@pytest.mark.parametrize(
    ("level", "line"),
    [(logging.INFO, "Hi"), (logging.WARNING, "\x1b[33mHi\x1b[0m"), (logging.ERROR, "\x1b[31mHi\x1b[0m")],
)
def test_only_warnings_and_errors_have_a_colour(level: int, line: str) -> None:
    record = logging.LogRecord("penstock", level, __file__, 1, "Hi", None, None)
    assert Coloured("%(message)s").format(record) == line


@pytest.mark.parametrize(("number", "text"), [(0, "0 recordings"), (1, "1 recording"), (143, "143 recordings")])
def test_counted_noun_has_its_plural(number: int, text: str) -> None:
    assert counted(number, "recording") == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (20, "20 s"), (90, "1.5 min"), (43200, "12 h"), (2592000, "30 d")]
)
def test_duration_is_in_its_largest_unit(seconds: float, text: str) -> None:
    assert duration(seconds) == text
