from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from penstock.pipeline.frames import Sampling, Scheduling
from penstock.pipeline.logs import current_response
from penstock.pipeline.plugins import guarded
from penstock.pipeline.protocol.history import History
from penstock.pipeline.protocol.params.request import LOGPROBS, Envelope
from penstock.pipeline.protocol.params.validation import read_request
from penstock.pipeline.protocol.response import ReasoningOptions, Response
from penstock.services.store.database import NullDatabase
from penstock.services.store.store import Store
from penstock.stages.normalize.frames import ModelTraits, RecalledRequest
from penstock.stages.normalize.normalize import normalizing
from penstock.stages.normalize.parameters import INCLUDABLE
from penstock.stages.normalize.recall import Recall, always, draw_suffix
from penstock.stages.normalize.resolve import CacheSharing
from penstock.stages.responses import recorded_responses
from tests.support.event_streams import run_pipeline
from tests.support.request_bodies import WEATHER
from tests.support.requests import MODEL, NOW, normalize, user_message

# Ids and time


async def test_id_and_time_are_drawn_once(store: Store) -> None:
    draws, times = iter(["ab"]), iter([86_399.9])
    stage = normalizing(Recall(store=store, models=(MODEL,), draw=lambda: next(draws), clock=lambda: next(times)))
    async with aclosing(stage(source_of([read_request(b'{"input": "Hi"}')]))) as conversations:
        resolved = await anext(conversations)
    assert (resolved.facts.response.id, resolved.facts.response.created_at) == ("resp_ab", 86_399)
    assert resolved.facts.date == "1970-01-01"
    assert [item.id for item in resolved.facts.input] == ["msg_abi0000"]


async def test_refused_request_draws_nothing(store: Store) -> None:
    empty: Iterator[Any] = iter(())
    stage = normalizing(Recall(store=store, models=(MODEL,), draw=lambda: next(empty), clock=lambda: next(empty)))
    with pytest.raises(UnsupportedParameter):
        await anext(stage(source_of([read_request(b'{"input": "Hi", "prompt": {"id": "x"}}')])))


def test_ids_are_hard_to_guess() -> None:
    """They have 128 random bits, because knowing one may allow reading the response."""
    drawn = {draw_suffix() for _ in range(100)}
    assert {len(suffix) for suffix in drawn} == {32}
    assert len(drawn) == 100


# The response

FORMAT = {"type": "json_schema", "x-own": [None], "schema": {"z": 1, "a": {}}, "strict": False, "name": "answer"}


def default_response(**fields: Any) -> Response:
    sent: dict[str, Any] = {
        "model": MODEL,
        "previous_response_id": None,
        "instructions": None,
        "tools": (),
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "text": {"format": {"type": "text"}},
        "top_p": 1.0,
        "temperature": 1.0,
        "reasoning": ReasoningOptions(None, None),
        "max_output_tokens": None,
        "store": True,
        "metadata": {},
        "safety_identifier": None,
        "prompt_cache_key": None,
        "status": "in_progress",
    }
    return Response(id="resp_1", created_at=int(NOW), **(sent | fields))


async def test_empty_request_has_documented_defaults(store: Store) -> None:
    resolved = await normalize(store, input="Hi")
    assert resolved.facts.response == default_response()
    assert resolved.facts.sampling == Sampling(1.0, 1.0, None)
    assert resolved.history == ()
    assert resolved.facts.date == "2026-09-21"


