"""The leases of a response: it waits for no model that has to wait for it."""

from __future__ import annotations

from typing import Any, cast

import pytest

from penstock.api.settings import Settings
from penstock.api.settings.model_settings import ModelTable
from penstock.extensions.models.catalogue import Catalogue, Model
from penstock.extensions.models.life import Lease
from penstock.pipeline.errors import ModelUnavailable
from penstock.pipeline.frames import RequestFacts
from tests.support.stored_responses import facts, response


class Life:
    """The life of a model, which waits while another one is in use in its place."""

    def __init__(self, place: set[str], name: str) -> None:
        self.engine = object()
        self._place, self._name = place, name

    async def acquire(self, _: float | None) -> Lease[Any]:
        if self._place - {self._name}:
            raise ModelUnavailable(self._name, "other models are up in its place")
        self._place.add(self._name)
        return Lease(self, lambda: self._place.discard(self._name))

    async def retire(self) -> None:
        """Go on: a test ends before its leases do."""


def model(name: str, place: set[str], *groups: str) -> Model:
    made = Model(name, ModelTable(command="sh", groups=list(groups)), Settings())
    life = Life(place, name)
    made.life, made.engine = cast("Any", life), cast("Any", life.engine)
    return made


def request(name: str) -> RequestFacts:
    return facts(response(model=name))


def catalogue(*models: Model) -> Catalogue:
    made = Catalogue()
    made.take({each.name: each for each in models}, {})
    return made


async def test_a_response_holds_one_model_of_a_group_and_others_beside_it() -> None:
    gpu, cpu = set[str](), set[str]()
    models = catalogue(model("large", gpu, "gpu0"), model("small", gpu, "gpu0", "gpu1"), model("beside", cpu))
    for name in ("large", "beside", "large"):
        await models.held(request(name))
    assert (gpu, cpu) == ({"large"}, {"beside"})
    await models.held(request("small"))
    assert (gpu, cpu) == ({"small"}, {"beside"})
    models.release("resp_1")
    assert not gpu | cpu


async def test_a_model_that_is_opened_for_its_stages_does_not_wait_for_the_response_either() -> None:
    gpu = set[str]()
    models = catalogue(model("large", gpu, "gpu0"), small := model("small", gpu, "gpu0"))
    await models.held(request("large"))
    with pytest.raises(KeyError):  # its life opened nothing
        await models.stage(request("small"), "summarize")
    assert small.turn == {}
    assert not gpu


async def test_a_response_lets_go_of_a_process_that_has_ended_under_it() -> None:
    """The next process starts when the last lease of the one before is released."""
    gpu = set[str]()
    models = catalogue(large := model("large", gpu, "gpu0"))
    await models.held(request("large"))
    large.engine = None
    gpu_at_start = list[set[str]]()
    acquire = large.life.acquire

    async def acquire_again(wait: float | None) -> Lease[Any]:
        gpu_at_start.append({*gpu})
        return await acquire(wait)

    large.life.acquire = acquire_again  # type: ignore[method-assign]
    await models.held(request("large"))
    assert gpu_at_start == [set()]


@pytest.mark.parametrize("served", [(), ("large",)])
async def test_a_response_keeps_its_model_though_the_name_is_removed_or_gets_another(served: tuple[str, ...]) -> None:
    first, second = set[str](), set[str]()
    large = model("large", first)
    models = catalogue(large)
    await models.held(request("large"))
    models.take({name: model(name, second) for name in served}, {})
    assert await models.held(request("large")) is large
    assert (first, second) == ({"large"}, set())
    models.release("resp_1")
    assert not first


async def test_a_response_that_waits_holds_no_model_that_others_wait_for() -> None:
    """Each of two responses holds a model, and needs that of the other, which gives no more leases."""
    one, two = set[str](), set[str]()
    models = catalogue(model("one", one, "gpu0"), model("two", two, "gpu1"), model("other", two, "gpu1"))
    await models.held(request("one"))
    two.add("other")
    with pytest.raises(ModelUnavailable):
        await models.held(request("two"))
    assert not one
