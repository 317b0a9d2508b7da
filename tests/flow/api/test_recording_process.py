"""``--record`` of a server in a process of its own: refusals, options, and the files of a killed server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.api.settings import Settings
from penstock.api.start.recording import options, versions
from penstock.pipeline.frames import TokenChunk
from penstock.pipeline.recordings.format import FILES, UnreadableRecording, read_recording
from penstock.stages.models.chat.load import ChatOptions
from tests.support.server import recorded_folders
from tests.support.server_process import exit_status, running_process, serve_script


def chunks(path: Path) -> Iterator[bytes]:
    return (line for line in path.read_bytes().splitlines() if b"TokenChunk" in line)


async def test_killed_server_leaves_readable_files(tmp_path: Path) -> None:
    recorded = tmp_path / "recorded"
    async with running_process(str(tmp_path / "store.sqlite3"), tmp_path, "long", "--record", str(recorded)) as server:
        await server.post({"input": "Count.", "background": True})
        while not recorded_folders(recorded) or not (tokens := recorded_folders(recorded)[0] / "tokens.jsonl").exists():
            await asyncio.sleep(0.05)
        while len(list(chunks(tokens))) < 10:
            await asyncio.sleep(0.05)
        await server.kill()
    assert (recorded.stat().st_mode & 0o777) == 0o700
    assert "with all texts" in server.log.read_text()
    assert TokenChunk.__name__.encode() in tokens.read_bytes()
    with pytest.raises(UnreadableRecording, match="has no end") as cut:
        read_recording(tokens, FILES["generate"][1])
    assert cut.value.line == tokens.read_bytes().count(b"\n")


async def test_unwritable_folder_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    options = ("--store", str(tmp_path / "s.sqlite3"), "--record", str(tmp_path / "file/folder"))
    assert await exit_status(tmp_path / "log", serve_script, "quick", "--port", "0", *options) == 1
    written = (tmp_path / "log").read_text()
    assert f"no recording can be written to {tmp_path / 'file/folder'}: Not a directory" in written


@pytest.mark.parametrize(
    ("option", "value"), [("record", ""), ("record_after", "generate,nothing"), ("record_if", "2.0")]
)
def test_unusable_recording_options_are_refused(option: str, value: str) -> None:
    with pytest.raises(ValidationError):
        Settings.model_validate({"engine_arguments": [], option: value})


def test_recorded_stages_are_separated_by_commas() -> None:
    chosen = Settings.model_validate({"engine_arguments": [], "record_after": "generate,emit"})
    assert chosen.record_after == ("generate", "emit")


def test_header_has_only_changed_options() -> None:
    chosen = ChatOptions(tool_call_parser="hermes", default_chat_template_kwargs={"enable_thinking": False})
    assert set(options(chosen)) == {"tool_call_parser", "default_chat_template_kwargs"}
    assert ChatOptions(**options(chosen)) == chosen
    assert options(ChatOptions()) == {}
    assert {"penstock", "python"} <= versions().keys()
