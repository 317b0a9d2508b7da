"""``penstock shrink``, over recordings that trigger a planted bug."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from penstock.api.cli.__main__ import main
from penstock.pipeline.frames import GenerationFinished, Prompt, ResolvedRequest, TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import FILES, read_frames, read_header, write_frames
from tests.support.paths import FIXTURES

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
import sys
from pathlib import Path
from penstock.pipeline.frames import TokenChunk, TokenFrame
from penstock.pipeline.recordings.format import read_frames

frames = read_frames(Path(sys.argv[1]) / "tokens.jsonl", TokenFrame)
tokens = [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]
print("so many tokens:", len(tokens))
"""


def shrink(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command and return its exit code."""
    monkeypatch.setattr("sys.argv", ["penstock", "shrink", *map(str, arguments)])
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


def judge(folder: Path, says: str) -> str:
    """Write a script that reads the tokens of a candidate and then runs ``says``, and return its command."""
    path = folder / "judge.py"
    path.write_text(JUDGE + says)
    return f"{shlex.quote(sys.executable)} {shlex.quote(str(path))}"


def tokens_of(folder: Path) -> list[int]:
    frames = read_frames(folder / "tokens.jsonl", TokenFrame)
    return [token for frame in frames if isinstance(frame, TokenChunk) for token in frame.token_ids]


def long_call(folder: Path) -> Path:
    """A recording of a call after 250 tokens of reasoning."""
    folder.mkdir()
    call = HARMONY / "calls_in_and_out_of_namespaces"
    started, *said = read_frames(call / "tokens.jsonl", TokenFrame)
    _, *thought, _ = read_frames(HARMONY / "long_reasoning" / "tokens.jsonl", TokenFrame)
    write_frames(folder / "tokens.jsonl", [started, *thought, *said], read_header(call / "tokens.jsonl"))
    for name in ("request.json", "conversation.jsonl"):
        (folder / name).write_bytes((call / name).read_bytes())
    return folder


def test_stage_bug_shrinks_to_its_trigger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of tokens two are left, in a complete recording that can be replayed."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "buggy_stage.py").write_text(BUGGY)
    recording, out = long_call(tmp_path / "recording"), tmp_path / "out"
    assert len(tokens_of(recording)) > 250
    assert shrink(monkeypatch, recording, "--with", "buggy_stage:install", "-o", out) == 0
    assert tokens_of(out) == [200003, 200012]
    assert {path.name for path in out.iterdir()} == {
        *(FILES[stage][0] for stage in ("normalize", "render", "generate", "parse", "emit")),
        "request.json",
        "response.json",
    }
    (conversation,) = read_frames(out / "conversation.jsonl", ResolvedRequest)
    (prompt,) = read_frames(out / "prompt.jsonl", Prompt)
    started, _, finished = read_frames(out / "tokens.jsonl", TokenFrame)
    assert conversation.facts.tools.tools == prompt.facts.tools.tools == started.facts.tools.tools == ()
    assert started.prompt_tokens == len(prompt.token_ids)
    assert isinstance(finished, GenerationFinished)
    assert shrink(monkeypatch, out, "--with", "buggy_stage:install", "-o", tmp_path / "again") == 0
    assert tokens_of(tmp_path / "again") == tokens_of(out)


def test_command_decides_which_candidates_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = HARMONY / "unicode_final"
    command = judge(tmp_path, "sys.exit(1 if 200008 in tokens and len(tokens) > 2 else 0)")
    assert shrink(monkeypatch, recording, "--fails", command, "-o", tmp_path / "out") == 0
    assert len(tokens_of(tmp_path / "out")) == 3
    assert 200008 in tokens_of(tmp_path / "out")
    count = len(tokens_of(recording))
    assert f"{count} tokens -> 3, " in capsys.readouterr().err


def test_placeholder_in_command_becomes_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "if grep -q 200008 {}/tokens.jsonl; then exit 1; fi"
    assert shrink(monkeypatch, HARMONY / "greeting", "--fails", command, "-o", tmp_path / "out") == 0
    assert tokens_of(tmp_path / "out") == [200008]


def test_unjudged_candidate_does_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A candidate whose output lacks the expected text does not fail either."""
    for name, says, options in (
        ("judged", "sys.exit(125 if len(tokens) < 5 else 1)", ()),
        ("saying", "sys.exit(print('oh dear') or 1 if len(tokens) >= 5 else 1)", ("--saying", "oh dear")),
    ):
        command = judge(tmp_path, says)
        out = tmp_path / name
        assert shrink(monkeypatch, HARMONY / "unicode_final", "--fails", command, "-o", out, *options) == 0
        assert len(tokens_of(out)) == 5


def test_candidate_that_times_out_does_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command is killed, with all processes that it started."""
    recording, out = HARMONY / "greeting", tmp_path / "out"
    slow = "grep -q TokenChunk {}/tokens.jsonl || sleep 600; false"
    assert shrink(monkeypatch, recording, "--fails", slow, "-o", out, "--timeout", "2", "--tries", "2") == 0
    assert tokens_of(out) == tokens_of(recording)


def test_no_process_outlives_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Background processes of a command end with it, even if the command itself is over."""
    leaving = f"sleep 600 > {tmp_path}/out 2>&1 & echo $! >> {tmp_path}/started; false"
    options = ("--fails", f"{leaving} #", "-o", tmp_path / "small", "--tries", "1")
    assert shrink(monkeypatch, HARMONY / "greeting", *options) == 0
    (started,) = (tmp_path / "started").read_text().split()
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int(started)).status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--fails", "true"], "the command does not fail on the recording as it is: it exits with 0"),
        (["--fails", "no-such-command"], "the command does not fail on the recording as it is: it exits with 127"),
        ([], "the stages do not fail on the recording as it is"),
        (["--saying", "no"], "--saying is about what --fails COMMAND writes"),
        (["--fails", "false", "--with", "json:loads"], "--with is for the stages of this command"),
        (["--with", "json:nothing"], "json has no function nothing"),
        (["--fails", "false", "-o", str(HARMONY)], "is there already"),
    ],
)
def test_senseless_arguments_are_reported(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = [] if "-o" in arguments else ["-o", tmp_path / "out"]
    assert shrink(monkeypatch, HARMONY / "greeting", *out, *arguments) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_tokens_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shrink(monkeypatch, tmp_path, "--fails", "false", "-o", tmp_path / "out") == 2
    assert f"penstock: {tmp_path / 'tokens.jsonl'}: there is no recording here" in capsys.readouterr().err


def test_number_of_tries_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest case found until then is kept."""
    command = judge(tmp_path, "sys.exit(len(tokens) >= 3)")
    assert shrink(monkeypatch, HARMONY / "greeting", "--fails", command, "-o", tmp_path / "out", "--tries", "5") == 0
    assert 3 <= len(tokens_of(tmp_path / "out")) < len(tokens_of(HARMONY / "greeting"))


def test_chat_recording_shrinks_without_its_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recording = FIXTURES / "chat" / "qwen3_two_calls"
    needed = tokens_of(recording)[7]
    command = judge(tmp_path, f"sys.exit({needed} in tokens)")
    assert shrink(monkeypatch, recording, "--fails", command, "-o", tmp_path / "out") == 0
    assert tokens_of(tmp_path / "out") == [needed]


@pytest.mark.parametrize("said", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_search_writes_smallest_case(tmp_path: Path, said: signal.Signals) -> None:
    """A signal ends the search and its processes, and the smallest case so far is written."""
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
        os.kill(process.pid, said)
        _, told = process.communicate(timeout=240)
        assert process.returncode == 130
    assert ", stopped: " in told
    assert 0 < len(tokens_of(out)) < len(tokens_of(HARMONY / "long_reasoning"))
