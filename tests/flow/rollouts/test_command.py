"""`penstock rollouts`: the work of an agent with a server, as a trainer reads it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from penstock.extensions.rollouts.rewards import FILE, RewardLine, write_reward
from penstock.pipeline.frames import TokenLogprob
from penstock.services.engines.scripted import ScriptedEngine
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.api_clients import Json
from tests.support.processes import PATIENCE, RunCommand, wait_for
from tests.support.server import CALL, HELLO, WEATHER, recording_server, script

INCLUDE = ["message.output_text.logprobs"]
LOGPROBS = [TokenLogprob(-0.25), TokenLogprob(-1.5)]


async def record(folder: Path, *, session: str = "work") -> tuple[list[Json], list[list[int]]]:
    """Let an agent call a tool, answer, and begin with other instructions; return its responses and the prompts."""
    engine = ScriptedEngine()
    asked: dict[str, Any] = {"model": "tiny", "session_id": session, "tools": [WEATHER], "include": INCLUDE}
    async with recording_server(engine, folder) as served:
        engine.script = script(CALL, logprobs=LOGPROBS)
        _, called = await served.post({**asked, "input": "How is the weather?"})
        (call,) = [item for item in called["output"] if item["type"] == "function_call"]
        engine.script = script(HELLO, logprobs=LOGPROBS)
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 °C"}
        _, answered = await served.post({**asked, "input": [output], "previous_response_id": called["id"]})
        edited = {**asked, "instructions": "Be brief.", "previous_response_id": answered["id"]}
        _, last = await served.post({**edited, "input": "And tomorrow?"})
    return [called, answered, last], [list(prompt.token_ids) for prompt in engine.prompts]


def lines(out: bytes) -> list[Json]:
    return [json.loads(line) for line in out.splitlines()]


def names(folder: Path, pattern: str = "*") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


async def test_turns_of_an_agent_become_paths(tmp_path: Path, penstock: RunCommand) -> None:
    """Each path has the very tokens that the engine read and wrote, and the masks have all that it wrote."""
    responses, prompts = await record(tmp_path / "recordings")
    ended = penstock("rollouts", tmp_path / "recordings", "-o", "-")
    assert ended.status == 0
    first, second = lines(ended.out)
    encode = load_encoding().encode_markup
    assert first["token_ids"] == [*prompts[1], *encode(HELLO)]
    assert [(turn["response"], turn["stop"]) for turn in first["turns"]] == [
        (each["id"], "stop") for each in responses[:2]
    ]
    assert first["turns"][1]["results"][0]["text"] == "18 °C"
    assert second["token_ids"] == [*prompts[2], *encode(HELLO)]
    cut = second["cut"]
    assert (cut["response"], cut["reason"], cut["was"], cut["read"]) == (
        responses[1]["id"],
        "instructions",
        first["token_ids"][cut["at"]],
        second["token_ids"][cut["at"]],
    )
    trained = sum(response["usage"]["output_tokens"] for response in responses)
    assert sum(first["mask"]) + sum(second["mask"]) == trained
    for path in (first, second):
        known = [logprob is not None for logprob in path["logprobs"]]
        assert known == [own == 1 for own in path["mask"]]
    tokens = len(first["token_ids"]) + len(second["token_ids"])
    assert ended.err == (
        f"1 session, 2 paths, {tokens:,} tokens, {trained:,} of them trained: stdout, as penstock reads them\n"
        "cuts: 1 instructions\nwithout a reward: 1 session\n"
    )


async def test_reward_of_a_session_is_in_each_of_its_paths(tmp_path: Path, penstock: RunCommand) -> None:
    await record(tmp_path / "recordings")
    write_reward(tmp_path / "recordings", RewardLine("work", 0.5))
    out = tmp_path / "out.parquet"
    ended = penstock("rollouts", tmp_path / "recordings", "-o", out, "--form", "skyrl")
    assert (ended.status, ended.out, "without a reward" in ended.err) == (0, b"", False)
    found = pq.read_table(out).to_pydict()
    assert (found["rewards"], found["is_last_step"], found["stop_reasons"]) == ([0.5] * 2, [False, True], ["stop"] * 2)


async def test_only_the_session_that_is_asked_for_is_written(tmp_path: Path, penstock: RunCommand) -> None:
    for session in ("one", "two"):
        await record(tmp_path / session, session=session)
    ended = penstock("rollouts", tmp_path / "one", tmp_path / "two", "-o", "-", "--session", "two")
    assert {path["session"] for path in lines(ended.out)} == {"two"}
    assert ended.err.startswith("1 session, 2 paths")


async def test_nothing_to_export_is_said_with_the_reasons(tmp_path: Path, penstock: RunCommand) -> None:
    """The file stays as it was."""
    await record(tmp_path / "recordings")
    out = tmp_path / "out.jsonl"
    out.write_text("before")
    ended = penstock("rollouts", tmp_path / "recordings", "-o", out, "--session", "other")
    assert (ended.status, ended.err) == (2, "penstock: nothing could be exported: there is no session other\n")
    for folder in (tmp_path / "recordings").iterdir():
        (folder / "tokens.jsonl").unlink()
    ended = penstock("rollouts", tmp_path / "recordings", "-o", out)
    reason = "skipped: 3 recordings: no tokens were recorded (tokens.jsonl)"
    assert (ended.status, ended.err) == (2, f"penstock: nothing could be exported\n{reason}\n")
    assert out.read_text() == "before"


def test_folder_without_recordings_is_named(tmp_path: Path, penstock: RunCommand) -> None:
    ended = penstock("rollouts", tmp_path, "-o", "-")
    message = f"penstock: {tmp_path}: there is no recording in or below this folder\n"
    assert (ended.status, ended.out, ended.err) == (2, b"", message)
    ended = penstock("rollouts", tmp_path, "-o", "out.json")
    assert (ended.status, ended.err.startswith("penstock: -o out.json: ")) == (2, True)


async def test_place_that_cannot_be_written_is_named(tmp_path: Path, penstock: RunCommand) -> None:
    await record(tmp_path / "recordings")
    (out := tmp_path / "out.jsonl").mkdir()
    ended = penstock("rollouts", tmp_path / "recordings", "-o", out)
    assert (ended.status, ended.err.count("\n"), "Is a directory" in ended.err) == (2, 1, True)
    assert names(tmp_path, "*out*") == ["out.jsonl"]


def test_command_that_a_signal_ends_leaves_no_file(tmp_path: Path) -> None:
    """It waits for rewards, whose file is a pipe without a writer."""
    (tmp_path / "recordings").mkdir()
    os.mkfifo(tmp_path / "recordings" / FILE)
    program = Path(sys.executable).with_name("penstock")
    process = subprocess.Popen([program, "rollouts", "recordings", "-o", "out.jsonl"], cwd=tmp_path)
    wait_for(lambda: len(names(tmp_path)) > 1 or process.poll() is not None)
    process.terminate()
    assert process.wait(PATIENCE) == 130
    assert names(tmp_path) == ["recordings"]
