"""The bodies of the Responses API, which keep rules that the pipeline does not have."""

from __future__ import annotations

import json

import pytest

from penstock.api.dialects.responses.dialect import RESPONSES
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.request import CreateResponse


def test_floor_of_the_output_holds_for_bodies_alone() -> None:
    with pytest.raises(InvalidRequest, match="greater than or equal to 16"):
        RESPONSES.read(b'{"input": "Hi", "max_output_tokens": 15}')
    request = RESPONSES.read(b'{"input": "Hi", "max_output_tokens": 16}').request
    assert request.replaced({"max_output_tokens": 1}).max_output_tokens == 1


def test_body_is_read_as_the_request_of_the_pipeline() -> None:
    body = {"input": "Hi", "stream": True, "stream_options": {"include_obfuscation": True}, "user": None}
    reading = RESPONSES.read(json.dumps(body).encode())
    assert type(reading.request) is CreateResponse
    assert reading.request == CreateResponse.model_validate(body)
    assert reading.request.model_fields_set == body.keys()
    assert reading.streams
    assert reading.wire != RESPONSES.wire
