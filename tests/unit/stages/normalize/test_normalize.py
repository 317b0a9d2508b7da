from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from pipeline.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from pipeline.frames import Sampling, Scheduling
from pipeline.logs import current_response
from pipeline.protocol.reading import read_request
from pipeline.protocol.response import ReasoningOptions, Response
from pipeline.record import replay
from stages.normalize.normalize import INCLUDABLE, LOGPROBS, Normalize, draw_suffix
from stages.persist.store import Store
from tests.support.normalized_requests import MODEL, NOW, normalized
from tests.support.request_bodies import WEATHER

# Ids and time


async def test_the_id_and_the_time_are_drawn_once(store: Store) -> None:
    """One draw and one look at the clock make everything that is new in a response."""
    draws, times = iter(["ab"]), iter([86_399.9])
    stage = Normalize(store, (MODEL,), draw=lambda: next(draws), clock=lambda: next(times))
    async with aclosing(stage(replay([await read_request(b'{"input": "Hi"}')]))) as conversations:
        conversation = await anext(conversations)
    assert (conversation.response.id, conversation.response.created_at) == ("resp_ab", 86_399)
    assert conversation.date == "1970-01-01"
    assert [item.id for item in conversation.input] == ["msg_abi0000"]


async def test_a_refused_request_draws_nothing(store: Store) -> None:
    """What is refused for its parameters leaves ids and clock alone."""
    empty: Iterator[Any] = iter(())
    stage = Normalize(store, (MODEL,), draw=lambda: next(empty), clock=lambda: next(empty))
    with pytest.raises(UnsupportedParameter):
        await anext(stage(replay([await read_request(b'{"input": "Hi", "prompt": {}}')])))


def test_ids_are_hard_to_guess() -> None:
    """Ids are drawn from 128 bits, because whoever knows one may read the response."""
    drawn = {draw_suffix() for _ in range(100)}
    assert {len(suffix) for suffix in drawn} == {32}
    assert len(drawn) == 100


# The response

FORMAT = {"type": "json_schema", "x-own": [None], "schema": {"z": 1, "a": {}}, "strict": False, "name": "answer"}


def default_response(**fields: Any) -> Response:
    said: dict[str, Any] = {
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
    return Response(id="resp_1", created_at=int(NOW), **(said | fields))


async def test_defaults(store: Store) -> None:
    """A body that says nothing gets what the API documents."""
    conversation = await normalized(store, input="Hi")
    assert conversation.response == default_response()
    assert conversation.sampling == Sampling(1.0, 1.0, None)
    assert conversation.history == ()
    assert conversation.date == "2026-09-21"


@pytest.mark.parametrize(
    ("said", "echo"),
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
        ({"reasoning": {"context": "all_turns", "mode": "standard"}}, {}),
        ({"truncation": "auto"}, {"truncation": "auto"}),
        ({"top_logprobs": 3}, {"top_logprobs": 3}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"service_tier": "flex"}, {"service_tier": "flex"}),
        ({"service_tier": "auto"}, {}),
        ({"user": "u1"}, {"user": "u1"}),
        ({"store": False}, {"store": False}),
        ({"metadata": {"order": "17"}}, {"metadata": {"order": "17"}}),
        ({"safety_identifier": "u1"}, {"safety_identifier": "u1"}),
        ({"prompt_cache_key": "k1"}, {"prompt_cache_key": "k1"}),
        ({"tools": [WEATHER]}, {"tools": (WEATHER,)}),
        (
            {"tools": [{"type": "function", "name": "f", "defer_loading": True}]},
            {"tools": ({"type": "function", "name": "f", "description": None, "parameters": None, "strict": None},)},
        ),
        ({"background": True}, {"background": True, "status": "queued"}),
        ({"background": False, "truncation": "disabled", "top_logprobs": 0, "context_management": []}, {}),
        ({"include": sorted(INCLUDABLE), "stream": True, "stream_options": {"include_obfuscation": False}}, {}),
        ({"prompt_cache_retention": "24h", "prompt_cache_options": {"mode": "implicit", "ttl": "30m"}}, {}),
    ],
    ids=str,
)
async def test_what_is_asked_is_echoed(store: Store, said: dict[str, Any], echo: dict[str, Any]) -> None:
    """The response repeats every parameter that has a place in it, and changes no other field."""
    conversation = await normalized(store, input="Hi", **said)
    assert conversation.response == default_response(**echo)
    assert json.dumps(conversation.response.text) == json.dumps(default_response(**echo).text)  # in the client's order


@pytest.mark.parametrize(
    ("said", "sampling"),
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
    ],
    ids=str,
)
async def test_sampling_is_as_asked(store: Store, said: dict[str, Any], sampling: dict[str, Any]) -> None:
    """What concerns the choice of tokens reaches the engine in its own terms, vLLM's extras included."""
    expected: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0} | sampling
    assert (await normalized(store, input="Hi", **said)).sampling == Sampling(**expected)


async def test_what_the_makers_advise_counts_where_a_request_says_nothing(store: Store) -> None:
    """The response says what was taken."""
    stage = Normalize(store, (MODEL,), advised={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.5})
    request = await read_request(json.dumps({"input": "Hi", "top_k": 0}).encode())
    async with aclosing(stage(replay([request]))) as conversations:
        conversation = await anext(conversations)
    assert conversation.sampling == Sampling(0.6, 1.0, top_k=0, repetition_penalty=1.5)
    assert (conversation.response.temperature, conversation.response.top_p) == (0.6, 1.0)


