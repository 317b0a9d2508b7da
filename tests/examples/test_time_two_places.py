from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from penstock.pipeline.plugins import load
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.event_streams import read_sse
from tests.support.server import ENDLESS, HELLO, running_server, script

STAGE = load(["tests.examples.time_two_places:install"])


def counts(caplog: pytest.LogCaptureFixture) -> dict[str, int]:
    lines = [record.getMessage() for record in caplog.records if "time_two_places" in record.name]
    return {line.partition(":")[0]: int(re.findall(r"(\d+) frames", line)[0]) for line in lines}


async def test_both_places_log_their_own_frames(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO)
    engine = ScriptedEngine(script(HELLO))
    async with running_server(engine, tmp_path, edit=STAGE) as served:
        events = read_sse(await served.stream({"input": "Hi"}))
        found = counts(caplog)
        assert found["generate"] == len(script(HELLO).token_ids) + 2
        assert found["emit"] >= len(events) + 1
        caplog.clear()
        engine.script = script(ENDLESS, endless=True, latency=0.001)
        async with served.open_stream() as stream:
            await stream.upto(b"delta")
        await served.wait_until_idle()
    assert counts(caplog).keys() == {"generate", "emit"}
