from __future__ import annotations

import ast
import json
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias, get_type_hints

import pytest
from msgspec.structs import asdict, replace
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)

from penstock.pipeline.core import source_of
from penstock.pipeline.errors import InvalidRequest, UnsupportedParameter
from penstock.pipeline.protocol.items import InputText, Message
from penstock.pipeline.protocol.params.request import CreateResponse
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.protocol.response import Response
from penstock.services.engines.scripted import ScriptedEngine
from penstock.services.prompts import Prompts, Template
from penstock.services.store.sqlite import SqliteDatabase
from penstock.services.store.store import Store, StoredConversation
from penstock.stages.normalize.normalize import Normalize, normalizing
from penstock.stages.normalize.recall import Recall
from tests.support.event_streams import harmony_pipeline
from tests.support.paths import ROOT
from tests.support.request_bodies import WEATHER
from tests.support.server import script
from tests.support.stored_responses import stored_response

Json: TypeAlias = Any

PAGE = (ROOT / "docs" / "PARAMETERS.md").read_text()


def promises() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (`.+?) \| (\w+) \|", PAGE.split("\n##")[0], re.MULTILINE)
    return [(name, promise) for names, promise in rows for name in re.findall(r"`(\w+)`", names)]


TABLE = dict(promises())
PROBES: dict[str, list[Json]] = {
    "model": ["lora"],
    "input": ["Hello", [{"role": "user", "content": "Hello"}], [{"id": "msg_0i0000"}]],
    "instructions": ["Be brief."],
    "previous_response_id": ["resp_0"],
    "store": [False],
    "metadata": [{"order": "17"}],
    "tools": [
        [WEATHER],
        [{"type": "custom", "name": "x"}],
        [{"type": "namespace", "name": "n", "tools": [WEATHER]}],
        [{"type": "shell"}],
        [{"type": "mcp", "server_label": "m", "server_url": "https://mcp.invalid"}],
    ],
    "tool_choice": ["none", "required", {"type": "function", "name": WEATHER["name"]}],
    "parallel_tool_calls": [False],
    "reasoning": [{"effort": "high"}, {"summary": "auto"}, {"generate_summary": "auto"}],
    "text": [{"format": {"type": "json_object"}}, {"verbosity": "low"}, {"verbosity": "high"}],
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
    "prompt_cache_options": [{"mode": "implicit", "ttl": "30m"}, {"comparison_response_id": "resp_0"}],
    "prompt_cache_retention": ["24h"],
    "background": [True],
    "conversation": ["conv_1", {"id": "conv_1"}],
    "background_options": [{"completion_window": "soonest", "continuation_id": "a"}],
    "prompt": [{"id": "brief"}, {"id": "brief", "version": "1", "variables": {}}],
    "context_management": [[{"type": "compaction"}]],
    "moderation": [{"model": "omni-moderation-latest"}],
    "access_programs": [{"cyber": "standard"}],
    "multi_agent": [{"enabled": True}],
    "image": [{"context_compression": "auto"}],
    "top_k": [5],
    "min_p": [0.1],
    "seed": [1],
    "stop": ["END", ["END"]],
    "stop_token_ids": [[5]],
    "min_tokens": [3],
    "bad_words": [["a"]],
    "logit_bias": [{"5": -100}],
    "allowed_token_ids": [[5, 6]],
    "logprob_token_ids": [[5, 6]],
    "watermarking": [False],
    "vllm_xargs": [{"x": 1}],
    "thinking_token_budget": [5],
    "include_reasoning": [False],
    "session_id": ["s1"],
    "mm_payload": ["none"],
    "return_mm_kwargs": [False],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "include_stop_str_in_output": [True],
    "media_io_kwargs": [{"image": {}}],
    "mm_processor_kwargs": [{"max_pixels": 1}],
    "kv_transfer_params": [{"remote_host": "x"}],
    "ec_transfer_params": [{"remote_host": "x"}],
    "repetition_detection": [{"min_count": 2}],
    "presence_penalty": [1],
    "frequency_penalty": [1],
    "repetition_penalty": [1.5],
    "cache_salt": ["salt"],
    "priority": [1],
    "enable_response_messages": [True],
    "return_token_ids": [True],
    "return_weight_versions": [True],
    "structured_outputs": [{"json_object": True}, {"choice": ["yes", "no"]}, {"grammar": 'root ::= "yes" | "no"'}],
    "previous_input_messages": [[{"role": "user", "content": "Hello"}]],
}
"""Values with an effect, for each parameter that a stage reads."""

ELSEWHERE = frozenset(
    {"stream", "stream_options", "request_id", "max_tool_calls", "chat_template", "chat_template_kwargs"}
)
"""Parameters that these tests cannot observe.  Other tests cover them: those of the edge the format of events and the
log, those of converse the tool calls of a turn, and those of models with a chat template its effect on a conversation.
"""

IDLE_PARTS: list[tuple[str, Json]] = [("text", {"verbosity": "medium"}), ("reasoning", {"context": "auto"})]
"""Parts of implemented parameters that are at most echoed, as their rows say."""

CASES = [(name, value) for name, values in PROBES.items() for value in values]

CONTEXT_LENGTH = 4096
FULL = [{"role": "user", "content": "la " * 3900}, {"role": "user", "content": "Hi"}]
"""An input that fits into the context, and leaves little room for an answer."""

BESIDE: dict[str, Json] = {
    "tool_choice": {"tools": [WEATHER]},
    "parallel_tool_calls": {"tools": [WEATHER]},
    "logprob_token_ids": {"include": ["message.output_text.logprobs"]},
    "truncation": {"input": FULL},
}
"""The fields that a request needs for a parameter to have an effect."""

PROMPTS = Prompts(None, {"brief": {1: Template("brief", 1, CreateResponse(instructions="Be brief."))}})

EARLIER = stored_response("resp_0", Message("msg_0i0000", "completed", "user", (InputText("Hello"),)))


@asynccontextmanager
async def remembering() -> AsyncGenerator[Store]:
    with TemporaryDirectory() as folder:
        store = Store(SqliteDatabase(Path(folder) / "responses.sqlite3"))
        await store.open()
        store.begin(EARLIER)
        await store.end(EARLIER, None)
        await store.conversations.create(StoredConversation("conv_1", 0, {}), "", EARLIER.items)
        yield store
        await store.close()


class Outcome(NamedTuple):
    """The effects of a request: its final response, and all effects other than the echoed parameters."""

    response: Response
    deeds: Json


async def outcome(**body: Json) -> Outcome:
    """Run the whole pipeline, with the same ids and output each time."""
    request = read_request(json.dumps({"input": "Hi", **body}).encode())
    engine = ScriptedEngine(script(), context_length=CONTEXT_LENGTH, models=("served", "lora"))
    async with remembering() as store:
        recall = Recall(store=store, models=engine.models, draw=lambda: "1", clock=lambda: 0.0)
        stage = Normalize(normalizing(recall).inner, PROMPTS)
        pipeline = harmony_pipeline(engine, store).replace("normalize", stage)
        async with pipeline.open(source_of([request])) as stream:
            events: list[Json] = [event async for event in stream]
        is_kept = await store.get("resp_1", "") is not None
    (prompt,) = engine.prompts
    # The engine reads the model, which selects the adapter, and the tokens, which contain the tools.
    read = {"response": prompt.facts.response.model, "tools": None, "origin": None}
    deeds = {
        "prompt": asdict(prompt) | {"facts": asdict(prompt.facts) | read},
        "events": [type(event) if hasattr(event, "response") else event for event in events],
        "kept": is_kept,
    }
    return Outcome(events[-1].response, deeds)


def test_table_has_every_parameter_once() -> None:
    sdk = get_type_hints(ResponseCreateParamsStreaming) | get_type_hints(ResponseCreateParamsNonStreaming)
    names = [name for name, _ in promises()]
    assert sorted(names) == sorted(sdk.keys() | CreateResponse.model_fields.keys())


def test_table_has_every_parameter_of_vllm() -> None:
    """A parameter that is not in the table would be accepted and have no effect."""
    vllm = find_spec("vllm")
    assert vllm is not None
    assert vllm.origin is not None
    source = Path(vllm.origin).with_name("entrypoints") / "openai" / "responses" / "protocol.py"
    (fields,) = (
        {each.target.id for each in node.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)}
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "ResponsesRequest"
    )
    assert {"logit_bias", "vllm_xargs"} < fields
    assert {name for name in fields if not name.startswith("_")} <= TABLE.keys()


def test_every_parameter_is_probed() -> None:
    assert PROBES.keys() | ELSEWHERE == TABLE.keys()
    assert set(TABLE.values()) == {"implemented", "echoed", "accepted", "refused"}


@pytest.mark.parametrize(("name", "value"), CASES, ids=str)
async def test_parameter_does_what_its_row_says(name: str, value: Json) -> None:
    beside = BESIDE.get(name, {})
    if TABLE[name] == "refused":
        with pytest.raises(UnsupportedParameter) as caught:
            await outcome(**{name: value})
        assert (caught.value.status, caught.value.param) == (400, name)
        return
    before, after = await outcome(**beside), await outcome(**beside, **{name: value})
    assert (after.deeds != before.deeds) is (TABLE[name] == "implemented")
    if TABLE[name] == "echoed":
        assert replace(before.response, **{name: value}) == after.response != before.response
    elif TABLE[name] == "accepted":
        assert after.response == before.response


@pytest.mark.parametrize(("name", "value"), [("chat_template", "{{ 1 }}"), ("chat_template_kwargs", {"x": 1})])
async def test_harmony_refuses_chat_templates(name: str, value: Json) -> None:
    """They would have no effect."""
    with pytest.raises(UnsupportedParameter) as caught:
        await outcome(**{name: value})
    assert (caught.value.status, caught.value.param) == (400, name)


STRUCTURED: dict[str, list[Json]] = {
    "structured_outputs": [{}, {"regex": "a", "choice": ["b"]}, {"json_object": False}],
    "structured_outputs.json": [{"json": "{"}, {"json": "5"}, {"json": {"type": "strange"}}],
    "structured_outputs.json_object": [{"json_object": "yes"}],
    "structured_outputs.regex": [{"regex": "("}, {"regex": "(?=a)"}],
    "structured_outputs.choice": [{"choice": []}],
    "structured_outputs.choice[1]": [{"choice": ["a", 5]}],
    "structured_outputs.grammar": [{"grammar": "start: nothing"}, {"grammar": "root ::= ("}, {"grammar": "<|end|>"}],
    "structured_outputs.structural_tag": [{"structural_tag": "{}"}],
    "structured_outputs.disable_additional_properties": [{"json": {}, "disable_additional_properties": True}],
}
"""Constraints that cannot be enforced, by the parameter that the error names."""


@pytest.mark.parametrize(("param", "value"), [(param, value) for param in STRUCTURED for value in STRUCTURED[param]])
async def test_unenforceable_structured_output_is_refused(param: str, value: Json) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await outcome(structured_outputs=value)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_answer_has_one_format() -> None:
    regex: Json = {"regex": "a+"}
    with pytest.raises(InvalidRequest) as caught:
        await outcome(structured_outputs=regex, text={"format": {"type": "json_object"}})
    assert caught.value.param == "structured_outputs"
    await outcome(structured_outputs=regex, text={"format": {"type": "text"}})


@pytest.mark.parametrize(("name", "part"), IDLE_PARTS, ids=str)
async def test_values_excluded_by_a_row_have_no_effect(name: str, part: Json) -> None:
    assert (await outcome(**{name: part})).deeds == (await outcome()).deeds


@pytest.mark.parametrize("name", [name for name, promise in TABLE.items() if promise == "refused"])
async def test_refused_parameter_may_be_null(name: str) -> None:
    """Clients write null for what they do not use."""
    assert await outcome(**{name: None}) == await outcome()


@pytest.mark.parametrize("name", PROBES)
async def test_wrong_type_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await outcome(**{name: [[5]]})
    assert (caught.value.param or "").startswith(name)


def test_parameters_that_differ_from_vllm_are_in_the_table() -> None:
    section = (ROOT / "docs" / "FROM_VLLM.md").read_text().split("## Requests")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)) <= TABLE.keys()
