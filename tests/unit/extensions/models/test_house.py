"""The models of a server, as its settings change."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.api.settings import Settings
from penstock.api.start.assembly import RunningEngine
from penstock.extensions.models.start import House
from penstock.pipeline.errors import CannotStart

AWAY = {"engine": ["http://127.0.0.1:9"]}
HERE = {"model": "org/model"}


def settings(**models: Any) -> Settings:
    return Settings(models=models)


@pytest.mark.parametrize("later", [{"model": "org/other"}, {**HERE, "chat_template": "other.jinja"}])
async def test_a_model_in_this_process_changes_with_a_restart_alone(later: dict[str, Any]) -> None:
    house = House(settings(here=HERE, away=AWAY), cast("RunningEngine", object()))
    before = house.catalogue.all
    with pytest.raises(CannotStart, match="only a restart"):
        house.take(settings(here=later))
    assert house.catalogue.all is before
    house.take(settings(away=AWAY))
    house.take(settings(here={**HERE, "names": ["other"]}, away=AWAY))
    assert [*house.catalogue.names] == ["here", "other", "away"]
    await house.catalogue.close()


async def test_a_model_in_this_process_comes_with_a_restart_alone() -> None:
    house = House(settings(away=AWAY), None)
    with pytest.raises(CannotStart, match="only a restart"):
        house.take(settings(here=HERE, away=AWAY))
    assert [*house.catalogue.all] == ["away"]
    await house.catalogue.close()
