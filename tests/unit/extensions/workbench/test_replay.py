"""``penstock replay``: recorded frames give the recorded output, and errors are one line."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.cli import replayer
from penstock.extensions.workbench.replay import paced
from penstock.pipeline.frames import EmittedFrame, TokenChunk, TokenFrame
from penstock.pipeline.protocol.items import Message, OutputText
from penstock.pipeline.protocol.response import Response
from penstock.pipeline.recordings.format import (
    FORMAT,
    End,
    Failure,
    Header,
    line,
    read_frames,
    read_recording,
    write_frames,
)
from penstock.stages.models.harmony.vocabulary import load_encoding
from tests.support.chat_streams import heard_by_openai
from tests.support.event_streams import final, read_sse
from tests.support.messages import heard
from tests.support.paths import CHAT, HARMONY, ROOT
from tests.support.processes import RunCommand
from tests.support.toy_dialect import NAME as TOY
from tests.support.toy_dialect import heard as heard_by_toy

CASES = sorted(HARMONY.glob("*/"), key=lambda case: case.name)
RECORDING = HARMONY / "function_call"
SERVED = HARMONY / "served_python"
CHAT_CALL = CHAT / "gemma4_call"

PLUGINS = """
import logging
import time
from penstock.pipeline.frames import ItemDelta, TurnFinished

async def shout(source):
    async for frame in source:
        yield ItemDelta(frame.text.upper()) if isinstance(frame, ItemDelta) else frame

async def fail(source):
    async for frame in source:
        if isinstance(frame, ItemDelta):
            raise ValueError("not this one")
        yield frame

async def log(source):
    async for frame in source:
        yield frame
    logging.getLogger("mine").info("it ends")
    logging.getLogger("mine").debug("it has ended")

async def lose(source):
    async for frame in source:
        if not isinstance(frame, TurnFinished):
            yield frame

async def count(source):
    async for frame in source:
        yield ItemDelta(len(frame.text)) if isinstance(frame, ItemDelta) else frame

async def doze(source):
    async for frame in source:
        if isinstance(frame, TurnFinished):
            time.sleep(0.6)
        yield frame

async def leave(source):
    async for frame in source:
        yield frame
        raise SystemExit(3)

async def balk(source):
    async for frame in source:
        raise ValueError("not even one")
        yield frame
"""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_replay_yields_recorded_frames(case: Path, penstock: RunCommand, tmp_path: Path) -> None:
    replayed = penstock("replay", case, "--json", "--to", "emit")
    assert (replayed.status, replayed.err) == (0, "")
    (tmp_path / "events.jsonl").write_bytes(replayed.out)
    assert read_recording(tmp_path / "events.jsonl", EmittedFrame) == read_recording(
        case / "events.jsonl", EmittedFrame
    )


def test_replay_from_any_stage_yields_recorded_stream(penstock: RunCommand) -> None:
    replayed = penstock("replay", RECORDING, "--sse").out
    assert [event.__struct_config__.tag for event in read_sse(replayed)][-1] == "response.completed"
    for stage in ("converse", "render", "generate", "parse", "emit", "persist"):
        assert penstock("replay", RECORDING, "--sse", "--from", stage).out == replayed
    assert penstock("replay", RECORDING / "tokens.jsonl", "--sse").out == replayed


def test_tool_results_are_replayed(penstock: RunCommand) -> None:
    replayed = penstock("replay", SERVED, "--sse").out
    assert final(read_sse(replayed)) == msgspec.json.decode((SERVED / "response.json").read_bytes(), type=Response)
    assert penstock("replay", SERVED, "--sse", "--from", "persist").out == replayed


# The streams of dialects


def written(response: Response) -> str:
    parts = [part for item in response.output if isinstance(item, Message) for part in item.content]
    return "".join(part.text for part in parts if isinstance(part, OutputText))


TEXTS: dict[str, Callable[[bytes], str]] = {
    "responses": lambda stream: written(final(read_sse(stream))),
    "chat": lambda stream: heard_by_openai(stream)["choices"][0]["message"]["content"] or "",
    "messages": lambda stream: "".join(block.get("text", "") for block in heard(stream)["content"]),
    TOY: lambda stream: heard_by_toy(stream).get("text", ""),
}
"""Functions that read a text as the clients of a dialect do."""


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_clients_of_all_dialects_read_the_same_text(case: Path, penstock: RunCommand) -> None:
    response = msgspec.json.decode((case / "response.json").read_bytes(), type=Response)
    for dialect, text in TEXTS.items():
        replayed = penstock("replay", case, "--as", dialect)
        assert replayed.status == 0
        assert "".join(text(replayed.out).split()) == "".join(written(response).split())  # a dialect joins messages


def test_stream_of_a_failed_response_ends_as_its_dialect_has_it(penstock: RunCommand, tmp_path: Path) -> None:
    path = ending(tmp_path, End(0, Failure("EngineFailed", "out of memory")))
    problem = b'"error":{"type":"api_error","message":"out of memory"},"request_id":null}\n\n'
    ends = {"chat": b"data: [DONE]\n\n", "messages": problem}
    for dialect, end in ends.items():
        replayed = penstock("replay", path, "--as", dialect)
        assert (replayed.status, b"out of memory" in replayed.out) == (0, True)
        assert replayed.out.endswith(end)


FAILING = """
from dataclasses import replace
from tests.examples.a_dialect_of_your_own import TOY, WIRE