@pytest.mark.parametrize(
    ("sent", "echo"),
    [
        ({"model": MODEL}, {}),
        ({"instructions": "Be brief."}, {"instructions": "Be brief."}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": "auto"}, {}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"temperature": 0}, {"temperature": 0.0}),
        ({"top_p": 0.5}, {"top_p": 0.5}),
        ({"max_output_tokens": 16}, {"max_output_tokens": 16}),
        ({"max_tool_calls": 3}, {"max_tool_calls": 3}),
        ({"reasoning": {"effort": "high"}}, {"reasoning": ReasoningOptions("high", None)}),
        ({"reasoning": {"summary": "auto"}}, {"reasoning": ReasoningOptions(None, "auto")}),
        ({"text": {"verbosity": "low"}}, {"text": {"format": {"type": "text"}, "verbosity": "low"}}),
        ({"text": {"format": {"type": "text"}}}, {}),
        ({"text": {"format": None, "verbosity": None}}, {}),
        ({"text": {"format": FORMAT, "verbosity": "high"}}, {"text": {"format": FORMAT, "verbosity": "high"}}),
        ({"text": {"format": {"type": "json_object"}}}, {"text": {"format": {"type": "json_object"}}}),
        ({"reasoning": {"generate_summary": "concise"}}, {"reasoning": ReasoningOptions(None, "concise")}),
        (
            {"reasoning": {"context": "all_turns", "mode": "standard"}},
            {"reasoning": ReasoningOptions(None, None, "all_turns")},
        ),
        ({"truncation": "auto"}, {"truncation": "auto"}),
        ({"top_logprobs": 3}, {"top_logprobs": 3}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        *[({"service_tier": tier}, {}) for tier in ("auto", "flex", "priority", "fast")],
        ({"user": "u1"}, {"user": "u1"}),
        ({"store": False}, {"store": False}),
        ({"metadata": {"order": "17"}}, {"metadata": {"order": "17"}}),
        ({"safety_identifier": "u1"}, {"safety_identifier": "u1"}),
        ({"prompt_cache_key": "k1"}, {"prompt_cache_key": "k1"}),
        ({"tools": [WEATHER]}, {"tools": (WEATHER,)}),
        (
            {"tools": [{"type": "function", "name": "f", "defer_loading": False}]},
            {"tools": ({"type": "function", "name": "f", "description": None, "parameters": None, "strict": None},)},
        ),
        (
            {"tools": [WEATHER | {"output_schema": {"type": "number"}, "async": True}]},
            {"tools": (WEATHER | {"output_schema": {"type": "number"}, "async": True},)},
        ),
        ({"background": True}, {"background": True, "status": "queued"}),
        ({"background": False, "truncation": "disabled", "top_logprobs": 0, "context_management": []}, {}),
        ({"include": sorted(INCLUDABLE), "stream": True, "stream_options": {"include_obfuscation": False}}, {}),
        ({"prompt_cache_retention": "24h"}, {"prompt_cache_retention": "24h"}),
        ({"prompt_cache_retention": None, "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, {}),
    ],
    ids=str,
)
async def test_parameters_are_echoed(store: Store, sent: dict[str, Any], echo: dict[str, Any]) -> None:
    resolved = await normalize(store, input="Hi", **sent)
    assert resolved.facts.response == default_response(**echo)
    assert json.dumps(resolved.facts.response.text) == json.dumps(
        default_response(**echo).text
    )  # in the client's order


@pytest.mark.parametrize(
    ("sent", "sampling"),
    [
        ({}, {}),
        (
            {"temperature": 0, "top_p": 0.5, "max_output_tokens": 16},
            {"temperature": 0.0, "top_p": 0.5, "max_tokens": 16},
        ),
        ({"top_k": 5, "min_p": 0.1, "seed": 7}, {"top_k": 5, "min_p": 0.1, "seed": 7}),
        ({"top_k": -1}, {}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": []}, {}),
        ({"top_logprobs": 0}, {}),
        ({"top_logprobs": 2}, {"logprobs": 2}),
        ({"include": [LOGPROBS]}, {"logprobs": 0}),
        ({"include": [LOGPROBS], "top_logprobs": 2}, {"logprobs": 2}),
        ({"stop_token_ids": [5], "min_tokens": 3}, {"stop_token_ids": (5,), "min_tokens": 3}),
        ({"bad_words": ["a"], "logit_bias": {"7": -100}}, {"bad_words": ("a",), "logit_bias": {7: -100.0}}),
        ({"allowed_token_ids": [5, 6], "watermarking": False}, {"allowed_token_ids": (5, 6), "watermarking": False}),
        (
            {"logprob_token_ids": [6, 5], "include": [LOGPROBS]},
            {"logprob_token_ids": (6, 5), "logprobs": 0},
        ),
        ({"logprob_token_ids": [6, 5], "top_logprobs": 2}, {"logprob_token_ids": (6, 5), "logprobs": 2}),
        ({"vllm_xargs": {"target": [1, "x"]}}, {"extra_args": {"target": [1, "x"]}}),
        ({"thinking_token_budget": 0}, {"thinking_token_budget": 0}),
        ({"thinking_token_budget": -1}, {}),
        ({"stop_token_ids": [], "min_tokens": 0, "bad_words": [], "logit_bias": {}, "vllm_xargs": {}}, {}),
        ({"ignore_eos": True}, {"ignore_eos": True}),
        ({"ignore_eos": False, "skip_special_tokens": True, "include_stop_str_in_output": False}, {}),
    ],
    ids=str,
)
async def test_sampling_parameters_reach_the_engine(
    store: Store, sent: dict[str, Any], sampling: dict[str, Any]
) -> None:
    expected: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0} | sampling
    assert (await normalize(store, input="Hi", **sent)).facts.sampling == Sampling(**expected)


async def test_generation_config_sets_defaults(store: Store) -> None:
    traits = ModelTraits(sampling={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.5})
    stage = normalizing(Recall(store=store, models=(MODEL,), traits_of=always(traits)))
    request = read_request(json.dumps({"input": "Hi", "top_k": 0}).encode())
    async with aclosing(stage(source_of([request]))) as conversations:
        resolved = await anext(conversations)
    assert resolved.facts.sampling == Sampling(0.6, 1.0, top_k=0, repetition_penalty=1.5)
    assert (resolved.facts.response.temperature, resolved.facts.response.top_p) == (0.6, 1.0)


@pytest.mark.parametrize(
    ("sent", "limit"), [({}, 100), ({"max_output_tokens": 50}, 50), ({"max_output_tokens": 500}, 100)]
)
async def test_generation_config_bounds_the_output(store: Store, sent: dict[str, Any], limit: int) -> None:
    stage = normalizing(
        Recall(store=store, models=(MODEL,), traits_of=always(ModelTraits(sampling={"max_tokens": 100})))
    )
    request = read_request(json.dumps({"input": "Hi", **sent}).encode())
    async with aclosing(stage(source_of([request]))) as conversations:
        facts = (await anext(conversations)).facts
    assert (facts.sampling.max_tokens, facts.response.max_output_tokens) == (limit, sent.get("max_output_tokens"))


@pytest.mark.parametrize(
    ("salted", "sent", "salt"),
    [
        (False, {"prompt_cache_key": "k1"}, None),
        (True, {"prompt_cache_key": "k1"}, "k1"),
        (True, {"prompt_cache_key": "team/k@1"}, "team%2Fk%401"),
        (True, {"prompt_cache_key": "k1", "cache_salt": "s"}, "s"),
        (True, {}, None),
        (True, {"prompt_cache_key": ""}, None),
        (False, {"cache_salt": "s"}, "s"),
    ],
)
async def test_cache_salt_is_set(store: Store, salted: bool, sent: dict[str, Any], salt: str | None) -> None:
    """The salt of the request is used; otherwise the server may derive one from the prompt cache key."""
    stage = normalizing(Recall(store=store, models=(MODEL,)), caches=CacheSharing(by_prompt_cache_key=salted))
    request = read_request(json.dumps({"input": "Hi", **sent}).encode())
    async with aclosing(stage(source_of([request]))) as conversations:
        assert (await anext(conversations)).facts.scheduling == Scheduling(salt)


async def salt_of(owner: str, sent: dict[str, Any], *sharing: bool) -> str | None:
    request = read_request(json.dumps({"input": "Hi", **sent}).encode(), Envelope(owner=owner))
    stage = normalizing(Recall(store=Store(NullDatabase()), models=(MODEL,)), caches=CacheSharing(*sharing))
    async with aclosing(stage(source_of([request]))) as conversations:
        return (await anext(conversations)).facts.scheduling.cache_salt


@pytest.mark.parametrize("sent", [{}, {"cache_salt": "s"}, {"prompt_cache_key": "k"}])
@pytest.mark.parametrize("salted", [False, True])
async def test_prefix_cache_is_not_shared_between_keys(sent: dict[str, Any], salted: bool) -> None:
    """A client may send any salt, also that of another key."""
    alice, bob = [await salt_of(owner, sent, False, salted) for owner in ("alice", "bob")]
    assert alice == await salt_of("alice", sent, False, salted)
    assert alice is not None
    assert "alice" not in alice
    assert await salt_of("bob", {"cache_salt": alice}, False, salted) not in (alice, bob)
    assert len({alice, bob, await salt_of("", sent, False, salted)}) == 3


async def test_requests_of_one_key_keep_their_own_salts() -> None:
    sent: list[dict[str, Any]] = [{}, {"cache_salt": "s"}, {"cache_salt": "t"}, {"prompt_cache_key": "k"}]
    assert len({await salt_of("alice", each, False, True) for each in sent}) == 4
    assert len({await salt_of("alice", each) for each in sent}) == 3


@pytest.mark.parametrize("sent", [{}, {"cache_salt": "s"}])
async def test_keys_share_the_prefix_cache_if_the_operator_wants_it(sent: dict[str, Any]) -> None:
    assert await salt_of("alice", sent, True) == sent.get("cache_salt")


async def test_trace_and_priority_reach_the_engine(store: Store) -> None:
    request = read_request(b'{"input": "Hi", "priority": -3}', Envelope(trace_headers={"traceparent": "00-1"}))
    async with aclosing(normalizing(Recall(store=store, models=(MODEL,)))(source_of([request]))) as conversations:
        assert (await anext(conversations)).facts.scheduling == Scheduling(None, -3, {"traceparent": "00-1"})


@pytest.mark.defect("36")
async def test_store_is_echoed(store: Store) -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        *(({"store": sent}, sent is not False) for sent in (None, True, False)),
    ]
    for sent, kept in cases:
        assert (await normalize(store, input="Hi", **sent)).facts.response.store is kept


async def test_raw_messages_are_optional(store: Store) -> None:
    assert not (await normalize(store, input="Hi")).facts.wants_raw_messages
    assert (await normalize(store, input="Hi", enable_response_messages=True)).facts.wants_raw_messages


async def test_log_lines_have_the_response_id(store: Store) -> None:
    assert current_response.get() == "-"
    await normalize(store, "ab", input="Hi")
    assert current_response.get() == "resp_ab"


async def test_other_tasks_run_while_a_long_request_is_resolved() -> None:
    request = read_request(json.dumps({"input": [{"role": "user", "content": "Hi"}] * 5_000}).encode())
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    async with aclosing(
        normalizing(Recall(store=Store(NullDatabase()), models=(MODEL,)))(source_of([request]))
    ) as requests:
        await anext(requests)
    counting.cancel()
    assert turns > 4


@pytest.mark.parametrize(
    ("param", "sent"),
    [
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("moderation", {"moderation": {"model": "omni-moderation-latest"}}),
        ("access_programs", {"access_programs": {"cyber": "standard"}}),
        ("multi_agent", {"multi_agent": {"enabled": True}}),
        ("image", {"image": {"context_compression": "auto"}}),
        ("prompt_cache_options.prewarm", {"prompt_cache_options": {"prewarm": True}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
        ("skip_special_tokens", {"skip_special_tokens": False}),
        ("spaces_between_special_tokens", {"spaces_between_special_tokens": False}),
        ("include_stop_str_in_output", {"include_stop_str_in_output": True}),
        ("kv_transfer_params", {"kv_transfer_params": {}}),
    ],
    ids=str,
)
async def test_unsupported_parameter_is_refused(store: Store, param: str, sent: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        await normalize(store, input="Hi", **sent)
    assert (caught.value.param, caught.value.status) == (param, 400)


async def test_unknown_include_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="'everything'") as caught:
        await normalize(store, input="Hi", include=["reasoning.encrypted_content", "everything"])
    assert caught.value.param == "include[1]"


async def test_unknown_model_is_not_found(store: Store) -> None:
    with pytest.raises(ModelNotFound, match=MODEL) as caught:
        await normalize(store, input="Hi", model="gpt-5")
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("count", "names"), [(5, "'m0', 'm1', 'm2', 'm3', 'm4', not"), (6, "'m0', 'm1', 'm2', 'm3', 'm4' and 1 more, not")]
)
async def test_error_names_a_few_of_many_models(store: Store, count: int, names: str) -> None:
    """Recordings may be thousands of models: five are named, the others counted."""
    normalize = normalizing(Recall(store=store, models=tuple(f"m{number}" for number in range(count))))
    with pytest.raises(ModelNotFound, match=f"^This server serves {names} 'gpt-5'"):
        await anext(normalize(source_of([read_request(b'{"model": "gpt-5", "input": "Hi"}')])))


@pytest.mark.parametrize(
    ("param", "both"),
    [
        ("previous_input_messages", {"previous_response_id": "resp_1", "previous_input_messages": []}),
        ("previous_input_messages", {"conversation": "conv_1", "previous_input_messages": []}),
        ("conversation", {"conversation": {"id": "conv_1"}, "previous_response_id": "resp_1"}),
    ],
    ids=str,
)
async def test_request_continues_one_thing(store: Store, param: str, both: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exclude") as caught:
        await normalize(store, input="Hi", **both)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_background_response_must_be_stored(store: Store) -> None:
    """Otherwise it could not be fetched."""
    with pytest.raises(InvalidRequest, match="Background responses are stored") as caught:
        await normalize(store, input="Hi", background=True, store=False)
    assert (caught.value.status, caught.value.param) == (400, "background")


@pytest.mark.parametrize(
    "sent",
    [
        {"model": "x" * 10**5},
        {"previous_response_id": "x" * 10**5},
        {"include": ["x" * 10**5]},
        {"tools": [{"type": "x" * 10**5}]},
    ],
    ids=lambda sent: next(iter(sent)),
)
async def test_refusal_quotes_little(store: Store, sent: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"'x{100}[.]{3}'") as caught:
        await normalize(store, input="Hi", **sent)
    assert len(caught.value.message) < 400


async def test_stage_of_an_operator_may_stand_between_the_inner_ones() -> None:
    async def remind(source: AsyncIterator[RecalledRequest]) -> AsyncGenerator[RecalledRequest, None]:
        async for request in source:
            yield replace(request, past=History((user_message("msg_0", "Be brief."),)))

    pipeline: Pipeline[Any, Any] = recorded_responses()
    edited = guarded(pipeline.insert_after("recall", "remind", remind), pipeline)
    request = read_request(b'{"model": "recorded", "input": "Hi"}')
    [resolved] = await run_pipeline(edited.through("normalize"), [request])
    assert [item.text for item in resolved.items] == ["Be brief.", "Hi"]
