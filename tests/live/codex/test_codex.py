"""Codex as its users run it: one request, any number of turns."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.client_server import CODEX_EXEC, Codex, Server
from tests.support.launched_agents import AgentServer, Launched, agent_server, common, is_need

Json = dict[str, Any]

SOCKETS = pytest.mark.parametrize("sockets", [False, True], ids=["http", "websocket"])

LONG_OUTPUT = "pwd() { seq 2000; }\n"
"""A profile of the shell, with which the command of the model writes more than a small context holds."""
SMALL = 6000
"""A window that holds the prompt of Codex, but not such an output."""


def completed(events: list[Json], kind: str) -> list[Json]:
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in items if item["type"] == kind]


def answers(events: list[Json]) -> list[str]:
    return [item["text"] for item in completed(events, "agent_message")]


def kept(codex: Codex, kind: str) -> list[Json]:
    """What Codex keeps of its sessions: the payloads of this type."""
    lines = [line for file in codex.home.glob("sessions/**/*.jsonl") for line in file.read_text().splitlines()]
    return [line["payload"] for line in map(json.loads, lines) if kind in (line["type"], line["payload"].get("type"))]


def summaries(codex: Codex) -> list[str]:
    """The sealed summaries of the compactions so far."""
    items = [payload["replacement_history"][-1] for payload in kept(codex, "compacted")]
    assert {item["type"] for item in items} <= {"compaction"}
    return [item["encrypted_content"] for item in items]


@SOCKETS
@pytest.mark.defect("6")
def test_codex_runs_a_command_and_answers(
    codex: Codex, settle: Callable[..., None], server: Server, sockets: bool
) -> None:
    settle(sockets=sockets, knows_model=False)
    before = len(server.log.read_text())
    events = codex.events("Write hello into hello.txt.")
    assert (codex.project / "hello.txt").read_text() == "hello"
    assert [item["exit_code"] for item in completed(events, "command_execution")] == [0]
    assert answers(events) == ["hello.txt now says hello."]
    assert events[-1]["type"] == "turn.completed"
    assert events[-1]["usage"]["output_tokens"] > 0
    log = server.log.read_text()[before:]
    assert ("WebSocket /v1/responses: completed" in log, "POST /v1/responses" in log) == (sockets, not sockets)


@SOCKETS
@pytest.mark.defect("6")
def test_codex_resumes_a_session(codex: Codex, settle: Callable[..., None], sockets: bool) -> None:
    """Codex sends its whole history, and the model reads it."""
    settle(sockets=sockets)
    first = codex.events("Write hello into hello.txt.")
    (codex.project / "hello.txt").unlink()
    events = codex.events("resume", "--last", "Write hello into hello.txt.")
    assert (codex.project / "hello.txt").read_text() == "hello"
    assert answers(events) == ["hello.txt now says hello."]
    assert events[-1]["usage"]["input_tokens"] > first[-1]["usage"]["input_tokens"]


@SOCKETS
@pytest.mark.parametrize("in_input", [False, True], ids=["tools", "additional_tools"])
def test_codex_edits_a_file_with_a_patch(
    codex: Codex, settle: Callable[..., None], sockets: bool, in_input: bool
) -> None:
    """The patch is the input of a custom tool, and follows its grammar."""
    settle(sockets=sockets, lite=in_input)
    events = codex.events("Add greeting.txt with a patch.")
    assert (codex.project / "greeting.txt").read_text() == "hello\n"
    assert [item["status"] for item in completed(events, "file_change")] == ["completed"]
    assert answers(events) == ["I added greeting.txt."]
    assert [call["name"] for call in kept(codex, "custom_tool_call")] == ["apply_patch"]
    assert bool(kept(codex, "additional_tools")) == in_input


@SOCKETS
def test_session_is_compacted_and_goes_on(codex: Codex, settle: Callable[..., None], sockets: bool) -> None:
    """In the middle of a turn, twice."""
    settle(window=SMALL, sockets=sockets)
    (codex.home / ".profile").write_text(LONG_OUTPUT)
    for number, arguments in enumerate(([], ["resume", "--last"]), 1):
        events = codex.events(*arguments, "Show the current folder.")
        assert answers(events) == ["All of it is done."]
        assert len(set(summaries(codex))) == number
    events = codex.events("resume", "--last", "Add greeting.txt with a patch.")
    assert (codex.project / "greeting.txt").read_text() == "hello\n"
    assert answers(events) == ["I added greeting.txt."]
    assert len(summaries(codex)) == 2


@pytest.mark.long
def test_compacted_session_goes_on_at_another_server(codex: Codex, settle: Callable[..., None], sibling: str) -> None:
    """The second server opens with the key of their store what the first one has sealed."""
    (codex.home / ".profile").write_text(LONG_OUTPUT)
    settle(window=SMALL, sockets=True)
    codex.events("Show the current folder.")
    (summary,) = summaries(codex)
    assert summary.startswith("pst1.")
    settle(sibling, window=SMALL, sockets=True)
    events = codex.events("resume", "--last", "Write hello into hello.txt.")
    assert (codex.project / "hello.txt").read_text() == "hello"
    assert answers(events) == ["hello.txt now says hello."]
    assert summaries(codex) == [summary]


def test_launched_codex_needs_no_settings(launched: Launched) -> None:
    ended = launched.run(*CODEX_EXEC, "Add greeting.txt with a patch.")
    assert answers(ended.lines) == ["I added greeting.txt."]
    assert (launched.project / "greeting.txt").read_text() == "hello\n"
    assert not (launched.folder / "home" / ".codex" / "config.toml").exists()


def test_prompt_is_as_long_as_the_page_says(agent: Launched, agents: AgentServer) -> None:
    events = replace(agent, url=agents.url).run(*CODEX_EXEC, "say Hello.").lines
    assert answers(events) == ["Hello."]
    prompt = events[-1]["usage"]["input_tokens"]
    assert is_need("Codex", "codex", prompt), prompt


def test_session_goes_on_with_another_model(penstock: str, agent: Launched, tmp_path: Path) -> None:
    """It reads the texts of the first, which then finds its own tokens again."""
    with agent_server(penstock, tmp_path, models=("large", "small")) as server:
        session = replace(agent, url=server.url, model="large")
        resumed = ("resume", "--last", "-m")
        for model, arguments in (("large", ()), ("small", (*resumed, "small")), ("large", (*resumed, "large"))):
            events = session.run(*CODEX_EXEC, *arguments, "say It is {model}.").lines
            assert answers(events) == [f"It is {model}."]
            assert "metadata" not in json.dumps(events)
    # Codex prepares its sockets by requests for no answer.
    [first, third] = [prompt for prompt, answer in server.turns(2, "large") if len(answer) > 1]
    assert common(first, third) == len(first)
    assert any("It is large." in (each / "conversation.jsonl").read_text() for each in server.folders("small"))


@pytest.mark.long
def test_launched_codex_needs_no_option_of_the_server(launched: Launched, sibling: str) -> None:
    """A server without a web search, which Codex declares by default."""
    ended = launched.run(*CODEX_EXEC, "Add greeting.txt with a patch.", url=sibling)
    assert answers(ended.lines) == ["I added greeting.txt."]
    [catalog] = (launched.folder / "home" / ".cache" / "penstock").iterdir()
    assert json.loads(catalog.read_text())["models"][0]["input_modalities"] == ["text"]
