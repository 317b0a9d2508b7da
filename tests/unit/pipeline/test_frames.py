"""Copies of frames, and changes of sampling."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pydantic import ValidationError

from penstock.pipeline.frames import ItemDelta, ResolvedRequest, replace, with_facts, with_sampling
from penstock.pipeline.protocol.params.request import CreateResponse, Envelope
from tests.support.requests import user_message
from tests.support.stored_responses import facts, response


def test_each_kind_of_frame_is_copied_alike() -> None:
    request = CreateResponse(model="a", input="Hi").inside(Envelope(owner="me"))
    copy = replace(request, model="b", text={"format": {"type": "json_object"}})
    assert (copy.model, copy.input, copy.envelope.owner, request.model) == ("b", "Hi", "me", "a")
    assert copy.text is not None
    assert copy.text.format is not None
    assert copy.text.format.type == "json_object"
    assert replace(ItemDelta("a"), text="b") == ItemDelta("b")


@pytest.mark.parametrize("frame", [CreateResponse(input="Hi"), ItemDelta("a")])
def test_a_copy_refuses_fields_that_do_not_exist(frame: Any) -> None:
    with pytest.raises(TypeError, match="coldness"):
        replace(frame, coldness=1)
    known = "text" if isinstance(frame, ItemDelta) else "temperature"
    with pytest.raises(TypeError, match=rf"'{known[:-1]}' \(did you mean {known}\?\)"):
        replace(frame, **{known[:-1]: 1})


def test_a_copy_of_a_request_refuses_what_a_client_may_not_send() -> None:
    with pytest.raises(ValidationError, match="temperature"):
        replace(CreateResponse(input="Hi"), temperature=3)


def test_an_envelope_is_copied_too_and_put_around_a_request_by_inside() -> None:
    request = CreateResponse(input="Hi").inside(Envelope(owner="alice"))
    assert request.inside(replace(request.envelope, request_id="1")).envelope == Envelope("alice", request_id="1")
    with pytest.raises(TypeError, match=r"'ownr' \(did you mean owner\?\)"):
        replace(request.envelope, ownr="bob")
    with pytest.raises(TypeError, match=r"request\.inside"):
        replace(request, envelope=Envelope(owner="bob"))
    with pytest.raises(TypeError, match="not a value of the type dict"):
        replace({}, text="a")  # type: ignore[type-var]


def test_items_of_a_request_are_put_together_once_and_anew_for_a_copy() -> None:
    first, second = user_message("msg_1", "Hi"), user_message("msg_2", "Go on")
    request = ResolvedRequest(facts(response("resp_1"), input=(second,)), (first,))
    encoded = msgspec.json.encode(request)
    assert request.items == (first, second)
    assert request.items is request.items
    assert msgspec.json.encode(request) == encoded  # a recording holds each item once
    assert with_facts(request, input=()).items == (first,)
    assert replace(request, history=()).items == (second,)


SHOWN = {"temperature": 0.25, "top_p": 0.5, "presence_penalty": 0.5, "frequency_penalty": 1.5}


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        (SHOWN, SHOWN),
        ({"max_tokens": 20}, {"max_output_tokens": 20}),
        ({"logprobs": 3}, {"top_logprobs": 3}),
        ({"logprobs": None}, {"top_logprobs": 0}),
        ({"top_k": 5, "seed": 7}, {}),
    ],
)
def test_changed_sampling_is_shown_to_the_client(changes: dict[str, Any], shown: dict[str, Any]) -> None:
    before = ResolvedRequest(facts(response("resp_1"), input=()))
    after = with_sampling(before, **changes)
    assert after.facts.sampling == replace(before.facts.sampling, **changes)
    assert after.facts.response == replace(before.facts.response, **shown)


def test_facts_name_the_response_and_its_model() -> None:
    known = facts(response("resp_1"), input=())
    assert (known.response_id, known.model) == (known.response.id, known.response.model)
