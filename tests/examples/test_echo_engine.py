"""An engine of one's own, from the command line to the events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.api.cli.drawn import drawn
from penstock.api.cli.serve import main
from penstock.api.settings import Settings
from penstock.pipeline.core import source_of
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.server import pipeline
from penstock.testing import check_engine
from tests.examples.echo_engine import EchoEngine
from tests.support.event_streams import checked, final
from tests.support.fixture_cases import item_texts

ENGINE = f"{Path(__file__).with_name('echo_engine.py')}:engine"
SETTINGS: dict[str, Any] = {"engine": [ENGINE], "store": "none", "sandbox": False}


async def test_engine_keeps_all_rules() -> None:
    await check_engine(EchoEngine())


async def test_server_answers_with_an_engine_of_its_own() -> None:
    request = CreateResponse(model="echo", input="Is anybody there?")
    async with (
        pipeline(Settings(**SETTINGS)) as responses,
        responses.open(source_of([request])) as events,
    ):
        response = final(checked([event async for event in events]))
    assert [step.name for step in responses.every_step() if step.guard] == ["generate"]
    assert (response.status, response.model, item_texts(response)) == ("completed", "echo", ["Is anybody there?"])


async def test_pipeline_of_an_own_engine_is_drawn() -> None:
    head, _, *stages = (await drawn(Settings(**SETTINGS))).splitlines()
    assert head == f"echo speaks Harmony, and runs on {ENGINE}."
    assert [line.split()[0] for line in stages[5:9]] == ["summarize", "render", "generate", "parse"]


def test_a_wrong_engine_ends_the_start_with_its_cure(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^penstock: --engine absent:engine: there is no module absent$"):
        main(["--engine", "absent:engine", "--store", "none"])
