from __future__ import annotations

import asyncio
import logging

import pytest

from penstock.pipeline.logs import Coloured, Seldom, counted, duration


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


@pytest.mark.io
async def test_flood_of_warnings_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    seldom, logger = Seldom(0.05), logging.getLogger("penstock")
    for _ in range(1000):
        seldom.warn(logger, "busy", "It is busy.")
    seldom.warn(logger, "away", "It is away.")
    async with asyncio.timeout(120):
        while seldom._since:
            await asyncio.sleep(0.01)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["It is busy.", "It is away.", "It is busy. (999 more in 0.05 s)"]
