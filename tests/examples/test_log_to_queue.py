from __future__ import annotations

import atexit
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.pipeline.errors import EngineFailed, EngineOverloaded
from penstock.pipeline.plugins import load
from penstock.services.engines.scripted import ScriptedEngine
from tests.examples import log_to_queue
from tests.support.event_streams import final, read_sse
from tests.support.server import ENDLESS, HELLO, running_server, script

STAGE = load(["tests.examples.log_to_queue:install"])


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """The functions that the end of the process calls."""
    at_exit: list[Any] = []
    monkeypatch.setenv("AUDIT_FILE", str(tmp_path / "audit.jsonl"))
    monkeypatch.setattr(atexit, "register", at_exit.append)
    log_to_queue.audit.cache_clear()
    yield at_exit
    log_to_queue.audit.cache_clear()
    logging.getLogger("audit").handlers.clear()


async def test_each_response_leaves_a_line(stop: list[Any], tmp_path: Path) -> None:
    engine = ScriptedEngine(script(HELLO))
    async with running_server(engine, tmp_path, edit=STAGE) as served:
        whole = final(read_sse(await served.stream({"input": "Hi"})))
        engine.script = script(HELLO, error=EngineFailed("It broke."))
        failed = final(read_sse(await served.stream({"input": "Hi"})))
        assert (await served.post({"input": []}))[0] == 400
        engine.script = script(HELLO, refusal=EngineOverloaded("Wait."))
        assert (await served.post({"input": "Hi"}))[0] == 503
        engine.script = script(ENDLESS, endless=True, latency=0.001)
        async with served.open_stream() as stream:
            cut = await stream.response_id()
        await served.wait_until_idle()
    [listener_stop] = stop
    listener_stop()
    listener_stop.__self__.handlers[0].close()
    assert whole.usage is not None
    assert [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()] == [
        {"id": whole.id, "model": "tiny", "status": "completed", "tokens": whole.usage.total_tokens},
        {"id": failed.id, "model": "tiny", "status": "failed", "tokens": None},
        {"id": cut, "model": "tiny", "status": "cut"},
    ]
