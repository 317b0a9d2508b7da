from __future__ import annotations

from typing import Any

import pytest

from penstock.pipeline.protocol.params.request import CreateResponse
from tests.examples.compare_adapters import Compare
from tests.support.event_streams import run_stage


async def models(percent: int, requests: list[dict[str, Any]]) -> list[str | None]:
    stage = Compare("support", old="v1", new="v2", percent=percent)
    return [one.model for one in await run_stage(stage, [CreateResponse(**request) for request in requests])]


@pytest.mark.parametrize(("percent", "model"), [(0, "v1"), (100, "v2")])
async def test_only_requests_for_the_compared_model_are_split(percent: int, model: str) -> None:
    assert await models(percent, [{"model": "support"}, {"model": "other"}, {}]) == [model, "other", None]


@pytest.mark.parametrize("name", ["safety_identifier", "prompt_cache_key"])
async def test_a_client_keeps_its_adapter(name: str) -> None:
    requests = [{"model": "support", name: f"client {number}"} for number in range(1000)]
    split = await models(30, requests)
    assert split == await models(30, requests)
    assert 250 < split.count("v2") < 350
