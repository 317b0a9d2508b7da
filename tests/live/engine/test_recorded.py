"""``penstock serve --record`` over a real model: a recording replays to the client's bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from pipeline.record import FILES, read_recording
from tests.support.serve_command import WEATHER, running

pytestmark = pytest.mark.engine


def test_recording_replays_to_the_same_bytes(tmp_path: Path) -> None:
    """The replay begins at the parser, and needs no model."""
    recorded = tmp_path / "recorded"
    body = {"model": "tiny-gpt-oss", "input": "What is the weather in Paris?", "tools": [WEATHER], "stream": True}
    with running(tmp_path / "responses.sqlite3", "--record", str(recorded)) as server:
        request = urllib.request.Request(
            f"{server.url}/v1/responses", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            seen = answer.read()
    (folder,) = recorded.iterdir()
    header = read_recording(folder / "tokens.jsonl", FILES["generate"][1]).header
    assert header.model == "tiny-gpt-oss"
    assert {"penstock", "python", "vllm"} <= header.versions.keys()
    command = [str(Path(sys.executable).with_name("penstock")), "replay", str(folder), "--from", "parse", "--sse"]
    assert subprocess.run(command, check=True, capture_output=True).stdout == seen
