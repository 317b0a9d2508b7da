from __future__ import annotations

import logging
from pathlib import Path

import pytest

from penstock.pipeline.plugins import load
from penstock.services.engines.scripted import ScriptedEngine
from tests.examples.share_state import SHARED
from tests.support.server import HELLO, running_server, script

STAGE = load(["tests.examples.share_state:install"])
BROKEN = "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Hello!<|return|>"


async def test_repairs_of_one_response_reach_its_other_stage(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.WARNING)
    engine = ScriptedEngine(script(BROKEN))
    async with running_server(engine, tmp_path, edit=STAGE) as served:
        await served.stream({"input": "Hi"})
        engine.script = script(HELLO)
        await served.stream({"input": "Hi"})
    [message] = [record.getMessage() for record in caplog.records if "share_state" in record.name]
    assert message == "Repaired, then completed: {'missing end': 1, 'missing start': 1}"
    assert len(SHARED) == 0
