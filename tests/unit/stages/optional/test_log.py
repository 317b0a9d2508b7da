from __future__ import annotations

import logging

import pytest

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.logs import FORMAT, current_response, name_response
from penstock.pipeline.protocol import items
from penstock.pipeline.protocol.events import ResponseEvent
from penstock.stages.optional.log import LogOutputs, in_words
from tests.support.frames import FOUND_PAGES, SHELL_OUTPUT, whole_turn, written_events


async def test_each_item_is_logged_when_it_is_done(caplog: pytest.LogCaptureFixture) -> None:
    events = written_events(whole_turn())
    with caplog.at_level(logging.INFO):
        logged: Pipeline[ResponseEvent, ResponseEvent] = Pipeline.start("log", LogOutputs())
        async with logged.open(source_of(events)) as stream:
            assert [event async for event in stream] == events
    lines = ["reasoning: 'Let me think.'", "message: 'Hello!'", """call of get_weather: '{"city":"Oslo"}'"""]
    assert [record.getMessage() for record in caplog.records] == lines


@pytest.mark.parametrize(
    ("item", "line"),
    [
        (items.Message("msg_1", "completed", "assistant", (items.OutputText("one\ntwo"),)), r"message: 'one\ntwo'"),
        (items.Reasoning("rs_1", (items.SummaryText("Hm."),)), "reasoning: 'Hm.'"),
        (items.FunctionCall("fc_1", "call_1", "wait", "{", "incomplete", "agents"), "call of agents.wait: '{'"),
        (items.CustomToolCall("ctc_1", "call_1", "shell", "ls", "completed"), "call of shell: 'ls'"),
        (items.McpListTools("mcpl_1", "wiki", (items.ListedTool("ask", {}),)), "tools of wiki: 1"),
        (items.McpListTools("mcpl_1", "wiki", (), "It is down."), "tools of wiki: It is down."),
        (items.McpCall("mcp_1", "wiki", "ask", "{}", "completed", "A\nB"), "call of wiki.ask, completed: '{}'"),
        (items.McpApprovalRequest("mcpr_1", "wiki", "ask", "{}"), "request to approve of wiki.ask: '{}'"),
        (items.CodeInterpreterCall("ci_1", "1\n2", "cntr_1", "failed"), r"code, failed: '1\n2'"),
        (
            items.WebSearchCall("ws_1", "completed", FOUND_PAGES),
            "web search, completed: {'type': 'search', 'query': 'Oslo'}",
        ),
        (items.ShellCall("sh_1", "call_1", {"commands": ["ls"]}, "completed"), """shell_call: '{"commands":["ls"]}'"""),
        (
            items.ShellCallOutput("sho_1", "call_1", (SHELL_OUTPUT,), "completed"),
            "output of a shell, completed: 1 commands",
        ),
        (
            items.LocalShellCall("lsh_1", "call_1", {"command": ["ls"]}, "completed"),
            """local_shell_call: '{"command":["ls"]}'""",
        ),
        (items.ApplyPatchCall("apc_1", "call_1", {"path": "a"}, "completed"), """apply_patch_call: '{"path":"a"}'"""),
    ],
)
def test_item_is_logged_in_one_line(item: items.OutputItem, line: str) -> None:
    assert in_words(item) == line


def test_log_line_names_its_response() -> None:
    record = logging.makeLogRecord({"msg": "words", "name": "stages", "levelname": "INFO"})
    assert name_response(record)
    assert " INFO - stages: words" in logging.Formatter(FORMAT).format(record)
    token = current_response.set("resp_1")
    assert name_response(record)
    current_response.reset(token)
    assert " INFO resp_1 stages: words" in logging.Formatter(FORMAT).format(record)
