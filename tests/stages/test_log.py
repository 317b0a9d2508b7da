from __future__ import annotations

import logging

import pytest

from pipeline.core import Pipeline
from pipeline.logs import FORMAT, current_response, name_response
from pipeline.protocol.events import ResponseEvent
from pipeline.protocol.items import (
    CustomToolCall,
    FunctionCall,
    Message,
    OutputItem,
    OutputText,
    Reasoning,
    SummaryText,
)
from pipeline.record import replay
from stages.log import in_words, log_outputs
from tests.building import whole_turn, written


async def test_each_item_is_logged_once_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    """Every event passes as it came, and every item leaves one line that says what it is."""
    events = written(whole_turn())
    with caplog.at_level(logging.INFO):
        logged: Pipeline[ResponseEvent, ResponseEvent] = Pipeline.start("log", log_outputs)
        async with logged.open(replay(events)) as stream:
            assert [event async for event in stream] == events
    said = ["reasoning: 'Let me think.'", "message: 'Hello!'", """call of get_weather: '{"city":"Oslo"}'"""]
    assert [record.getMessage() for record in caplog.records] == said


@pytest.mark.parametrize(
    ("item", "line"),
    [
        (Message("msg_1", "completed", "assistant", (OutputText("one\ntwo"),)), r"message: 'one\ntwo'"),
        (Reasoning("rs_1", (SummaryText("Hm."),)), "reasoning: 'Hm.'"),
        (FunctionCall("fc_1", "call_1", "wait", "{", "incomplete", "agents"), "call of agents.wait: '{'"),
        (CustomToolCall("ctc_1", "call_1", "shell", "ls", "completed"), "call of shell: 'ls'"),
    ],
)
def test_an_item_is_one_line(item: OutputItem, line: str) -> None:
    """Whatever is in an item stands on one line, under what kind of item it is."""
    assert in_words(item) == line


def test_a_line_names_its_response() -> None:
    """The filter gives each record the id that its task works for, and a dash where there is none."""
    record = logging.makeLogRecord({"msg": "words", "name": "stages", "levelname": "INFO"})
    assert name_response(record)
    assert " INFO - stages: words" in logging.Formatter(FORMAT).format(record)
    token = current_response.set("resp_1")
    assert name_response(record)
    current_response.reset(token)
    assert " INFO resp_1 stages: words" in logging.Formatter(FORMAT).format(record)
