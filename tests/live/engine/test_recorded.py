from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from penstock.pipeline.protocol.events import KEEP_ALIVE
from penstock.pipeline.recordings.format import FILES, Recording, UnreadableRecording, read_recording
from tests.support.event_streams import final, read_sse
from tests.support.processes import PATIENCE
from tests.support.serve_command import WEATHER, Command


def test_recording_replays_to_the_same_bytes(server: Command) -> None:
    body = {"model": "tiny-gpt-oss", "input": "What is the weather in Paris?", "tools": [WEATHER], "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        seen = answer.read()
    folder = server.recorded / final(read_sse(seen)).id
    header = complete_recording(folder / "tokens.jsonl").header
    assert header.model == "tiny-gpt-oss"
    assert {"penstock", "python", "vllm"} <= header.versions.keys()
    command = [str(Path(sys.executable).with_name("penstock")), "replay", str(folder), "--from", "parse", "--sse"]
    sent = seen.replace(KEEP_ALIVE, b"")  # which a recording does not have
    assert subprocess.run(command, check=True, capture_output=True).stdout == sent


def complete_recording(path: Path) -> Recording:
    """Wait until the server has written the end of a recording; return it."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return read_recording(path, FILES["generate"][1])
        except UnreadableRecording:
            assert time.monotonic() < deadline
            time.sleep(0.1)
