from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

import pytest

from penstock.api.runs.housekeeping import keep_sweeping
from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import wait_until
from tests.support.server import running_server, script
from tests.support.stores import FaultyDatabase, database_at


@pytest.mark.defect("17")
async def test_expired_responses_are_swept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = FaultyDatabase(database_at(str(tmp_path / "store.sqlite3")))
    async with running_server(ScriptedEngine(script()), kept) as served:
        _, answer = await served.post({"input": "Hi"})
        await wait_until(lambda: len(served.scheduler.runs) == 0)
        kept.is_down = True
        with caplog.at_level(logging.INFO):
            sweeping = asyncio.create_task(keep_sweeping(served.store, 0, 0))
            await wait_until(lambda: "could not be deleted" in caplog.text)
            kept.is_down = False
            await wait_until(lambda: "Stored: " in caplog.text)
        sweeping.cancel()
        assert re.search(r"Stored: 0 responses, [0-9.]+ MB; kept for 0 s, their streams for 0 s", caplog.text)
        assert (await served.get(f"/v1/responses/{answer['id']}"))[0] == 404
