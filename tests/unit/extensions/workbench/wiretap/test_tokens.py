"""Recordings have the tokens of the first choice if the server sends all their ids, and none if it does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.extensions.workbench.wiretap.token_file import Asked, encoding_of, is_held, unfit, write_tokens
from penstock.extensions.workbench.wiretap.tokens import NONE_CAME, Tokens
from penstock.pipeline.frames import GenerationFinished, GenerationStarted, TokenChunk, TokenFrame, TokenLogprob
from penstock.pipeline.recordings.format import FORMAT, End, Failure, Header, Recording, read_recording
from penstock.pipeline.recordings.wire import WireBody, WireEvent
from tests.support.token_upstream import PROMPT, answers

IDS = st.integers(0, 2**32 - 1)
CHUNKS = st.lists(st.lists(IDS, min_size=1, max_size=4), min_size=1, max_size=6)
WANTED: dict[str, Any] = {"return_token_ids": True}


def read(events: Sequence[Any], *, is_body: bool = False) -> Tokens:
    tokens = Tokens()
    for at, event in enumerate(events, start=1):
        tokens.read(float(at), WireBody(data=event) if is_body else WireEvent(data=event))
    return tokens


def streamed(chunks: Sequence[Sequence[int]], body: Any = WANTED, *, is_chat: bool = True) -> list[Any]:
    return answers(chunks, body, is_chat=is_chat)[:-1]


def ids(tokens: Tokens) -> list[int]:
    return [token for _, chunk in tokens.chunks for token in chunk.token_ids]


@given(CHUNKS, st.booleans(), st.booleans(), st.sampled_from([{}, {"logprobs": True}]))
def test_tokens_are_those_of_the_answer(
    chunks: list[list[int]], is_chat: bool, is_body: bool, more: dict[str, Any]
) -> None:
    events = answers(chunks, WANTED | more, is_chat=is_chat)
    tokens = read(events[-1:] if is_body else events[:-1], is_body=is_body)
    assert tokens.problem == ""
    assert ids(tokens) == [token for chunk in chunks for token in chunk]
    assert tokens.prompt == PROMPT
    assert tokens.finished(1.0) == GenerationFinished("stop", 0, 1.0)
    for _, chunk in tokens.chunks:
        assert [each.logprob for each in chunk.logprobs] == ([-2.0] * len(chunk.token_ids) if more else [])
        assert all(each.top == () for each in chunk.logprobs)  # their names are texts


@given(CHUNKS, st.booleans(), st.data())
def test_without_some_ids_there_are_no_tokens(chunks: list[list[int]], is_chat: bool, data: st.DataObject) -> None:
    events = streamed(chunks, is_chat=is_chat)
    spoken = [event for event in events if event["choices"] and "token_ids" in event["choices"][0]]
    del data.draw(st.sampled_from(spoken))["choices"][0]["token_ids"]
    tokens = read(events)
    assert tokens.problem in ("the ids of some are missing", NONE_CAME)
    assert ids(tokens) == []
    assert tokens.are_partly_known


@given(CHUNKS, st.data())
def test_lost_events_are_noticed(chunks: list[list[int]], data: st.DataObject) -> None:
    events = streamed(chunks)
    del events[data.draw(st.integers(1, len(chunks)))]
    assert "the server counts" in read(events).problem or len(chunks) == 1


def test_names_of_tokens_may_be_their_ids() -> None:
    for is_chat in (True, False):
        body = {"logprobs": True, "return_tokens_as_token_ids": True}
        tokens = read(streamed([[7], [4, 5]], body, is_chat=is_chat))
        assert (tokens.problem, ids(tokens), tokens.prompt, tokens.prompt_tokens) == ("", [7, 4, 5], (), 3)
        (_, first), *_ = tokens.chunks
        assert first == TokenChunk((7,), (TokenLogprob(-2.0, ((8, -1.0), (7, -2.0))),))


def test_alternative_that_is_the_token_itself_says_nothing_of_the_others() -> None:
    probable = {"token": "token_id:7", "logprob": -2.0, "top_logprobs": [{"token": "token_id:7", "logprob": -2.0}]}
    said = {"index": 0, "delta": {"content": "x"}, "token_ids": [7], "logprobs": {"content": [probable]}}
    ((_, chunk),) = read([{"choices": [said]}]).chunks
    assert chunk.logprobs == (TokenLogprob(-2.0),)


def test_log_probabilities_are_those_of_all_tokens_or_none() -> None:
    events = streamed([[1], [2]], WANTED | {"logprobs": True})
    events[2]["choices"][0]["logprobs"] = None
    assert [chunk.logprobs for _, chunk in read(events).chunks] == [(), ()]


def test_only_the_first_choice_counts() -> None:
    events = streamed([[1], [2]])
    other = {"index": 1, "delta": {"content": "x"}, "token_ids": [9], "finish_reason": "length"}
    tokens = read([events[0], {"choices": [other]}, *events[1:]])
    assert (ids(tokens), tokens.finish_reason, tokens.problem) == ([1, 2], "stop", "")


JSON = st.recursive(
    st.none() | st.integers() | st.text(max_size=3) | st.booleans(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "token_ids", "index", "logprobs", "content", "usage", "error"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(st.lists(JSON, max_size=4), st.booleans())
def test_any_answer_can_be_read(values: list[Any], is_body: bool) -> None:
    tokens = read(values, is_body=is_body)
    assert tokens.problem or ids(tokens)


@pytest.mark.parametrize(
    ("sent", "is_constrained"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_schema"}}, True),
        ({"structured_outputs": {"regex": "a"}}, True),
        ({"guided_json": {}}, True),
        ({"guided_choice": ["a"]}, True),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, False),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, True),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}], "tool_choice": "none"}, False),
        ({"tool_choice": "required"}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": 1, "tool_choice": 1, "response_format": 1}, False),
    ],
)
def test_what_may_hold_the_output_to_a_grammar(sent: Any, is_constrained: bool) -> None:
    assert is_held(sent) == is_constrained


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        ({"messages": [{"role": "user", "content": "Hi"}, {"content": [{"type": "text", "text": "Hi"}, "x"]}]}, ""),
        ({"messages": [{"content": [{"type": "image_url"}]}]}, "the prompt has more than text"),
        ({"messages": [1], "echo": False}, ""),
        ({"use_beam_search": True}, "they depend on use_beam_search"),
        ({"echo": True}, "they depend on echo"),
    ],
)
def test_tokens_that_say_nothing_by_themselves(sent: Any, problem: str) -> None:
    assert unfit(sent) == problem


def test_encoding_is_that_of_the_config_or_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    assert encoding_of(str(tmp_path), (1,)) == "harmony"
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert encoding_of(str(tmp_path), (200006, 200008)) == "chat"
    assert encoding_of("somewhere/model", (200006, 1, 200008)) == "harmony"
    assert encoding_of("somewhere/model", (1, 200006, 200008)) == "chat"
    assert encoding_of("openai/gpt-oss-20b", (1,)) == "harmony"


def written(folder: Path, sent: dict[str, Any], events: Sequence[Any], end: End | None = None) -> Recording:
    header = Header(FORMAT, "m", dialect="chat", path="/v1/chat/completions", left_out=("x",), source="s")
    write_tokens(folder, header, Asked.of(sent, sent), read(events), 9.0, end or End(1))
    return read_recording(folder / "tokens.jsonl", TokenFrame)


HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def test_frames_have_the_facts_of_the_request(tmp_path: Path) -> None:
    sampled = {"temperature": 0, "top_p": 0.5, "seed": 3, "presence_penalty": 1, "max_tokens": 9, "top_k": 4}
    kwargs = {"chat_template_kwargs": {"enable_thinking": False}, "response_format": {"type": "json_object"}}
    recording = written(tmp_path, {**HI, **sampled, **kwargs, **WANTED, "model": "m"}, streamed([[4], [5, 6]]))
    assert recording.header == Header(FORMAT, "m", "chat", "s", dialect="chat")
    started, *chunks, finished = recording.frames
    assert isinstance(started, GenerationStarted)
    sampling = started.facts.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0, 0.5, 3, 4)
    assert (sampling.presence_penalty, sampling.max_tokens) == (1, 9)
    assert started.prompt == PROMPT
    assert started.chat is not None
    assert started.chat.variables == {"enable_thinking": False}
    assert started.held_to_grammar
    assert [(timed.at, timed.frame) for timed in recording.timed[1:-1]] == [
        (2.0, TokenChunk((4,))),
        (3.0, TokenChunk((5, 6))),
    ]
    assert [chunk.token_ids for chunk in chunks] == [(4,), (5, 6)]
    assert finished == GenerationFinished("stop", 0, 9.0)


def test_sampling_of_a_request_that_penstock_refuses(tmp_path: Path) -> None:
    refused = {**HI, "audio": {}, "temperature": 0, "repetition_penalty": 1.1, "model": "m"}
    started, *_ = written(tmp_path, refused, streamed([[4]])).frames
    assert (started.facts.sampling.temperature, started.facts.sampling.repetition_penalty) == (0, 1.1)


@pytest.mark.parametrize("end", [End(1, Failure("EngineFailed", "It broke off.")), End(1, abandoned=True)])
def test_answer_that_was_broken_off_has_its_tokens_and_no_end(tmp_path: Path, end: End) -> None:
    recording = written(tmp_path, {**HI, "model": "m"}, streamed([[4], [5]])[:2], end)
    assert [type(frame) for frame in recording.frames] == [GenerationStarted, TokenChunk]
    assert (recording.end.failure, recording.end.abandoned) == (end.failure, end.abandoned)


def test_error_in_the_stream_is_the_failure(tmp_path: Path) -> None:
    events = [*streamed([[4], [5]])[:2], {"error": {"message": "It is dead."}}]
    recording = written(tmp_path, {**HI, "model": "m"}, events)
    assert recording.end.failure == Failure("EngineFailed", "It is dead.")
