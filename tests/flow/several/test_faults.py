"""Models that are full, down, slow or removed: no request is lost, and no lease is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.extensions.models import life
from penstock.pipeline.errors import CannotStart, EngineOverloaded
from penstock.pipeline.logs import current_response
from tests.support import several
from tests.support.api_clients import Json, wait_until
from tests.support.scripted_model import MODEL
from tests.support.several import SeveralServer, says, several_models


def catalogue_of(served: SeveralServer) -> Any:
    house: Any = served.scheduler.engine
    return house.catalogue


def leases_of(served: SeveralServer) -> set[tuple[str, int, int]]:
    """Return the models that have leases, or requests that wait for one."""
    lives = ((name, model.life) for name, model in catalogue_of(served).all.items())
    return {(name, life.running, life.waiting) for name, life in lives if life.running or life.waiting}


def hold_open(served: SeveralServer, name: str) -> asyncio.Event:
    """Have a model open only once the event is set that this returns."""
    life, may_open = catalogue_of(served).all[name].life, asyncio.Event()
    opened = life._opened  # noqa: SLF001

    @asynccontextmanager
    async def later() -> AsyncGenerator[Any, None]:
        assert current_response.get() == "-"
        await may_open.wait()
        async with opened() as running:
            yield running

    life._opened = later  # noqa: SLF001
    return may_open


async def test_the_only_model_is_opened_again_after_it_could_not_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "FIRST_PAUSE", 0.0)
    async with several_models(tmp_path, {"big": says("I am big.")}) as served:
        make = several.MADE["big"]

        def fail() -> Any:
            raise CannotStart("no memory")

        several.MADE["big"] = fail
        assert (await served.post({"input": "Hi", "model": "big"}))[0] == 503
        several.MADE["big"] = make
        assert (await served.get("/health"))[0] == 200
        assert await served.says("big") == "I am big."


async def test_a_model_that_is_removed_while_it_opens_answers_those_that_wait(tmp_path: Path) -> None:
    async with several_models(tmp_path, {"big": says("I am big."), "small": says("I am small.")}) as served:
        models, may_open = catalogue_of(served), hold_open(served, "big")
        gone = models.all["big"]
        waits = asyncio.create_task(served.post({"input": "Hi", "model": "big"}))
        await wait_until(lambda: gone.life.waiting)
        models.take({"small": models.all["small"]}, {})
        may_open.set()
        status, answer = await waits
        assert (status, "serves 'big'" in answer["error"]["message"]) == (503, True)
        await wait_until(lambda: gone.life.state == "stopped")


async def test_a_model_that_is_closed_while_it_opens_refuses_those_that_wait(tmp_path: Path) -> None:
    async with several_models(tmp_path, {"big": says("I am big.")}) as served:
        hold_open(served, "big")
        life = catalogue_of(served).all["big"].life
        waits = [asyncio.create_task(served.post({"input": "Hi", "model": "big"})) for _ in range(2)]
        await wait_until(lambda: life.waiting == 2)
        await life.close()
        assert [(await each)[0] for each in waits] == [503, 503]
        assert not leases_of(served)


async def test_a_stand_in_answers_without_a_lease_of_the_other_model(tmp_path: Path) -> None:
    engines = {"big": says("I am big.", refusal=EngineOverloaded("full")), "small": says("I am small.")}
    async with several_models(tmp_path, engines, {"big": {"instead": "small"}}) as served:
        engines["small"].hold(1)
        async with served.open_stream({"model": "big"}) as stream:
            await wait_until(lambda: engines["small"].running)
            assert leases_of(served) == {("small", 1, 0)}
            engines["small"].say_all()
            await stream.rest()
        await wait_until(lambda: not leases_of(served))


async def test_a_client_learns_nothing_of_a_stand_in_that_cannot_take_its_request(tmp_path: Path) -> None:
    full = EngineOverloaded("full")
    engines = {"big": says("I am big.", refusal=full), "small": says("I am small.", context_length=400)}
    async with several_models(tmp_path, engines, {"big": {"instead": "small"}}) as served:
        status, answer = await served.post({"input": "word " * 600, "model": "big"})
        assert (status, answer["error"]["message"]) == (503, "full")
        assert await served.says("big") == "I am small."
        assert not leases_of(served)


async def test_a_server_that_stops_ends_the_responses_of_removed_models_as_all_others(tmp_path: Path) -> None:
    async with several_models(tmp_path, {"big": says("I am big."), "small": says("I am small.")}) as served:
        served.engines["big"].hold(1)
        async with served.open_stream({"model": "big"}) as stream:
            await wait_until(lambda: served.engines["big"].running)
            models = catalogue_of(served)
            models.take({"small": models.all["small"]}, {})
            await served.scheduler.drain(0)
            assert b"The server is stopping." in await stream.rest()


async def test_a_request_that_waits_for_a_start_is_refused_when_the_server_stops(tmp_path: Path) -> None:
    """Its answer would be passed on."""
    tables: dict[str, Json] = {"vectors": {"kind": "embed", "command": f"{MODEL} --waits-for {tmp_path / 'never'}"}}
    async with several_models(tmp_path, {"small": says("I am small.")}, tables) as served:
        asked = asyncio.create_task(served.post({"input": "Hi", "model": "vectors"}, "/v1/embeddings"))
        await wait_until(lambda: catalogue_of(served).all["vectors"].life.waiting)
        await served.scheduler.drain(0)
        status, answer = await asked
        assert (status, answer["error"]["message"].partition(".")[0]) == (503, "The server is stopping")


async def test_a_server_that_refuses_connections_is_one_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with several_models(tmp_path, {}, {"away": {"engine": ["http://127.0.0.1:9"]}}) as served:
        status, _ = await served.post({"input": "Hi", "model": "away"})
    (told,) = (each for each in caplog.records if each.message.startswith("Model away cannot be used"))
    assert (status, told.exc_info) == (503, None)
    assert "refused" in told.message
