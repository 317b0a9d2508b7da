"""The fields of requests that Claude Code sends by default, or is made to send by a setting, in whole sessions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.claude_session import capturing
from tests.support.launched_agents import Launched, agent_server, call, paths

Settings = Mapping[str, str]

ANTHROPICS_OWN = {"_CLAUDE_CODE_ASSUME_FIRST_PARTY_BASE_URL": "1"}
"""The setting with which Claude Code sends a server all that it sends Anthropic's own."""

IN_THREAD: Mapping[str, Settings] = {
    "context_management.edits.keep": {},
    "output_config.effort": {},
    "tools.defer_loading": {},
    "thread.previous_message_id": {"CLAUDE_CODE_TETHER_LIVE": "1"},
}
WHOLE: Mapping[str, Settings] = {
    "messages.output_config.effort": {"CLAUDE_CODE_MODEL_CAPABILITIES": "mid_conv_system,per_turn_effort"},
    "diagnostics.previous_message_id": ANTHROPICS_OWN,
    "thinking.block_binding.prefix_mismatch_behavior": {**ANTHROPICS_OWN, "CLAUDE_CODE_POLISHED_DEWDROP": "drop"},
    **{
        name: {"CLAUDE_CODE_EXTRA_BODY": '{"service_tier": "auto", "speed": "fast"}'}
        for name in ("service_tier", "speed")
    },
}
"""The settings by the path of the field: those of a session in a thread, and of one that sends all in each turn."""

REFUSED = {
    "thinking.block_binding.prefix_mismatch_behavior": "thinking.adaptive.block_binding: Extra inputs are not permitted"
}
"""The words after which Claude Code goes on without a field."""

LOADING = "\n".join(
    (
        call("Bash", command="printf hello > hello.txt", description="Write"),
        call("ToolSearch", query="select:CronList"),
        call("CronList"),
        "say No jobs.",
    )
)


@pytest.mark.parametrize("fields", [IN_THREAD, WHOLE], ids=["in a thread", "whole"])
def test_session_goes_on_with_each_field(
    penstock: str, claude: Launched, tmp_path: Path, fields: Mapping[str, Settings]
) -> None:
    settings = {"env": {name: value for each in fields.values() for name, value in each.items()}}
    arguments = ("-p", "--output-format", "json", "--allowedTools", "Bash", "--settings", json.dumps(settings))
    store = f"--store={tmp_path / 'store.sqlite3'}"
    with agent_server(penstock, tmp_path, store) as server, capturing(server.url) as (url, bodies):
        session = replace(claude, url=url)
        for more, prompt, answer, turns in (((), LOADING, "No jobs.", 4), (("--continue",), "say Bye.", "Bye.", 1)):
            [result] = session.run(*arguments, *more, prompt=prompt).lines
            assert (result["result"], result["num_turns"], result["is_error"]) == (answer, turns, False)
        log = server.log.read_text()
    assert (claude.project / "hello.txt").read_text() == "hello"
    assert set(fields) - {path for body in bodies for path in paths(body)} == set()
    refusals = [REFUSED[field] for field in fields if field in REFUSED]
    assert log.count("/v1/messages: 4") == len(refusals) * 2  # once in each run
    assert [words for words in refusals if words not in log] == []