@pytest.mark.parametrize(
    ("salted", "said", "salt"),
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
async def test_caches_are_salted(store: Store, salted: bool, said: dict[str, Any], salt: str | None) -> None:
    """A salt that is given counts; a server may make one of the prompt cache's key, in letters that vLLM takes."""
    stage = Normalize(store, (MODEL,), salt_caches=salted)
    request = await read_request(json.dumps({"input": "Hi", **said}).encode())
    async with aclosing(stage(replay([request]))) as conversations:
        assert (await anext(conversations)).scheduling == Scheduling(salt)


async def test_the_trace_and_the_priority_reach_the_engine(store: Store) -> None:
    """A request is scheduled as it asks, and belongs to the trace of its headers."""
    request = (await read_request(b'{"input": "Hi", "priority": -3}')).traced({"traceparent": "00-1"})
    async with aclosing(Normalize(store, (MODEL,))(replay([request]))) as conversations:
        assert (await anext(conversations)).scheduling == Scheduling(None, -3, {"traceparent": "00-1"})


@pytest.mark.defect("B29", "36")
async def test_a_response_says_whether_it_is_kept(store: Store) -> None:
    """``store`` is on unless it is switched off, and the response says which."""
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        *(({"store": said}, said is not False) for said in (None, True, False)),
    ]
    for said, kept in cases:
        assert (await normalized(store, input="Hi", **said)).response.store is kept


async def test_raw_messages_are_for_who_asks(store: Store) -> None:
    """``enable_response_messages`` is off until it is said."""
    assert not (await normalized(store, input="Hi")).raw_messages
    assert (await normalized(store, input="Hi", enable_response_messages=True)).raw_messages


async def test_lines_of_the_log_know_their_response(store: Store) -> None:
    """From where the id is drawn on, whatever this task logs belongs to the response."""
    assert current_response.get() == "-"
    await normalized(store, "ab", input="Hi")
    assert current_response.get() == "resp_ab"


@pytest.mark.parametrize(
    ("param", "said"),
    [
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("prompt", {"prompt": {}}),
        ("context_management", {"context_management": [{"type": "compaction"}]}),
        ("moderation", {"moderation": {"model": "omni-moderation-latest"}}),
        ("access_programs", {"access_programs": {"cyber": "standard"}}),
        ("image", {"image": {"context_compression": "auto"}}),
        ("prompt_cache_options.prewarm", {"prompt_cache_options": {"prewarm": True}}),
        ("reasoning.mode", {"reasoning": {"mode": "pro"}}),
    ],
    ids=str,
)
async def test_what_is_not_supported_is_refused(store: Store, param: str, said: dict[str, Any]) -> None:
    """A promise of the API that is not kept here is refused by name, never ignored."""
    with pytest.raises(UnsupportedParameter) as caught:
        await normalized(store, input="Hi", **said)
    assert (caught.value.param, caught.value.status) == (param, 400)


async def test_what_cannot_be_included_is_refused(store: Store) -> None:
    """``include`` takes the values that the API lists."""
    with pytest.raises(InvalidRequest, match="'everything'") as caught:
        await normalized(store, input="Hi", include=["reasoning.encrypted_content", "everything"])
    assert caught.value.param == "include[1]"


async def test_another_model_is_not_found(store: Store) -> None:
    """A server of one model knows no other, and says which one it has."""
    with pytest.raises(ModelNotFound, match=MODEL) as caught:
        await normalized(store, input="Hi", model="gpt-5")
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


@pytest.mark.parametrize(
    ("count", "told"),
    [(5, "'m0', 'm1', 'm2', 'm3', 'm4', not"), (6, "'m0', 'm1', 'm2', 'm3', 'm4' and 1 more, not")],
)
async def test_of_many_models_a_few_are_named(store: Store, count: int, told: str) -> None:
    """Recordings are models, too, and may be thousands: who asks for another one hears how many there are."""
    normalize = Normalize(store, tuple(f"m{number}" for number in range(count)))
    with pytest.raises(ModelNotFound, match=f"^This server serves {told} 'gpt-5'"):
        await anext(normalize(replay([await read_request(b'{"model": "gpt-5", "input": "Hi"}')])))


@pytest.mark.parametrize(
    ("param", "both"),
    [
        ("previous_input_messages", {"previous_response_id": "resp_1", "previous_input_messages": []}),
        ("previous_input_messages", {"conversation": "conv_1", "previous_input_messages": []}),
        ("conversation", {"conversation": {"id": "conv_1"}, "previous_response_id": "resp_1"}),
    ],
    ids=str,
)
async def test_a_request_continues_one_thing(store: Store, param: str, both: dict[str, Any]) -> None:
    """It goes on from a response, a conversation or messages of its own: whoever names two is told so."""
    with pytest.raises(InvalidRequest, match="exclude") as caught:
        await normalized(store, input="Hi", **both)
    assert (caught.value.status, caught.value.param) == (400, param)


async def test_what_runs_in_the_background_is_stored(store: Store) -> None:
    """Nobody could fetch it otherwise: ``store`` may not be false."""
    with pytest.raises(InvalidRequest, match="Background responses are stored") as caught:
        await normalized(store, input="Hi", background=True, store=False)
    assert (caught.value.status, caught.value.param) == (400, "background")


@pytest.mark.parametrize(
    "said",
    [
        {"model": "x" * 10**5},
        {"previous_response_id": "x" * 10**5},
        {"include": ["x" * 10**5]},
        {"tools": [{"type": "x" * 10**5}]},
    ],
    ids=lambda said: next(iter(said)),
)
async def test_a_refusal_quotes_little(store: Store, said: dict[str, Any]) -> None:
    """What a client sent comes back to it only up to a hundred characters."""
    with pytest.raises(InvalidRequest, match=r"'x{100}[.]{3}'") as caught:
        await normalized(store, input="Hi", **said)
    assert len(caught.value.message) < 300
