"""Completions: bodies become raw prompts, and the chunks of a stream add up to the answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.http.wire import Reading
from penstock.pipeline.core import Pipeline, source_of
from penstock.pipeline.errors import InvalidRequest
from penstock.pipeline.frames import GenerationFinished, TokenChunk, TokenFrame, TokenLogprob
from penstock.pipeline.protocol.events import DONE, ResponseEvent
from penstock.pipeline.protocol.raw_prompt import RawPrompt
from penstock.stages.emit.emit import Emit
from penstock.stages.models.harmony.vocabulary import END, load_encoding
from penstock.stages.parse.harmony.parse import ParseHarmony
from penstock.testing import check_dialect
from tests.support.chat_streams import chunks_of
from tests.support.completion_streams import COMPLETIONS, heard
from tests.support.frames import raw_started

BODIES: list[dict[str, Any]] = [
    {"prompt": "Hi"},
    {"prompt": [1, 2], "stream": True},
    {"prompt": [[1], [2]], "n": 2, "stream": True, "stream_options": {"include_usage": True}},
    {"prompt": ["Hi", "Ho"], "echo": True, "logprobs": 5, "max_tokens": 0},
]


def read(**body: Any) -> Reading:
    return COMPLETIONS.read(json.dumps(body).encode())


def refused(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as error:
        read(**{"prompt": "Hi", **fields})
    return error.value


async def test_it_keeps_all_rules() -> None:
    await check_dialect(COMPLETIONS, [json.dumps(body).encode() for body in BODIES], heard)


# Requests


@pytest.mark.parametrize(
    ("prompt", "raw"),
    [
        ("Hi", [RawPrompt("Hi")]),
        (["Hi", "Ho"], [RawPrompt("Hi"), RawPrompt("Ho")]),
        ([1, 2], [RawPrompt(token_ids=(1, 2))]),
        ([[1, 2], [3]], [RawPrompt(token_ids=(1, 2)), RawPrompt(token_ids=(3,))]),
    ],
)
def test_each_prompt_has_its_choices(prompt: Any, raw: list[RawPrompt]) -> None:
    reading = read(prompt=prompt, n=2, seed=7)
    requests = [reading.request, *reading.others]
    assert [request.raw_prompt for request in requests] == [each for each in raw for _ in range(2)]
    assert [request.seed for request in requests] == [7, 8] * len(raw)
    assert {request.store for request in requests} == {False}


@pytest.mark.parametrize(("fields", "limit"), [({}, 16), ({"max_tokens": None}, 16), ({"max_tokens": 1}, 1)])
def test_answers_have_sixteen_tokens_by_default(fields: dict[str, Any], limit: int) -> None:
    assert read(prompt="Hi", **fields).request.max_output_tokens == limit


def test_prompt_alone_takes_one_token_of_the_engine() -> None:
    request = read(prompt="Hi", echo=True, max_tokens=0, skip_special_tokens=False, add_special_tokens=False).request
    assert request.max_output_tokens == 1
    assert request.raw_prompt == RawPrompt("Hi", adds_special=False, shows_special=True, echoes=True, generates=False)


def test_parameters_keep_their_meaning() -> None:
    given = {"temperature": 0.5, "top_k": 4, "stop": ["a"], "stop_token_ids": [3], "ignore_eos": True, "min_p": 0.1}
    request = read(prompt="Hi", logprobs=0, **given).request
    assert {name: getattr(request, name) for name in given} == given
    assert (request.top_logprobs, request.include) == (0, ["message.output_text.logprobs"])


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"prompt": ""}, "prompt", "empty_string"),
        ({"prompt": []}, "prompt", "empty_array"),
        ({"prompt": [[]]}, "prompt[0]", "empty_array"),
        ({"prompt": ["a", 1]}, "prompt[1]", "invalid_type"),
        ({"prompt": [1, "a"]}, "prompt[1]", "invalid_type"),
        ({"prompt": [[1], 2]}, "prompt[1]", "invalid_type"),
        ({"prompt": [-1]}, "prompt[0]", "integer_below_min_value"),
        ({"prompt": {}}, "prompt", "invalid_type"),
        ({"prompt": None}, "prompt", "invalid_type"),
        ({"prompt": ["a"] * 1025}, "prompt", "array_above_max_length"),
        ({"prompt": ["a"] * 100, "n": 11}, "n", "integer_above_max_value"),
        ({"n": 0}, "n", "integer_below_min_value"),
        ({"logprobs": 6}, "logprobs", "integer_above_max_value"),
        ({"logprobs": True}, "logprobs", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"best_of": 2}, "best_of", "unsupported_parameter"),
        ({"store": True}, "store", "unsupported_parameter"),
        ({"use_beam_search": True}, "use_beam_search", "unsupported_parameter"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "unsupported_parameter"),
        ({"messages": []}, None, None),
        ({"messages": [1]}, "messages", "unknown_parameter"),
        ({"max_completion_tokens": 5}, "max_completion_tokens", "unknown_parameter"),
        ({"tools": [1]}, "tools", "unknown_parameter"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str | None, code: str | None) -> None:
    if param is None:
        read(**{"prompt": "Hi", **fields})
        return
    error = refused(**fields)
    assert (error.param, error.code) == (param, code)


@pytest.mark.parametrize("fields", [{"best_of": 1}, {"best_of": 3, "n": 3}, {"suffix": None}, {"my_own": 1}])
def test_what_changes_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert read(prompt="Hi", **fields).request.raw_prompt == RawPrompt("Hi")


def test_what_later_stages_refuse_has_its_name_in_the_body() -> None:
    place = read(prompt="Hi").place
    assert [place(param) for param in ("input", "max_output_tokens", "top_logprobs", "top_k")] == [
        *("prompt", "max_tokens", "logprobs", "top_k")
    ]


# Answers

PROMPT = (1, 2, 3)


def events(tokens: list[int], size: int, raw: RawPrompt, top: int | None) -> list[ResponseEvent]:
    """The events of an output in chunks of ``size`` tokens."""
    begun = raw_started(raw, PROMPT, logprobs=top)
    scores = [TokenLogprob(-token / 1e6, ((token, -token / 1e6), (9, -5.0))[:top]) for token in (*PROMPT[1:], *tokens)]
    chunks = [
        TokenChunk(
            tuple(tokens[at : at + size]),
            () if top is None else tuple(scores[at + 2 : at + 2 + size]),
            prompt_logprobs=tuple(scores[:2]) if top is not None and not at else (),
        )
        for at in range(0, len(tokens), size)
    ]

    async def run() -> list[ResponseEvent]:
        frames: list[TokenFrame] = [begun, *chunks, GenerationFinished("stop", 0, 0.0)]
        pipeline = Pipeline.start("parse", ParseHarmony(load_encoding())).then("emit", Emit())
        async with pipeline.open(source_of(frames)) as emitted:
            return [event async for event in emitted if isinstance(event, ResponseEvent)]

    return asyncio.run(run())


async def test_chunks_are_padded_if_the_client_asks() -> None:
    wire = read(prompt="x", stream=True, stream_options={"include_obfuscation": True}).wire
    seen = await asyncio.to_thread(events, [5, 6], 1, RawPrompt("x"), None)
    async with wire.translated(source_of(seen)) as chunks:
        stream = b"".join([wire.encode(chunk) async for chunk in chunks]) + wire.end
    assert all("obfuscation" in chunk for chunk in chunks_of(stream))
    assert len({len(frame) % 16 for frame in stream.removesuffix(DONE).split(b"\n\n") if frame}) == 1


OUTPUTS = st.lists(st.one_of(st.integers(0, 5000), st.just(END)), min_size=1, max_size=12)


@given(OUTPUTS, st.integers(1, 12), st.booleans(), st.sampled_from([None, 0, 1, 2]))
def test_a_stream_adds_up_to_the_body_of_the_same_answer(
    tokens: list[int], size: int, echoes: bool, top: int | None
) -> None:
    raw = RawPrompt(load_encoding().decode(PROMPT), echoes=echoes)
    seen = events(tokens, size, raw, top)
    reading = read(prompt="x", echo=echoes, stream=True, stream_options={"include_usage": True})
    wire = reading.wire

    async def whole() -> Any:
        async with wire.translated(source_of(seen)) as chunks:
            return await wire.fold(chunks)

    async def stream() -> bytes:
        async with wire.translated(source_of(seen)) as chunks:
            return b"".join([wire.encode(chunk) async for chunk in chunks]) + wire.end

    body = json.loads(wire.json(asyncio.run(whole())))
    assert heard(asyncio.run(stream())) == body
    [choice] = body["choices"]
    assert body["usage"]["completion_tokens"] == len(tokens)
    if top is None:
        assert choice["logprobs"] is None
        return
    logprobs = choice["logprobs"]
    known = [None, *(-token / 1e6 for token in PROMPT[1:])] if echoes else []
    assert logprobs["token_logprobs"] == [*known, *(-token / 1e6 if token != END else -END / 1e6 for token in tokens)]
    assert len({len(values) for values in logprobs.values()}) == 1
    for token, logprob, likely in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert likely is None if logprob is None else likely[token] == logprob
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    assert logprobs["text_offset"][-1] <= len(choice["text"])
