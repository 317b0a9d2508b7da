"""The table of echoed parameters: every field of a response is in it, is an outcome, or belongs to the run."""

from __future__ import annotations

from penstock.pipeline.lifecycle.order import OUTCOME
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.response import ECHOED, Response
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from tests.support.requests import normalize

OF_THE_RUN = {
    *("id", "object", "created_at", "status", "model", "store", "background", "conversation", "service_tier"),
    "left_out_tools",
    "prompt",  # what it has given is echoed, and a replay needs no template
}


def test_every_field_is_echoed_or_an_outcome_or_of_the_run() -> None:
    assert sorted(Response.__struct_fields__) == sorted([*ECHOED, *OUTCOME, *OF_THE_RUN])
    assert ECHOED.keys() <= CreateResponse.model_fields.keys()


async def test_request_without_parameters_is_echoed_as_the_table_says() -> None:
    response = (await normalize(Store(NullDatabase()), input="Hi")).facts.response
    assert {name: getattr(response, name) for name in ECHOED} == ECHOED