def encode(event):
    raise ValueError("not this one")

FAILING = replace(TOY, wire=replace(WIRE, encode=encode))
"""


def test_bug_of_a_dialect_is_one_line(penstock: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    replayed = penstock("replay", RECORDING.with_name("greeting"), "--as", f"{tmp_path / 'failing.py'}:FAILING")
    assert (replayed.status, replayed.out, replayed.err.count("\n")) == (2, b"", 1)
    assert "failing.py:FAILING: it raised ValueError: not this one (" in replayed.err


def test_replay_as_an_unknown_dialect_is_refused(penstock: RunCommand) -> None:
    replayed = penstock("replay", RECORDING, "--as", "morse")
    assert replayed.err.startswith("penstock: --as morse: it is neither module:Dialect nor an entry point")


# From stage to stage


def test_replay_ends_at_named_stage(penstock: RunCommand) -> None:
    written = penstock("replay", RECORDING, "--from", "render", "--to", "generate", "--json").out
    frames = [msgspec.json.decode(each) for each in written.splitlines()]
    assert [frame["type"] for frame in frames[:3]] == ["Recording", "GenerationStarted", "TokenChunk"]
    assert len(frames) - 2 == len(list(read_frames(RECORDING / "tokens.jsonl", TokenFrame)))


def test_unreadable_tokens_are_replayed_from_their_items(penstock: RunCommand) -> None:
    replayed = penstock("replay", CHAT_CALL, "--sse", "--from", "parse")
    assert replayed.status == 0
    assert "the tokens cannot be parsed without their model" in replayed.err
    assert [event.sequence_number for event in read_sse(replayed.out)] == list(range(21))


def test_several_recordings_are_replayed_in_order(penstock: RunCommand) -> None:
    shown = penstock("replay", RECORDING, SERVED).out.decode()
    assert shown.index(str(RECORDING)[-30:]) < shown.index(str(SERVED)[-30:])


def test_readme_shows_printed_timeline(penstock: RunCommand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "112")
    shown = penstock("replay", HARMONY / "start_missing").out.decode()
    assert shown[shown.index("● turn 1 begins") :] in (ROOT / "docs" / "RECORDINGS.md").read_text()


# Plug-in stages


@pytest.fixture
def install(tmp_path: Path) -> Callable[[str], str]:
    def install(name: str) -> str:
        path = tmp_path / f"{name}.py"
        signature = "(source: AsyncIterator[ParsedFrame]) -> AsyncGenerator[ParsedFrame, None]:"
        path.write_text(
            "from collections.abc import AsyncGenerator, AsyncIterator\n"
            "from penstock.pipeline.frames import ParsedFrame\n"
            + PLUGINS.replace("(source):", signature)
            + f"\ndef install(pipeline):\n    return pipeline.insert_after('parse', '{name}', {name})\n"
        )
        return f"{path}:install"

    return install


def test_plugin_stage_takes_part_in_replay(penstock: RunCommand, install: Callable[[str], str]) -> None:
    replayed = penstock("replay", RECORDING, "--sse", "--with", install("shout"))
    assert '{"CITY":"PARIS"}' in str(final(read_sse(replayed.out)).output)


@pytest.mark.parametrize(("level", "lines"), [([], 1), (["--log-level", "DEBUG"], 2), (["--log-level", "ERROR"], 0)])
def test_log_of_stages_is_shown_beside_the_output(
    penstock: RunCommand, install: Callable[[str], str], level: list[str], lines: int
) -> None:
    replayed = penstock("replay", RECORDING, "--json", "--with", install("log"), *level)
    shown = [entry for entry in replayed.err.splitlines() if "asyncio" not in entry]
    assert shown == ["INFO mine: it ends", "DEBUG mine: it has ended"][:lines]
    assert (replayed.status, replayed.out) == (0, penstock("replay", RECORDING, "--json").out)


@pytest.mark.parametrize(("command", "status"), [("inspect", 0), ("diff", 1)])
def test_other_commands_report_an_error_as_a_replay_does(
    penstock: RunCommand, install: Callable[[str], str], command: str, status: int, tmp_path: Path
) -> None:
    with_stage = ("--with", install("fail"))
    page = (tmp_path / "page.html",) if command == "inspect" else ()
    ended = penstock(command, RECORDING, *with_stage, *page)
    assert (ended.status, ended.err) == (status, penstock("replay", RECORDING, *with_stage).err)


def test_raising_stage_is_named(penstock: RunCommand, install: Callable[[str], str]) -> None:
    replayed = penstock("replay", RECORDING, "--sse", "--with", install("fail"))
    assert replayed.status == 1
    assert [event.__struct_config__.tag for event in read_sse(replayed.out)][-1] == "response.failed"
    assert "the stage 'fail' raised ValueError: not this one (" in replayed.err
    assert "fail.py:" in replayed.err
    assert penstock("replay", RECORDING, "--sse", "--with", install("fail"), "--from", "converse") == replayed
    assert "Traceback" not in replayed.err


def test_stage_that_raises_before_its_first_frame_is_drawn(penstock: RunCommand, install: Callable[[str], str]) -> None:
    replayed = penstock("replay", RECORDING, "--with", install("balk"))
    assert replayed.status == 1
    assert "the stage 'balk' raised ValueError: not even one (" in replayed.err
    assert "Traceback" not in replayed.err


@pytest.mark.parametrize("output", ["--json", "--sse", "--full"])
@pytest.mark.parametrize(
    ("stage", "problem"),
    [
        (
            "lose",
            "ended too early: after ItemClosed[complete]: expected MessageOpened, ReasoningOpened, RefusalOpened,"
            " ClientCallOpened, ShellCallOpened, ToolSearchOpened, ProgramOpened, McpCallOpened, CodeCallOpened,"
            " WebCallOpened, FileSearchOpened or TurnFinished, got the end",
        ),
        ("count", "gave a wrong type: ItemDelta.text: expected `str`, got `int`"),
        ("leave", "raised SystemExit: 3"),
    ],
)
def test_mistake_of_a_stage_is_reported_with_its_place(
    stage: str, problem: str, output: str, penstock: RunCommand, install: Callable[[str], str]
) -> None:
    replayed = penstock("replay", RECORDING, output, "--with", install(stage))
    if output == "--sse":
        assert [event.__struct_config__.tag for event in read_sse(replayed.out)][-1] == "response.failed"
    assert f": the stage {stage!r} {problem} (at " in replayed.err
    assert re.search(rf"{stage}.py:\d+; its last frames: [A-Z]", replayed.err)
    assert (replayed.status, replayed.err.count("\n")) == (1, 1)


@pytest.mark.io
def test_stage_that_blocks_is_named(
    penstock: RunCommand, install: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayer, "SLOW", 0.001)  # no line about penstock's own stages, which take longer
    replayed = penstock("replay", RECORDING, "--json", "--with", install("doze"))
    assert (replayed.status, replayed.out) == (0, penstock("replay", RECORDING, "--json").out)
    assert re.search(r"The event loop was held for [\d.]+ s by the stage 'doze', at .*doze.py:\d+", replayed.err)


IN_BETWEEN = """
from collections.abc import AsyncGenerator, AsyncIterator
from penstock.pipeline.frames import TokenChunk, TokenFrame

