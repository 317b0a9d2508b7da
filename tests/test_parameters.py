"""The README's table of parameters says what is so."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeAlias, get_type_hints

import pytest
from msgspec.structs import replace
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)

from pipeline.errors import InvalidRequest, UnsupportedParameter
from pipeline.frames import Conversation
from pipeline.protocol.items import InputText, Item, Message
from pipeline.protocol.reading import read_request
from pipeline.protocol.request import CreateResponse
from pipeline.record import replay
from stages.normalize.normalize import Normalize
from stages.persist.store import NoStore, StoredResponse
from tests.pipeline.bodies import WEATHER

Json: TypeAlias = Any

README = (Path(__file__).parents[1] / "README.md").read_text()


def table() -> list[tuple[str, str]]:
    """Each parameter of the table and its promise."""
    section = README.split("### What a request may say")[1].split("\n##")[0]
    rows = re.findall(r"^\| (`.+?) \| (\w+) \|", section, re.MULTILINE)
    return [(name, promise) for names, promise in rows for name in re.findall(r"`(\w+)`", names)]


TABLE = dict(table())
PROBES: dict[str, list[Json]] = {
    "model": ["lora"],
    "input": ["Hello", [{"role": "user", "content": "Hello"}], [{"id": "msg_0i0000"}]],
    "instructions": ["Be brief."],
    "previous_response_id": ["resp_0"],
    "store": [False],
    "metadata": [{"order": "17"}],
    "stream": [True, False],
    "stream_options": [{"include_obfuscation": True}],
    "tools": [[WEATHER], [{"type": "custom", "name": "x"}], [{"type": "namespace", "name": "n", "tools": [WEATHER]}]],
    "tool_choice": ["none"],
    "parallel_tool_calls": [False],
    "reasoning": [{"effort": "high"}, {"summary": "auto"}, {"generate_summary": "auto"}],
    "text": [{"format": {"type": "json_object"}}, {"verbosity": "low"}],
    "max_output_tokens": [16],
    "temperature": [0.5],
    "top_p": [0.5],
    "top_logprobs": [1],
    "include": [["message.output_text.logprobs"]],
    "truncation": ["auto"],
    "prompt_cache_key": ["k1"],
    "service_tier": ["flex"],
    "user": ["u1"],
    "safety_identifier": ["u1"],
    "max_tool_calls": [1],
    "prompt_cache_options": [{"mode": "implicit", "ttl": "30m"}, {"comparison_response_id": "resp_0"}],
    "prompt_cache_retention": ["24h"],
    "background": [True],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "prompt": [{"id": "pmpt_1"}],
    "context_management": [[{"type": "compaction"}]],
    "moderation": [{"model": "omni-moderation-latest"}],
    "access_programs": [{"cyber": "standard"}],
    "image": [{"context_compression": "auto"}],
    "top_k": [5],
    "min_p": [0.1],
    "seed": [1],
    "stop": ["END", ["END"]],
    "presence_penalty": [1],
    "frequency_penalty": [1],
    "repetition_penalty": [1.5],
    "cache_salt": ["salt"],
    "priority": [1],
    "enable_response_messages": [True],
    "previous_input_messages": [[{"role": "user", "content": "Hello"}]],
}
"""Values that ask for something, for each parameter."""

AT_THE_EDGE = frozenset({"stream", "stream_options"})
"""Parameters that no stage knows: they say how the events are written."""

CASES = [(name, value) for name, values in PROBES.items() for value in values]


EARLIER = Message("msg_0i0000", "completed", "user", (InputText("Hello"),))


class OneResponse(NoStore):
    """Knows one response, which anything may continue."""

    async def chain(self, response_id: str) -> tuple[StoredResponse, ...]:
        response = (await conversation(input="Hi")).response
        return (StoredResponse(response, (EARLIER,)),)

    async def items(self, ids: Sequence[str]) -> dict[str, Item]:
        return {EARLIER.id: EARLIER}


async def conversation(**body: Json) -> Conversation:
    request = await read_request(json.dumps({"input": "Hi", **body}).encode())
    stage = Normalize(OneResponse(), ("served", "lora"), draw=lambda: "1", clock=lambda: 0.0)
    async with aclosing(stage(replay([request]))) as conversations:
        return await anext(conversations)


def test_the_table_has_every_parameter_once() -> None:
    """The table lists what openai-python sends and what is read here, all of it, once, and nothing else."""
    sdk = get_type_hints(ResponseCreateParamsStreaming) | get_type_hints(ResponseCreateParamsNonStreaming)
    names = [name for name, _ in table()]
    assert sorted(names) == sorted(sdk.keys() | CreateResponse.model_fields.keys())


def test_every_parameter_is_probed() -> None:
    """No promise of the table stays untested."""
    assert PROBES.keys() == TABLE.keys()
    assert set(TABLE.values()) == {"implemented", "echoed", "accepted", "refused"}


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
async def test_the_table_is_true(name: str, value: Json) -> None:
    """Whatever a row promises happens to a request that says it."""
    before = await conversation()
    if TABLE[name] == "refused":
        with pytest.raises(UnsupportedParameter) as caught:
            await conversation(**{name: value})
        assert (caught.value.status, caught.value.param) == (400, name)
        return
    after = await conversation(**{name: value})
    match TABLE[name]:
        case "implemented":
            assert (after == before) is (name in AT_THE_EDGE)
        case "echoed":
            assert getattr(after.response, name) == value
            assert replace(after, response=before.response) == before
        case _:
            assert after == before


@pytest.mark.parametrize("name", [name for name, promise in TABLE.items() if promise == "refused"])
async def test_what_is_refused_may_be_null(name: str) -> None:
    """Clients write null for what they do not ask for; false and an empty list ask for nothing either."""
    nothings: dict[str, list[Json]] = {"background": [None, False], "context_management": [None, []]}
    for nothing in nothings.get(name, [None]):
        assert await conversation(**{name: nothing}) == await conversation()


@pytest.mark.parametrize("name", PROBES)
async def test_what_has_no_meaning_is_refused(name: str) -> None:
    """A value of a wrong type is a 400 that names the parameter, or a place in it."""
    with pytest.raises(InvalidRequest) as caught:
        await conversation(**{name: [[5]] if name != "context_management" else 5})
    assert (caught.value.param or "").startswith(name)
