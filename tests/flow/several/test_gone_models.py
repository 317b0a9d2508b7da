"""Models that are no longer served: what asked for them waits, or is refused in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.services.engines.scripted import ScriptedEngine
from tests.support.api_clients import Json, wait_until
from tests.support.server import running_server, script
from tests.support.several import SeveralServer, says, several_models, text_of


def catalogue_of(served: SeveralServer) -> Any:
    house: Any = served.scheduler.engine
    return house.catalogue


def serve(served: SeveralServer, models: Mapping[str, Any]) -> None:
    catalogue_of(served).take(dict(models), {})


@pytest.mark.parametrize("waits_open", [True, False])
async def test_a_queued_response_waits_for_its_model(tmp_path: Path, waits_open: bool) -> None:
    engines = {"big": says("I am big."), "small": says("I am small.")}
    async with several_models(tmp_path, engines, max_background=1) as served:
        if not waits_open:
            served.scheduler.background.most_open = 0
        models = catalogue_of(served).all
        await served.says("big")
        engines["small"].hold()
        first = await served.start_background({"model": "small"})
        await wait_until(lambda: engines["small"].running)
        waiting = await served.start_background({"model": "big"})
        serve(served, {"small": models["small"]})
        engines["small"].say_all()
        assert (await served.wait_for_end(first))["status"] == "completed"
        await wait_until(lambda: served.scheduler.runs.get(waiting, "") is None)
        assert (await served.get_response(waiting))["status"] == "queued"
        status, refused = await served.get(f"/v1/responses/{waiting}?stream=true")
        assert (status, refused["error"]["message"]) == (
            503,
            "This response waits for a server that serves 'big'. Try again later.",
        )
    async with several_models(tmp_path, {"big": says("I am big.")}) as later:
        ended = await later.wait_for_end(waiting)
        assert (ended["status"], text_of(ended)) == ("completed", "I am big.")


async def test_a_conversation_of_a_gone_model_goes_on_with_another(tmp_path: Path) -> None:
    engines = {"big": says("I am big."), "small": says("I am small.")}
    async with several_models(tmp_path, engines) as served:
        _, begun = await served.post({"input": "Hi", "model": "big"})
        conversation = (await served.create_conversation()).rpartition("/")[2]
        await served.says("big", conversation=conversation)
        serve(served, {"small": catalogue_of(served).all["small"]})
        links: tuple[Json, ...] = ({"previous_response_id": begun["id"]}, {"conversation": conversation})
        for link in links:
            status, refused = await served.post({"input": "Hi", "model": "big", **link})
            assert (status, refused["error"]["param"]) == (404, "model")
            assert refused["error"]["message"] == "This server serves 'small', not 'big'."
            assert await served.says("small", **link) == "I am small."
            assert await served.says(None, **link) == "I am small."
        assert (await served.get_response(begun["id"]))["model"] == "big"


async def test_two_servers_on_one_store_leave_each_other_their_work(tmp_path: Path) -> None:
    store = str(tmp_path / "shared.sqlite3")
    engines = {"big": says("I am big."), "small": says("I am small.")}
    async with several_models(tmp_path, engines, store=store, max_background=1) as first:
        engines["big"].hold()
        running = await first.start_background({"model": "big"})
        await wait_until(lambda: engines["big"].running)
        queued = await first.start_background({"model": "small"})
        alone = ScriptedEngine(script(), models=("other",))
        async with running_server(alone, store, heartbeat=0.05) as second:
            await first.scheduler.background.release_queued()
            recovery = second.scheduler.recovery
            await recovery.recover()
            assert not alone.prompts
            assert (await second.get_response(queued))["status"] == "queued"
        engines["big"].say_all()
        assert text_of(await first.wait_for_end(running)) == "I am big."
        assert text_of(await first.wait_for_end(queued)) == "I am small."
