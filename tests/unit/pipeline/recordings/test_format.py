"""Recordings as files: they read back unchanged, and errors name file and line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from msgspec import to_builtins
from msgspec.structs import replace

from penstock.api.cli.__main__ import main
from penstock.pipeline import frames
from penstock.pipeline.errors import EngineFailed, ServerStopping
from penstock.pipeline.protocol.items import ListedTool
from penstock.pipeline.protocol.tools import McpServer, Toolset
from penstock.pipeline.recordings.format import (
    FILES,
    FORMAT,
    Abandoned,
    End,
    Failure,
    Header,
    Timed,
    UnreadableRecording,
    line,
    read_recording,
    source_of_recording,
    write_frames,
)
from tests.support.examples import examples
from tests.support.paths import HARMONY
from tests.support.stored_responses import facts

CASE = HARMONY / "served_mcp"

STAGES = [stage for stage, (name, _) in FILES.items() if (CASE / name).is_file()]

FRAMES = (frames.TokenChunk((1, 2)), frames.GenerationFinished("stop", 0, 0.5))

MESSAGE = re.compile(r"^(.+?\.jsonl)(?::(\d+))?: (.+)$", re.DOTALL)

INTRUDERS = [b"\n", b"{}", b"\xff\xfe", b"[" * 5000, b"null", b'{"headers":{}}', b"1e999"]

shared = examples(100, [HealthCheck.function_scoped_fixture])


def problem(path: Path, stage: str = "generate") -> tuple[int | None, str]:
    """The line number and the reason in the error for an unreadable file."""
    with pytest.raises(UnreadableRecording) as refused:
        read_recording(path, FILES[stage][1])
    assert refused.value.path == path
    message = MESSAGE.match(str(refused.value))
    assert message is not None
    assert message[1] == str(path)
    return refused.value.line, message[3]


# Complete recordings


def test_frames_are_read_as_written(tmp_path: Path) -> None:
    path, header = tmp_path / "tokens.jsonl", Header(FORMAT, "tiny", versions={"penstock": "1"})
    written = [line(header), line(FRAMES[0], 0.25), line(FRAMES[1]), line(End(2))]
    path.write_bytes(b"".join(written))
    recording = read_recording(path, frames.TokenFrame)
    assert (recording.header, recording.frames, recording.end) == (header, FRAMES, End(2))
    assert [(timed.line, timed.at) for timed in recording.timed] == [(2, 0.25), (3, None)]


@pytest.mark.parametrize(
    ("end", "raised"),
    [
        (End(0, Failure.of(EngineFailed("it broke"))), EngineFailed),
        (End(0, Failure.of(ServerStopping())), ServerStopping),
        (End(0, Failure.of(KeyError("name"))), RuntimeError),
        (End(0, abandoned=True), Abandoned),
    ],
)
async def test_replay_ends_as_the_recorded_stream_did(tmp_path: Path, end: End, raised: type[BaseException]) -> None:
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(line(Header(FORMAT)) + line(end))
    with pytest.raises(raised) as again:
        _ = [frame async for frame in source_of_recording(read_recording(path, frames.TokenFrame))]
    why = end.failure.message if end.failure else "the recording ends early, after 0 frames: a stage raised"
    assert why in str(again.value)


# Recordings of format 1

CALL_DATA: dict[str, tuple[list[dict[str, Any]], frames.CallData | None]] = {
    "tools": ([{"name": "ask", "input_schema": {}}], frames.ListedTools((ListedTool("ask", {}),))),
    "code": ([{"type": "logs", "logs": "2"}], frames.CodeOutputs(({"type": "logs", "logs": "2"},))),
    "shell": (
        [{"stdout": "", "stderr": ""}, {"stdout": "a"}],
        frames.ShellOutput(({"stdout": "", "stderr": ""}, {"stdout": "a"})),
    ),
    "browser": ([{"type": "open_page", "url": None}], frames.BrowserAction({"type": "open_page", "url": None})),
    "error": ([{"type": "http_error", "code": 401}], frames.McpError({"type": "http_error", "code": 401})),
    "nothing": ([], None),
}


@pytest.mark.parametrize(("data", "read"), CALL_DATA.values(), ids=CALL_DATA)
def test_call_data_of_format_1_is_read(
    tmp_path: Path, data: list[dict[str, Any]], read: frames.CallData | None
) -> None:
    """It was a list whose meaning followed from the open item."""
    path = tmp_path / "conversed.jsonl"
    finished = {"type": "CallFinished", "result": "a", "data": data}
    path.write_bytes(line(Header(1)) + line(finished, 0.25) + line(End(1)))
    assert read_recording(path, frames.ConversedFrame).timed == (Timed(frames.CallFinished("a", data=read), 2, 0.25),)


STOPPING = facts(sampling=frames.Sampling(1.0, 1.0, stop=("END",)), date="")
WISHES = {"prompt_tokens": 3, "stop": ["END"], "raw_messages": [{"role": "user"}]}
FACTS = {
    "normalize": (
        {"type": "Conversation", **to_builtins(facts()), "history": [], "raw_messages": True},
        frames.ResolvedRequest(facts(wants_raw_messages=True)),
    ),
    "generate": (
        {"type": "GenerationStarted", "response": to_builtins(STOPPING.response), "input": [], **WISHES},
        frames.GenerationStarted(replace(STOPPING, wants_raw_messages=True), 3, ({"role": "user"},)),
    ),
    "emit": (
        {"type": "ResponseStarted", "response": to_builtins(STOPPING.response), "input": [], "origin": {"position": 2}},
        frames.ResponseStarted(facts(date="", origin=frames.Origin(position=2))),
    ),
}


@pytest.mark.parametrize(("stage", "frame", "read"), [(stage, *case) for stage, case in FACTS.items()], ids=FACTS)
def test_facts_of_format_1_are_read(tmp_path: Path, stage: str, frame: dict[str, Any], read: object) -> None:
    """They were fields of the frames."""
    name, junction = FILES[stage]
    (tmp_path / name).write_bytes(line(Header(1)) + line(frame) + line(End(1)))
    assert read_recording(tmp_path / name, junction).frames == (read,)


# Recordings of format 2

CHANGED_FACTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "web search": ({"web": {"domains": ["a.org"]}}, {"options": {"browser": {"domains": ["a.org"]}}}),
    "file search": ({"file_search": {"stores": ["vs"]}}, {"options": {"file_search": {"stores": ["vs"]}}}),
    "containers": ({"containers": {"python": {"id": "cntr_1"}}}, {"options": {"python": {"id": "cntr_1"}}}),
    "built-in server": ({"hosted": [{"label": "python"}]}, {"tools": Toolset(hosted=(McpServer("python"),))}),
    "compaction": (
        {"compacting": {"threshold": 9}, "generates": False},
        {"purpose": frames.Purpose(frames.Compacting(threshold=9), generates=False)},
    ),
    "summary": ({"summarizes": True, "summary": "So."}, {"purpose": frames.Purpose(summarizes=True, summary="So.")}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("stage", ["normalize", "converse"])
@pytest.mark.parametrize(("written", "read"), CHANGED_FACTS.values(), ids=CHANGED_FACTS)
def test_facts_of_format_2_are_read(tmp_path: Path, stage: str, written: dict[str, Any], read: dict[str, Any]) -> None:
    """The options of each tool and the purpose of the turn were fields of their own."""
    name, junction = FILES[stage]
    kind = frames.ResolvedRequest if stage == "normalize" else frames.ResponseStarted
    frame = {"type": kind.__name__, "facts": to_builtins(facts()) | written}
    (tmp_path / name).write_bytes(line(Header(2)) + line(frame) + line(End(1)))
    assert read_recording(tmp_path / name, junction).frames == (kind(facts(**read)),)


# Broken recordings


@pytest.mark.parametrize("stage", STAGES)
@shared
@given(data=st.data())
def test_truncated_file_is_reported_with_its_line(tmp_path: Path, stage: str, data: st.DataObject) -> None:
    name, _ = FILES[stage]
    whole = (CASE / name).read_bytes()
    rest = whole[: data.draw(st.integers(0, len(whole) - 1))]
    (tmp_path / name).write_bytes(rest)
    number, _ = problem(tmp_path / name, stage)
    assert number == max(1, rest.count(b"\n") + (not rest.endswith(b"\n")))


@pytest.mark.parametrize("stage", STAGES)
@shared
@given(data=st.data())
def test_broken_line_is_no_traceback(tmp_path: Path, stage: str, data: st.DataObject) -> None:
    name, junction = FILES[stage]
    whole = (CASE / name).read_bytes()
    start = data.draw(st.integers(0, len(whole)))
    put = data.draw(st.binary(max_size=6) | st.sampled_from(INTRUDERS))
    (tmp_path / name).write_bytes(whole[:start] + put + whole[start + data.draw(st.integers(0, 6)) :])
    with suppress(UnreadableRecording):
        read_recording(tmp_path / name, junction)


BROKEN: dict[str, tuple[Callable[[list[bytes]], bytes], int, str]] = {
    "empty": (lambda lines: b"", 1, "header"),
    "no header": (lambda lines: b"".join(lines[1:]), 1, "header"),
    "garbage": (lambda lines: bytes(range(256)), 1, "header"),
    "UTF-16": (lambda lines: b"".join(lines).decode().encode("utf-16"), 1, "header"),
    "another format": (lambda lines: line(Header(FORMAT + 1)), 1, f"format {FORMAT + 1}"),
    "a cut line": (lambda lines: b"".join(lines)[:-4], 4, "stops within this line"),
    "no end": (lambda lines: b"".join(lines[:-1]), 3, "has no end"),
    "a lost line": (lambda lines: lines[0] + b"".join(lines[2:]), 3, "1 of 2 frames are in the file"),
    "an unknown frame": (lambda lines: lines[0] + b'{"type":"Later"}\n' + b"".join(lines[2:]), 2, "of this version"),
    "an unknown value": (
        lambda lines: lines[0] + lines[1] + lines[2].replace(b'"stop"', b'"tired"') + lines[3],
        3,
        "of this version",
    ),
    "no JSON": (lambda lines: lines[0] + b"Hello!\n" + b"".join(lines[2:]), 2, "not JSON"),
    "invalid UTF-8": (lambda lines: lines[0] + b'{"type":"\xff"}\n' + b"".join(lines[2:]), 2, ""),
    "a frame of another junction": (
        lambda lines: lines[0] + b'{"type":"ItemDelta","text":"a"}\n' + b"".join(lines[2:]),
        2,
        "not a frame of this file",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_recording_is_described(tmp_path: Path, what: str) -> None:
    breaks, number, message = BROKEN[what]
    path = tmp_path / "tokens.jsonl"
    write_frames(path, FRAMES)
    path.write_bytes(breaks(path.read_bytes().splitlines(keepends=True)))
    found, why = problem(path)
    assert found == number
    assert message in why


def test_beginning_of_a_file_may_be_one_that_still_grows(tmp_path: Path) -> None:
    path = tmp_path / "tokens.jsonl"
    write_frames(path, FRAMES)
    whole = path.read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:length])
        assert problem(path)[1].endswith(": it is still being written, or was cut")


@pytest.mark.parametrize("kind", ["missing", "folder", "file of a folder"])
def test_missing_file_is_described(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokens.jsonl"
    if kind == "folder":
        path.mkdir()
    elif kind == "file of a folder":
        (tmp_path / "a.jsonl").write_text("")
        path = tmp_path / "a.jsonl" / "tokens.jsonl"
    number, why = problem(path)
    assert number is None
    assert "there is no recording here" in why


def test_file_of_another_junction_is_refused(tmp_path: Path) -> None:
    shutil.copy(CASE / "parsed.jsonl", tmp_path / "tokens.jsonl")
    assert problem(tmp_path / "tokens.jsonl")[0] == 3


@pytest.mark.parametrize("what", [*BROKEN, "missing", "a file"])
def test_replay_command_reports_broken_recordings(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recorded"
    if what == "a file":
        folder.write_text("Hello!")
    elif what != "missing":
        folder.mkdir()
        write_frames(folder / "tokens.jsonl", FRAMES)
        broken = BROKEN[what][0]((folder / "tokens.jsonl").read_bytes().splitlines(keepends=True))
        (folder / "tokens.jsonl").write_bytes(broken)
    monkeypatch.setattr("sys.argv", ["penstock", "replay", str(folder)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "penstock" in message
    assert str(folder) in message
    assert "Traceback" not in message


def test_recording_is_json_lines() -> None:
    for name in (FILES[stage][0] for stage in STAGES):
        kinds = [json.loads(each)["type"] for each in (CASE / name).read_text().splitlines()]
        assert (kinds[0], kinds[-1]) == ("Recording", "End")


@pytest.mark.parametrize("sent", ["msg_1a2b", "chatcmpl-1a2b", "cmpl-1a2b"])
@pytest.mark.parametrize("command", ["replay", "inspect", "diff", "shrink"])
def test_id_of_another_api_is_led_to_its_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, sent: str
) -> None:
    """A client of another API knows its response by the id with another beginning."""
    for name in ("resp_1a2b", "resp_1a2"):
        (tmp_path / name).mkdir()

    def refusal(name: str) -> str:
        monkeypatch.setattr("sys.argv", ["penstock", command, str(tmp_path / name)])
        with pytest.raises(SystemExit):
            main()
        return capsys.readouterr().err

    assert refusal(sent).endswith(f"; the recording of this id is {tmp_path / 'resp_1a2b'}\n")
    assert "the recording of this id" not in refusal("msg_1a2b3c")
