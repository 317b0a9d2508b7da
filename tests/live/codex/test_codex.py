"""Codex as its users run it: one request, any number of turns."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.client_server import Codex

Json = dict[str, Any]


def completed(events: list[Json], kind: str) -> list[Json]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


@pytest.mark.defect("6")
def test_codex_runs_a_command_and_answers(codex: Codex) -> None:
    events = codex.events("Write hello into hello.txt.")
    assert (codex.project / "hello.txt").read_text() == "hello"
    assert [item["exit_code"] for item in completed(events, "command_execution")] == [0]
    assert [item["text"] for item in completed(events, "agent_message")] == ["hello.txt now says hello."]
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["output_tokens"] > 0


@pytest.mark.defect("6")
def test_codex_resumes_a_session(codex: Codex) -> None:
    """Codex sends its whole history, and the model reads it.

    Codex puts a path and a date into its prompt; the model's answer to this request does not depend on them.
    """
    first = codex.events("Write hello into hello.txt.")
    (codex.project / "hello.txt").unlink()
    events = codex.events("resume", "--last", "Write hello into hello.txt.")
    assert (codex.project / "hello.txt").read_text() == "hello"
    assert [item["text"] for item in completed(events, "agent_message")] == ["hello.txt now says hello."]
    assert events[-1]["usage"]["input_tokens"] > first[-1]["usage"]["input_tokens"]
