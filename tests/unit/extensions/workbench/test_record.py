"""The command ``penstock record``: a process that records until it is stopped, and says in one line what is wrong."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from penstock.extensions.workbench import record
from penstock.pipeline.errors import CannotRun
from penstock.pipeline.recordings.wire import WireEvent
from tests.support.wiretaps import CHAT_PATH, chunk, exchange, post, raw_server, wire_recordings

pytestmark = pytest.mark.io


@pytest.mark.slow
async def test_command_records_until_it_is_stopped(tmp_path: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    folder = tmp_path / "recordings"
    async with raw_server(head, chunk(b"data: 1\n\n"), chunk(b"")) as raw:
        program = Path(sys.executable).with_name("penstock")
        command: list[str | Path] = [program, "record", folder, "--upstream", raw.url, "--port", "0"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout
        line = (await process.stdout.readline()).decode()
        url = line.split()[3]
        assert line == f"Recording {raw.url} at {url} into {folder}. Ctrl-C ends it.\n"
        assert (await exchange(url, post(CHAT_PATH, b'{"model": "m"}'))).endswith(chunk(b"data: 1\n\n") + chunk(b""))
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    (recording,) = wire_recordings(folder)
    assert recording.frames[1:] == (WireEvent(data=1),)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--upstream", "localhost"), "--upstream: 'localhost' is no URL"),
        (("/dev/null/x", "--upstream", "http://h", "--port", "0"), "no recording can be written to /dev/null/x"),
        (("--upstream", "http://h", "--host", "192.0.2.1"), "192.0.2.1"),
    ],
)
def test_wrong_setting_is_one_line(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CannotRun, match=message):
        record.main(arguments)


@pytest.mark.parametrize("condition", ["2", "0", "a b"])
def test_wrong_condition_is_refused(condition: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        record.main(["--upstream", "http://h", "--record-if", condition])
    assert "argument --record-if" in capsys.readouterr().err
