from __future__ import annotations

from pathlib import Path

from penstock.services.engines.scripted import ScriptedEngine
from tests.examples.add_metadata import install
from tests.support.event_streams import final, read_sse
from tests.support.server import running_server, script

RELEASE = {"release": "2026-11"}


async def test_all_readers_see_the_entries(tmp_path: Path) -> None:
    async with running_server(ScriptedEngine(script()), tmp_path, edit=install) as served:
        body = await served.stream({"input": "Hi", "metadata": {"team": "a"}})
        streamed = final(read_sse(body))
        assert streamed.metadata == {"team": "a", **RELEASE}
        assert (await served.get_response(streamed.id))["metadata"] == streamed.metadata
        assert await served.replay(streamed.id) == body
        queued = (await served.post({"input": "Hi", "background": True}))[1]
        assert (queued["status"], queued["metadata"]) == ("queued", RELEASE)
        assert (await served.wait_for_end(queued["id"]))["metadata"] == RELEASE


async def test_client_may_not_fill_the_metadata(tmp_path: Path) -> None:
    full = {str(number): "" for number in range(16)}
    async with running_server(ScriptedEngine(script()), tmp_path, edit=install) as served:
        status, answer = await served.post({"input": "Hi", "metadata": full})
        assert (status, answer["error"]["param"]) == (400, "metadata")
        full["release"] = full.pop("0")
        assert (await served.post({"input": "Hi", "metadata": full}))[1]["metadata"] == {**full, **RELEASE}
