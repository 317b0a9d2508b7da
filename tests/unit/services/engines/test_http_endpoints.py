from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.pipeline.errors import EngineFailed
from penstock.pipeline.frames import TokenLogprob
from penstock.services.engines import http_endpoints

either = pytest.mark.parametrize("endpoint", http_endpoints.ENDPOINTS, ids=lambda endpoint: endpoint.path)

chunks = st.lists(st.lists(st.integers(0, 2**31), max_size=4), max_size=8)


def stream(chunks: Sequence[Sequence[int]], end: str = "\n") -> bytes:
    """The bytes of vLLM's event stream for these chunks, with the keys of both endpoints."""
    events: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "text": "é\\n", "token_ids": chunk, "finish_reason": None, "logprobs": None}]}
        for chunk in chunks
    ]
    events.append({"choices": [{"index": 0, "token_ids": [], "finish_reason": "stop"}]})
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    events.append({"choices": [], "usage": usage})
    lines = [": a comment", *(f"data: {json.dumps(event, ensure_ascii=False)}" for event in events), "data: [DONE]"]
    return "".join(line + end + end for line in lines).encode()


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:end] for start, end in pairwise(places)]


@either
@given(chunks=chunks, cuts=st.lists(st.integers(0, 10_000), max_size=30), end=st.sampled_from(["\n", "\r\n"]))
def test_packet_boundaries_do_not_change_the_answer(
    endpoint: http_endpoints.Endpoint[Any], chunks: list[list[int]], cuts: list[int], end: str
) -> None:
    answer = http_endpoints.Answer(endpoint, None)
    read = [answer.feed(piece) for piece in pieces(stream(chunks, end), cuts)]
    assert [token for chunk in read if chunk for token in chunk.token_ids] == [token for c in chunks for token in c]
    assert all(chunk is None or chunk.token_ids for chunk in read)
    assert (answer.finish_reason, answer.cached_tokens, answer.prompt_tokens) == ("stop", 4, 7)
    assert (answer.is_complete, answer.fault) == (True, None)


def test_event_may_be_long() -> None:
    body = {"choices": [{"prompt_token_ids": list(range(200_000)), "token_ids": [5], "finish_reason": None}]}
    data = b"data: " + json.dumps(body).encode() + b"\n\n"
    answer = http_endpoints.Answer(http_endpoints.COMPLETIONS, None)
    read = [answer.feed(data[at : at + 1000]) for at in range(0, len(data), 1000)]
    assert [chunk.token_ids for chunk in read if chunk] == [(5,)]


@pytest.mark.parametrize(
    "data", [b"data: {", b"data: []", b'data: {"choices": 5}', b'data: {"choices": [{"token_ids": ["x"]}]}']
)
def test_unreadable_event_is_a_fault(data: bytes) -> None:
    answer = http_endpoints.Answer(http_endpoints.GENERATE, None)
    chunk = answer.feed(b'data: {"choices": [{"token_ids": [5]}]}\n\n' + data + b"\n\n")
    assert chunk is not None
    assert chunk.token_ids == (5,)
    assert isinstance(answer.fault, EngineFailed)


def test_error_in_the_stream_is_a_fault() -> None:
    answer = http_endpoints.Answer(http_endpoints.GENERATE, None)
    assert answer.feed(b'data: {"error": {"message": "No.", "type": "x", "param": "seed", "code": 400}}\n\n') is None
    assert isinstance(answer.fault, http_endpoints.RequestRefused)
    assert (answer.fault.status, str(answer.fault), answer.fault.param) == (400, "No.", "seed")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error": "Unauthorized"}', "Unauthorized"),
        (b'{"error": {"message": "No.", "code": 404}}', "No."),
        (b'{"detail": "Not Found"}', "The engine answers 404."),
        (b"<html>", "The engine answers 404."),
        (b"", "The engine answers 404."),
    ],
)
def test_refusals_are_read_in_any_format(body: bytes, words: str) -> None:
    refused = http_endpoints.read_refusal(404, body)
    assert (refused.status, str(refused)) == (404, words)


def test_tokens_excluded_by_a_grammar_are_no_alternatives() -> None:
    others = b'[{"token_id": 5, "logprob": -0.1}, {"token_id": 6, "logprob": -9999.0}]'
    generated = b'{"token_id": 5, "logprob": -0.1, "top_logprobs": ' + others + b"}"
    data = b'data: {"choices": [{"token_ids": [5], "logprobs": {"content": [' + generated + b"]}}]}\n\n"
    chunk = http_endpoints.Answer(http_endpoints.GENERATE, 2).feed(data)
    assert chunk is not None
    assert chunk.logprobs == (TokenLogprob(-0.1, ((5, -0.1),)),)
    completed = b'{"token_logprobs": [-0.1], "top_logprobs": [{"token_id:5": -0.1, "token_id:6": -9999.0}]}'
    chunk = http_endpoints.Answer(http_endpoints.COMPLETIONS, 2).feed(
        b'data: {"choices": [{"token_ids": [5], "logprobs": ' + completed + b"}]}\n\n"
    )
    assert chunk is not None
    assert chunk.logprobs == (TokenLogprob(-0.1, ((5, -0.1),)),)
