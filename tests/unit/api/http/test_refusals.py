"""Errors that are read back, as a replay raises them."""

from __future__ import annotations

import inspect

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from penstock.api.http.errors import REFUSALS, refusal
from penstock.pipeline import errors
from penstock.pipeline.errors import StageError, error_named
from penstock.pipeline.logs import Seldom

KINDS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, StageError) and kind is not StageError
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
async def test_an_error_that_is_read_back_can_be_answered(kind: type[StageError]) -> None:
    again = error_named(kind.__name__, "It cannot be.")
    assert isinstance(again, kind)
    app = web.Application()
    app[REFUSALS] = Seldom()
    answer = refusal(make_mocked_request("POST", "/v1/responses", app=app), again)
    assert answer.status == kind.status
    assert int(answer.headers.get("Retry-After", 1)) == 1
