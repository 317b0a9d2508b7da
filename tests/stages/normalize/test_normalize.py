from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import aclosing
from typing import Any

import pytest

from pipeline.errors import InvalidRequest, ModelNotFound, UnsupportedParameter
from pipeline.frames import Sampling
from pipeline.protocol.reading import read_request
from pipeline.protocol.response import ReasoningOptions, Response
from pipeline.record import replay
from stages.normalize.normalize import INCLUDABLE, Normalize, draw_suffix
from stages.persist.sqlite import SqliteStore
from tests.pipeline.bodies import WEATHER
from tests.stages.normalize.conversations import MODEL, NOW, normalized

# Ids and time


async def test_the_id_and_the_time_are_drawn_once(store: SqliteStore) -> None:
    """One draw and one look at the clock make everything that is new in a response."""
    draws, times = iter(["ab"]), iter([86_399.9])
    stage = Normalize(store, (MODEL,), draw=lambda: next(draws), clock=lambda: next(times))
    async with aclosing(stage(replay([await read_request(b'{"input": "Hi"}')]))) as conversations:
        conversation = await anext(conversations)
    assert (conversation.response.id, conversation.response.created_at) == ("resp_ab", 86_399)
    assert conversation.date == "1970-01-01"
    assert [item.id for item in conversation.input] == ["msg_abi0000"]


async def test_a_refused_request_draws_nothing(store: SqliteStore) -> None:
    """What is refused for its parameters leaves ids and clock alone."""
    empty: Iterator[Any] = iter(())
    stage = Normalize(store, (MODEL,), draw=lambda: next(empty), clock=lambda: next(empty))
    with pytest.raises(UnsupportedParameter):
        await anext(stage(replay([await read_request(b'{"input": "Hi", "background": true}')])))


def test_ids_are_hard_to_guess() -> None:
    """Ids are drawn from 128 bits, because whoever knows one may read the response."""
    drawn = {draw_suffix() for _ in range(100)}
    assert {len(suffix) for suffix in drawn} == {32}
    assert len(drawn) == 100


# The response


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
    }
    return Response(id="resp_1", created_at=int(NOW), status="in_progress", **(said | fields))


async def test_defaults(store: SqliteStore) -> None:
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
        ({"store": False}, {"store": False}),
        ({"metadata": {"order": "17"}}, {"metadata": {"order": "17"}}),
        ({"safety_identifier": "u1"}, {"safety_identifier": "u1"}),
        ({"prompt_cache_key": "k1"}, {"prompt_cache_key": "k1"}),
        ({"tools": [WEATHER]}, {"tools": (WEATHER,)}),
        (
            {"tools": [{"type": "function", "name": "f", "defer_loading": True}]},
            {"tools": ({"type": "function", "name": "f", "description": None, "parameters": None, "strict": None},)},
        ),
        ({"background": False, "truncation": "disabled", "top_logprobs": 0, "context_management": []}, {}),
        ({"include": sorted(INCLUDABLE), "user": "u1", "service_tier": "flex", "stream": True}, {}),
    ],
    ids=str,
)
async def test_what_is_asked_is_echoed(store: SqliteStore, said: dict[str, Any], echo: dict[str, Any]) -> None:
    """The response repeats every parameter that has a place in it, and changes no other field."""
    conversation = await normalized(store, input="Hi", **said)
    response = default_response(**echo)
    assert conversation.response == response
    assert conversation.sampling == Sampling(response.temperature, response.top_p, response.max_output_tokens)


@pytest.mark.parametrize(
    "kind",
    ["web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "computer_use_preview"],
)
async def test_hosted_tools_are_left_out_with_a_word(
    store: SqliteStore, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Clients send hosted tools unasked: those that nobody runs here are left out, and the log says so."""
    with caplog.at_level(logging.INFO):
        conversation = await normalized(store, input="Hi", tools=[{"type": kind, "x": 1}, WEATHER])
    assert conversation.response.tools == (WEATHER,)
    (record,) = caplog.records
    assert kind in record.getMessage()


@pytest.mark.parametrize("kind", ["mcp", "custom", "namespace", "local_shell", "tool_search", "unheard_of"])
async def test_tools_that_the_client_relies_on_are_refused(store: SqliteStore, kind: str) -> None:
    """A tool that the client would run or configure itself cannot be left out in silence."""
    with pytest.raises(UnsupportedParameter, match=kind) as caught:
        await normalized(store, input="Hi", tools=[WEATHER, {"type": kind, "name": "x"}])
    assert caught.value.param == "tools[1].type"


@pytest.mark.parametrize(
    ("param", "said"),
    [
        ("background", {"background": True}),
        ("conversation", {"conversation": "conv_1"}),
        ("conversation", {"conversation": {"id": "conv_1"}}),
        ("conversation", {"conversation": {}}),
        ("prompt", {"prompt": {"id": "pmpt_1"}}),
        ("prompt", {"prompt": {}}),
        ("context_management", {"context_management": [{"type": "compaction"}]}),
        ("truncation", {"truncation": "auto"}),
        ("top_logprobs", {"top_logprobs": 1}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": {"type": "function", "name": "f"}}),
        ("tool_choice", {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}),
        ("tool_choice", {"tool_choice": {}}),
        ("text.format", {"text": {"format": {"type": "json_object"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {}}}}),
    ],
    ids=str,
)
async def test_what_is_not_supported_is_refused(store: SqliteStore, param: str, said: dict[str, Any]) -> None:
    """A promise of the API that is not kept here is refused by name, never ignored."""
    with pytest.raises(UnsupportedParameter) as caught:
        await normalized(store, input="Hi", **said)
    assert (caught.value.param, caught.value.status) == (param, 400)


async def test_what_cannot_be_included_is_refused(store: SqliteStore) -> None:
    """``include`` takes the values that the API lists."""
    with pytest.raises(InvalidRequest, match="'everything'") as caught:
        await normalized(store, input="Hi", include=["reasoning.encrypted_content", "everything"])
    assert caught.value.param == "include[1]"


async def test_another_model_is_not_found(store: SqliteStore) -> None:
    """A server of one model knows no other, and says which one it has."""
    with pytest.raises(ModelNotFound, match=MODEL) as caught:
        await normalized(store, input="Hi", model="gpt-5")
    assert (caught.value.status, caught.value.param, caught.value.code) == (404, "model", "model_not_found")


async def test_two_functions_of_one_name_are_refused(store: SqliteStore) -> None:
    """A call could mean either of them; the second one is named."""
    with pytest.raises(InvalidRequest, match="'get_weather'") as caught:
        await normalized(store, input="Hi", tools=[WEATHER, {"type": "web_search"}, WEATHER])
    assert (caught.value.status, caught.value.param) == (400, "tools[2].name")


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
async def test_a_refusal_quotes_little(store: SqliteStore, said: dict[str, Any]) -> None:
    """What a client sent comes back to it only up to a hundred characters."""
    with pytest.raises(InvalidRequest, match=r"'x{100}[.]{3}'") as caught:
        await normalized(store, input="Hi", **said)
    assert len(caught.value.message) < 300