async def fail(source: AsyncIterator[TokenFrame]) -> AsyncGenerator[TokenFrame, None]:
    async for frame in source:
        if isinstance(frame, TokenChunk):
            raise ValueError("not this one")
        yield frame

def install(pipeline):
    return pipeline.insert_after("generate", "fail", fail)
"""


def test_stage_that_raises_at_once_is_named(penstock: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "between.py").write_text(IN_BETWEEN.replace("isinstance(frame, TokenChunk)", "True"))
    replayed = penstock("replay", RECORDING, "--sse", "--with", f"{tmp_path / 'between.py'}:install")
    assert (replayed.status, replayed.out) == (1, b"")
    assert "raised ValueError: not this one (" in replayed.err


@pytest.mark.parametrize("since", [[], ["--from", "render"], ["--from", "converse"]])
def test_tokens_pass_plugin_stages_after_generate(penstock: RunCommand, tmp_path: Path, since: list[str]) -> None:
    """Frames are recorded directly after their stage, before plug-in stages see them."""
    (tmp_path / "between.py").write_text(IN_BETWEEN)
    replayed = penstock("replay", RECORDING, "--sse", *since, "--with", f"{tmp_path / 'between.py'}:install")
    assert replayed.status == 1
    assert "raised ValueError: not this one (" in replayed.err


def test_timeline_shows_output_of_plugin_stages(penstock: RunCommand, tmp_path: Path) -> None:
    greeting = list(read_frames(HARMONY / "greeting/tokens.jsonl", TokenFrame))
    tokens = load_encoding().encode_markup("<|channel|>final<|message|>Write to jo@example.org.<|return|>")
    frames = [greeting[0], *(TokenChunk((token,)) for token in tokens), greeting[-1]]
    write_frames(tmp_path / "tokens.jsonl", frames)
    (tmp_path / "events.jsonl").write_bytes(penstock("replay", tmp_path, "--json").out)
    recorded = penstock("replay", tmp_path).out.decode()
    assert "Write to jo@example.org." in recorded
    assert "the events differ" not in " ".join(recorded.split())
    redacted = penstock(
        "replay", tmp_path, "--with", f"{ROOT / 'tests/examples/redact_emails.py'}:install"
    ).out.decode()
    assert "│ Write to [e-mail]." in redacted
    assert "jo@" not in redacted[redacted.index("turn 1 begins") :]
    assert "on, the events differ from the recorded ones: " in " ".join(redacted.split())


GUARD = f"{ROOT / 'tests/examples/guard_words.py'}:install"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `penstock.toml` in the working directory, which also has the settings of a server and of another stage."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "penstock.toml"
    file.write_text('web-search = "brave"\n[stages.guard_words]\nwords = ["paris"]\n[stages.other]\na = 1\n')
    return file


def test_stage_gets_its_settings_in_a_replay(
    penstock: RunCommand, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = penstock("replay", RECORDING, "--sse")
    ended = final(read_sse(penstock("replay", RECORDING, "--sse", "--with", GUARD).out))
    assert (ended.status, table.exists()) == ("incomplete", True)
    monkeypatch.setenv("PENSTOCK_STAGES", '{"guard_words": {"words": ["swordfish"]}}')
    assert penstock("replay", RECORDING, "--sse", "--with", GUARD) == without
    table.write_text("broken")
    assert penstock("replay", RECORDING, "--sse") == without


@pytest.mark.parametrize("command", ["replay", "diff", "inspect", "shrink"])
def test_wrong_settings_of_a_stage_end_each_command(penstock: RunCommand, command: str, table: Path) -> None:
    for text, problem in (
        ("[stages.guard_words]\nwrods = []", f"--with {GUARD}: [stages.guard_words]: words: Field required; wrods: "),
        ("[stages]\nguard_words = 'xyzzy'", "stages.guard_words (penstock.toml): Input should be a valid dictionary"),
    ):
        table.write_text(text)
        ended = penstock(command, RECORDING, "--with", GUARD)
        assert (ended.status, ended.err.startswith(f"penstock: {problem}")) == (2, True), ended.err
        assert "xyzzy" not in ended.err


def test_stages_that_cannot_run_are_reported(penstock: RunCommand, install: Callable[[str], str]) -> None:
    """If tools ran between the turns, no stage within a turn runs again."""
    replayed = penstock("replay", SERVED, "--sse", "--with", install("shout"))
    assert replayed.err == f"penstock: {SERVED}: shout did not run: conversed.jsonl was recorded after it\n"


# How it ended


def ending(tmp_path: Path, end: End) -> Path:
    """The tokens of a fixture, with another end."""
    frames = list(read_frames(RECORDING / "tokens.jsonl", TokenFrame))[:9]
    end = End(len(frames), end.failure, end.abandoned)
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(b"".join(map(line, (Header(FORMAT, "tiny-gpt-oss"), *frames, end))))
    return path


def test_recorded_failure_is_replayed(penstock: RunCommand, tmp_path: Path) -> None:
    path = ending(tmp_path, End(0, Failure("EngineFailed", "out of memory")))
    assert penstock("replay", path, "--sse").status == 0
    shown = " ".join(penstock("replay", path).out.decode().split())
    assert "the recorded stream failed: EngineFailed: out of memory" in shown
    assert "failed (server_error: out of memory)" in shown


def test_replay_of_abandoned_stream_has_no_terminal_event(penstock: RunCommand, tmp_path: Path) -> None:
    path = ending(tmp_path, End(0, abandoned=True))
    replayed = penstock("replay", path, "--sse")
    assert replayed.status == 0
    assert b"[DONE]" not in replayed.out
    shown = " ".join(penstock("replay", path).out.decode().split())
    assert "the recorded stream ends early: a stage raised, the client left" in shown


@given(st.lists(st.one_of(st.none(), st.floats(0, 1000)), max_size=20), st.floats(0.1, 10))
def test_paced_frames_keep_their_recorded_times(times: list[float | None], speed: float) -> None:
    with pytest.MonkeyPatch.context() as patched:
        clock = [50.0]
        patched.setattr("time.monotonic", lambda: clock[0])
        patched.setattr("time.sleep", lambda seconds: clock.append(clock.pop() + seconds))
        shown = list(paced(((at, at) for at in times), speed))
        assert shown == times
        known = [at for at in times if at is not None]
        longest = max((at - known[0] for at in known), default=0.0)
        assert clock[0] == pytest.approx(50.0 + longest / speed)
        assert list(paced(((at, at) for at in times), None)) == times


# What cannot be replayed


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["fixtures/harmony/nothing"], "penstock: fixtures/harmony/nothing: no such file or folder"),
        (
            ["fixtures/harmony"],
            f"penstock: fixtures/harmony: it holds {len(CASES)} recordings: name one of them, such as fixtures/harm",
        ),
        (
            ["fixtures"],
            "penstock: fixtures: there is no recording in this folder: none of conversation.jsonl",
        ),
        (["x" * 300], f"penstock: {'x' * 300}: it cannot be read: File name too long"),
        (["README.md"], "penstock: README.md: a file of a recording has one of the names"),
        ([RECORDING, "--from", "parsing"], "penstock: a replay can begin with converse, render, generate, parse"),
        ([RECORDING, "--to", "parsing"], "penstock: no stage named 'parsing'; there are parse, emit, persist"),
        ([SERVED, "--from", "parse"], "penstock: tools ran between the turns of"),
        ([RECORDING / "parsed.jsonl", "--from", "parse"], "penstock: parse reads tokens.jsonl, which is not in"),
        ([RECORDING / "prompt.jsonl"], f"penstock: {RECORDING}/prompt.jsonl: no part of the response was recorded"),
        (
            [RECORDING / "prompt.jsonl", "--from", "generate"],
            "penstock: --from generate needs the tokens of the model: ",
        ),
        ([RECORDING, "--to", "parse", "--sse"], "penstock: the output of parse is not events: show it with --json"),
        ([RECORDING, "--with", "nowhere:install"], "penstock: --with nowhere:install: "),
    ],
)
def test_unreplayable_recording_is_a_one_line_error(
    penstock: RunCommand, monkeypatch: pytest.MonkeyPatch, arguments: list[object], reason: str
) -> None:
    monkeypatch.chdir(ROOT)
    ended = penstock("replay", *arguments)
    assert (ended.status, ended.out) == (2, b"")
    assert ended.err.startswith(reason)
    assert ended.err.count("\n") == 1


def test_broken_recording_is_reported_with_file_and_line(penstock: RunCommand, tmp_path: Path) -> None:
    shutil.copytree(RECORDING, tmp_path, dirs_exist_ok=True)
    tokens = tmp_path / "tokens.jsonl"
    tokens.write_bytes(tokens.read_bytes().replace(b"[35644]", b'["analysis"]'))
    ended = penstock("replay", tmp_path)
    assert ended.status == 2
    assert ended.err.startswith(f"penstock: {tokens}:4: ")


def test_speed_must_be_a_positive_number(penstock: RunCommand) -> None:
    assert penstock("replay", RECORDING, "--speed", "fast").status == 2
    assert penstock("replay", RECORDING, "--speed", "0").status == 2
