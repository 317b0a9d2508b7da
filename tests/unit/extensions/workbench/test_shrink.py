"""``penstock shrink``, over recordings that trigger a planted bug."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from penstock.pipeline.frames import GenerationFinished, Prompt, ResolvedRequest, TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import FILES, read_frames, read_header, write_frames
from tests.support.paths import FIXTURES
from tests.support.processes import RunCommand

pytestmark = pytest.mark.io

HARMONY = FIXTURES / "harmony"

BUGGY = """
from collections.abc import AsyncGenerator, AsyncIterator
from penstock.pipeline.frames import TokenChunk, TokenFrame

async def parse_strictly(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
    in_call = False
    async for frame in source:
        if isinstance(frame, TokenChunk):
            for token in frame.token_ids:
                if token == 200012 and in_call:
                    raise KeyError(token)
                in_call |= token == 200003
        yield frame

def install(pipeline):
    return pipeline.insert_after("generate", "parse strictly", parse_strictly)
"""
"""A stage with a bug: it raises if ``<|call|>`` follows ``<|constrain|>``."""

JUDGE = """
import json, sys
with open(sys.argv[1] + "/tokens.jsonl") as file:
    tokens = [token for frame in map(json.loads, file) for token in frame.get("token_ids", ())]
print("so many tokens:", len(tokens))
"""
"""The beginning of a script that starts quickly, as it is run for each candidate."""


def judge(folder: Path, says: str) -> str:
    """Write a script that reads the tokens of a candidate and then runs ``says``, and return its command."""
    path = folder / "judge.py"
    path.write_text(JUDGE + says)
    return f"{shlex.quote(sys.executable)} -S -E {shlex.quote(str(path))}"


def tokens_of(folder: Path) -> list[int]:
    frames = read_frames(folder / "tokens.jsonl", TokenFrame)
    return [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]


def long_call(folder: Path) -> Path:
    """A recording of a call after 250 tokens of reasoning."""
    folder.mkdir()
    call = HARMONY / "calls_in_and_out_of_namespaces"
    started, *called = read_frames(call / "tokens.jsonl", TokenFrame)
    _, *thought, _ = read_frames(HARMONY / "long_reasoning" / "tokens.jsonl", TokenFrame)
    write_frames(folder / "tokens.jsonl", [started, *thought, *called], read_header(call / "tokens.jsonl"))
    for name in ("request.json", "conversation.jsonl"):
        (folder / name).write_bytes((call / name).read_bytes())
    return folder


def test_stage_bug_shrinks_to_its_trigger(
    tmp_path: Path, penstock: RunCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "buggy_stage.py").write_text(BUGGY)
    recording, out = long_call(tmp_path / "recording"), tmp_path / "out"
    assert len(tokens_of(recording)) > 250
    assert penstock("shrink", recording, "--with", "buggy_stage:install", "-o", out).status == 0
    assert tokens_of(out) == [200003, 200012]
    assert {path.name for path in out.iterdir()} == {
        *(FILES[stage][0] for stage in ("normalize", "render", "generate", "parse", "emit")),
        "request.json",
        "response.json",
    }
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o600}
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    (conversation,) = read_frames(out / "conversation.jsonl", ResolvedRequest)
    (prompt,) = read_frames(out / "prompt.jsonl", Prompt)
    started, _, finished = read_frames(out / "tokens.jsonl", TokenFrame)
    assert conversation.facts.tools.tools == prompt.facts.tools.tools == started.facts.tools.tools == ()
    assert started.prompt_tokens == len(prompt.token_ids)
    assert isinstance(finished, GenerationFinished)
    assert penstock("shrink", out, "--with", "buggy_stage:install", "-o", tmp_path / "again").status == 0
    assert tokens_of(tmp_path / "again") == tokens_of(out)


GAPPED = """
from collections.abc import AsyncGenerator, AsyncIterator
from penstock.pipeline.protocol.events import ResponseEvent

async def drop(source: AsyncIterator[ResponseEvent]) -> AsyncGenerator[ResponseEvent, None]:
    async for event in source:
        if event.sequence_number != 5:
            yield event

def install(pipeline):
    return pipeline.insert_after("persist", "drop", drop)
"""


def test_bug_in_the_last_stage_shrinks(tmp_path: Path, penstock: RunCommand) -> None:
    (tmp_path / "gapped.py").write_text(GAPPED)
    plugin, out = f"{tmp_path / 'gapped.py'}:install", tmp_path / "out"
    ended = penstock("shrink", HARMONY / "greeting", "--with", plugin, "-o", out)
    problem = "the stage 'drop' broke a rule: sequence numbers count from 0 without gaps"
    assert f": {problem} (at {tmp_path / 'gapped.py'}:" in ended.err.splitlines()[0]
    assert len(tokens_of(out)) == 1


def test_command_decides_which_candidates_fail(tmp_path: Path, penstock: RunCommand) -> None:
    recording = HARMONY / "unicode_final"
    command = judge(tmp_path, "sys.exit(1 if 200008 in tokens and len(tokens) > 2 else 0)")
    ended = penstock("shrink", recording, "--fails", command, "-o", tmp_path / "out")
    assert ended.status == 0
    assert len(tokens_of(tmp_path / "out")) == 3
    assert 200008 in tokens_of(tmp_path / "out")
    count = len(tokens_of(recording))
    assert f"{count} tokens -> 3, " in ended.err


def test_placeholder_in_command_becomes_the_folder(tmp_path: Path, penstock: RunCommand) -> None:
    command = "if grep -q 200008 {}/tokens.jsonl; then exit 1; fi"
    assert penstock("shrink", HARMONY / "greeting", "--fails", command, "-o", tmp_path / "out").status == 0
    assert tokens_of(tmp_path / "out") == [200008]


def test_candidate_unjudged_or_without_the_text_does_not_fail(tmp_path: Path, penstock: RunCommand) -> None:
    for name, says, options in (
        ("judged", "sys.exit(125 if len(tokens) < 5 else 1)", ()),
        ("saying", "sys.exit(print('oh dear') or 1 if len(tokens) >= 5 else 1)", ("--saying", "oh dear")),
    ):
        command = judge(tmp_path, says)
        out = tmp_path / name
        assert penstock("shrink", HARMONY / "unicode_final", "--fails", command, "-o", out, *options).status == 0
        assert len(tokens_of(out)) == 5


def test_candidate_that_times_out_does_not_fail(tmp_path: Path, penstock: RunCommand) -> None:
    recording, out = HARMONY / "greeting", tmp_path / "out"
    slow = "grep -q TokenChunk {}/tokens.jsonl || sleep 600; false"
    assert penstock("shrink", recording, "--fails", slow, "-o", out, "--timeout", "2", "--tries", "2").status == 0
    assert tokens_of(out) == tokens_of(recording)


def test_no_process_outlives_its_command(tmp_path: Path, penstock: RunCommand) -> None:
    leaving = f"sleep 600 > {tmp_path}/out 2>&1 & echo $! >> {tmp_path}/started; false"
    options = ("--fails", f"{leaving} #", "-o", tmp_path / "small", "--tries", "1")
    assert penstock("shrink", HARMONY / "greeting", *options).status == 0
    (started,) = (tmp_path / "started").read_text().split()
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(started)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fails", "true"], "the command does not fail on the recording as it is: it exits with 0"),
        (["--fails", "no-such-command"], "the command does not fail on the recording as it is: it exits with 127"),
        ([], "the stages do not fail on the recording as it is"),
        (["--saying", "no"], "--saying is about what --fails COMMAND writes"),
        (["--fails", "false", "--with", "json:loads"], "--with is for the stages of this command"),
        (["--with", "json:nothing"], "json has no function nothing"),
        (["--fails", "false", "-o", str(HARMONY)], "already exists"),
    ],
)
def test_senseless_arguments_are_reported(
    arguments: list[str], message: str, tmp_path: Path, penstock: RunCommand
) -> None:
    out = [] if "-o" in arguments else ["-o", tmp_path / "out"]
    ended = penstock("shrink", HARMONY / "greeting", *out, *arguments)
    assert ended.status == 2
    assert message in ended.err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_tokens_is_named(tmp_path: Path, penstock: RunCommand) -> None:
    ended = penstock("shrink", tmp_path, "--fails", "false", "-o", tmp_path / "out")
    assert ended.status == 2
    assert f"penstock: {tmp_path / 'tokens.jsonl'}: there is no recording here" in ended.err


def test_smallest_case_within_the_number_of_tries_is_written(tmp_path: Path, penstock: RunCommand) -> None:
    command = judge(tmp_path, "sys.exit(len(tokens) >= 3)")
    options = ("--fails", command, "-o", tmp_path / "out", "--tries", "5")
    assert penstock("shrink", HARMONY / "greeting", *options).status == 0
    assert 3 <= len(tokens_of(tmp_path / "out")) < len(tokens_of(HARMONY / "greeting"))


def test_chat_recording_shrinks_without_its_vocabulary(tmp_path: Path, penstock: RunCommand) -> None:
    recording = FIXTURES / "chat" / "qwen3_two_calls"
    needed = tokens_of(recording)[7]
    command = judge(tmp_path, f"sys.exit({needed} in tokens)")
    ended = penstock("shrink", recording, "--fails", command, "-o", tmp_path / "out")
    assert ended.status == 0
    assert tokens_of(tmp_path / "out") == [needed]
    again = penstock("shrink", tmp_path / "out", "--fails", command, "-o", tmp_path / "again")
    assert re.search(r"^1 token -> 1, (1 try|\d+ tries):", again.err, re.MULTILINE)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_search_writes_smallest_case(tmp_path: Path, sent: signal.Signals) -> None:
    out = tmp_path / "out"
    command = judge(tmp_path, "import time; time.sleep(60 if 0 < len(tokens) < 20 else 0); sys.exit(bool(tokens))")
    arguments = ["shrink", str(HARMONY / "long_reasoning"), "--fails", command, "-o", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "penstock.api.cli", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - its parent may ignore it
    ) as process:
        assert process.stderr
        assert "tokens" in process.stderr.readline()
        os.kill(process.pid, sent)
        _, message = process.communicate(timeout=240)
        assert process.returncode == 130
    assert ", stopped: " in message
    assert 0 < len(tokens_of(out)) < len(tokens_of(HARMONY / "long_reasoning"))
