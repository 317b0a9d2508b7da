from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.logs import (
    Coloured,
    JsonLines,
    Lines,
    Seldom,
    counted,
    duration,
    printable,
    without_foreign_texts,
)


@pytest.mark.parametrize(
    ("level", "line"),
    [(logging.INFO, "Hi"), (logging.WARNING, "\x1b[33mHi\x1b[0m"), (logging.ERROR, "\x1b[31mHi\x1b[0m")],
)
def test_only_warnings_and_errors_have_a_colour(level: int, line: str) -> None:
    record = logging.LogRecord("penstock", level, __file__, 1, "Hi", None, None)
    assert Coloured("%(message)s").format(record) == line


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (0, "recording", "0 recordings"),
        (1, "recording", "1 recording"),
        (143, "recording", "143 recordings"),
        (1, "try", "1 try"),
        (2, "try", "2 tries"),
        (2, "key", "2 keys"),
    ],
)
def test_counted_noun_has_its_plural(number: int, noun: str, text: str) -> None:
    assert counted(number, noun) == text


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


@given(st.text(), st.text(), st.text())
def test_no_text_forges_a_line(message: str, argument: str, raised: str) -> None:
    """The first line has all of a message; each further line is one of a traceback, and begins with blanks."""
    info = (ValueError, ValueError(raised), None)
    record = logging.LogRecord("penstock", logging.INFO, "", 0, "%s: %s", (message, argument), info)
    first, *further = Lines("%(levelname)s %(message)s").format(record).split("\n")
    assert first.startswith("INFO ")
    assert all(line.startswith("  ") for line in further)
    assert all(line.isprintable() for line in (first, *further))


def test_what_prints_stays_as_it_is() -> None:
    assert printable("Größe 水果 🌙 it's") == "Größe 水果 🌙 it's"
    assert printable("a\nb\x1b[31m\u202e\ud800\t") == "a\\nb\\x1b[31m\\u202e\\ud800\\t"


def test_errors_that_a_library_logs_are_named() -> None:
    """A library writes into the log what its errors say; those may repeat its settings."""
    record = logging.LogRecord("requests", logging.INFO, "", 0, "%s: %s", ("It failed", ValueError("a key")), None)
    assert without_foreign_texts(record)
    assert record.getMessage() == "It failed: ValueError"


def test_traceback_can_be_read() -> None:
    with pytest.raises(KeyError) as caught:
        _ = dict[str, str]()["field"]
    info = (KeyError, caught.value, caught.tb)
    record = logging.LogRecord("penstock", logging.ERROR, "", 0, "A bug", (), info)
    lines = Lines("%(message)s").format(record).split("\n")
    assert lines[:2] == ["A bug", "  Traceback (most recent call last):"]
    assert lines[-1] == "  KeyError: 'field'"


def test_fields_that_a_library_gives_every_record_are_not_logged() -> None:
    """As vLLM does once it is imported."""
    make = logging.getLogRecordFactory()

    def marking(*arguments: Any, **named: Any) -> logging.LogRecord:
        record = make(*arguments, **named)
        record.process_of_a_library = "its own"
        return record

    logging.setLogRecordFactory(marking)
    try:
        record = logging.getLogger("penstock").makeRecord("penstock", 20, "", 0, "Hi", (), None, extra={"status": 200})
        assert json.loads(JsonLines().format(record)).keys() == {"time", "level", "logger", "message", "status"}
    finally:
        logging.setLogRecordFactory(make)
