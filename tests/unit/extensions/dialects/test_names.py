"""The names of parameters over all APIs: each body has a name, refuses it, or takes it as one that no API has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from penstock.extensions.dialects.chat import dialect as chat
from penstock.extensions.dialects.chat.body import ChatBody
from penstock.extensions.dialects.completions import dialect as completions
from penstock.extensions.dialects.completions.body import CompletionBody
from penstock.extensions.dialects.messages import dialect as messages
from penstock.extensions.dialects.messages.body import CreateMessage
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.protocol.params.common import Body
from penstock.pipeline.protocol.params.foreign_names import GUIDED, UNBUILT
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_request

BODIES: Mapping[str, tuple[type[Body], Callable[[bytes], Any]]] = {
    "responses": (CreateResponse, read_request),
    "chat": (ChatBody, chat.read),
    "completions": (CompletionBody, completions.read),
    "messages": (CreateMessage, messages.read),
}

OF_ANTHROPIC = frozenset(
    {"billing_policy", "cache_control", "compaction", "container", "diagnostics", "fallback_credit_token", "fallbacks"}
    | {"inference_geo", "mcp_servers", "output_format", "speed", "thread", "user_profile_id"}
)
OF_RESPONSES = frozenset({"access_programs", "background_options", "image", "multi_agent"})
LOGGED: Mapping[str, frozenset[str]] = {
    "responses": OF_ANTHROPIC,
    "chat": OF_ANTHROPIC | OF_RESPONSES | {"prompt_embeds"},
    "completions": OF_ANTHROPIC
    | OF_RESPONSES
    | {"add_generation_prompt", "audio", "continue_final_message", "documents", "enable_response_messages"}
    | {"prediction", "previous_input_messages", "return_prompt_text"},
    "messages": frozenset(),
}
"""The names of other APIs that a body takes as it takes any unknown one, with a line in the log."""


def names_of(body: type[Body]) -> set[str]:
    return {field.alias or name for name, field in body.model_fields.items()}


EVERY = set[str]().union(*(names_of(body) for body, _ in BODIES.values()))


@pytest.mark.parametrize("api", BODIES)
def test_each_name_of_another_api_has_a_verdict(api: str) -> None:
    body, _ = BODIES[api]
    foreign = body.foreign.names
    assert names_of(body).isdisjoint(foreign)
    assert EVERY - names_of(body) - set(foreign) == LOGGED[api]
    assert set(foreign) - EVERY == {*GUIDED, *UNBUILT}
    assert len(set(foreign)) == len(foreign)
    assert set(body.foreign.meant.values()) <= names_of(body) | {"reasoning.effort", "text.format", "text.verbosity"}


@pytest.mark.parametrize(("api", "name"), [(api, name) for api in BODIES for name in BODIES[api][0].foreign.names])
def test_name_of_another_api_is_refused_with_what_is_meant(api: str, name: str) -> None:
    body, read = BODIES[api]
    with pytest.raises(InvalidRequest, match=rf"\b{body.foreign.meant.get(name, 'nothing like it')}\b") as refused:
        read(json.dumps({name: 7}).encode())
    assert refused.value.param == name


@pytest.mark.parametrize("api", BODIES)
def test_name_that_another_api_explains_with_a_name_of_this_one_is_explained(api: str) -> None:
    body, _ = BODIES[api]
    others = [other.foreign.meant for other, _ in BODIES.values() if other is not body]
    sayable = {name for meant in others for name, there in meant.items() if there in names_of(body)}
    assert sayable & set(body.foreign.names) <= body.foreign.meant.keys()
