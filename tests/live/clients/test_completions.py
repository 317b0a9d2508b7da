"""OpenAI's client over Completions: texts, tokens, the log probabilities of prompts, a stream, an error."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

LAID_OUT = (
    "<|start|>user<|message|>Say hello.<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>The user wants a greeting.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>"
)
"""A prompt with a thought that the model was trained on."""

HELLO = "Hello! How can I help you today?"


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny-gpt-oss", "temperature": 0, "max_tokens": 20, "prompt": prompt}
    return client.completions.create(**(asked | options))


def tokens_of(client: openai.OpenAI, prompt: str) -> list[int]:
    url = str(client.base_url).removesuffix("/v1/")
    tokens: list[int] = httpx.post(f"{url}/tokenize", json={"prompt": prompt}).json()["tokens"]
    return tokens


def test_a_text_is_continued(client: openai.OpenAI) -> None:
    completion = complete(client, LAID_OUT)
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, completion.object) == (HELLO, "stop", "text_completion")


def test_a_stream_adds_up_to_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(complete(client, LAID_OUT, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == HELLO
    assert chunks[-1].usage == complete(client, LAID_OUT).usage


def test_tokens_and_texts_are_the_same_prompts(client: openai.OpenAI) -> None:
    texts = [LAID_OUT, "Once upon a time"]
    by_text = complete(client, texts, n=2)
    by_token = complete(client, [tokens_of(client, text) for text in texts], n=2)
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_token.choices]
    assert by_text.choices[0].text == HELLO
    assert by_text.usage.prompt_tokens == sum(len(tokens_of(client, text)) for text in texts)


def test_prompts_are_scored_as_answers_are(client: openai.OpenAI) -> None:
    """The likeliest tokens of an answer have the same log probabilities when they are part of the prompt."""
    tokens = tokens_of(client, LAID_OUT)
    answer = complete(client, [tokens], logprobs=1).choices[0].logprobs
    scored = complete(client, [tokens + tokens_of(client, HELLO)], logprobs=1, echo=True, max_tokens=0).choices[0]
    logprobs = scored.logprobs
    written = logprobs.token_logprobs[len(tokens) :]
    assert scored.text == LAID_OUT + HELLO
    assert logprobs.token_logprobs[0] is None
    assert logprobs.tokens[len(tokens) :] == answer.tokens[: len(written)]
    assert written == pytest.approx(answer.token_logprobs[: len(written)], abs=0.05)
    assert sum(written) > sum(logprobs.token_logprobs[1 : len(tokens)])
    for logprob, top in list(zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[1:]:
        assert logprob in top.values()
        assert sum(map(math.exp, top.values())) < 1.001
    assert all(start <= end for start, end in pairwise(logprobs.text_offset))


def test_an_evaluation_gets_one_token_after_the_prompt(client: openai.OpenAI) -> None:
    """It sums the log probabilities up to the last one, which is not the prompt's."""
    tokens = tokens_of(client, LAID_OUT + HELLO)
    [choice] = complete(client, [tokens], logprobs=1, echo=True, max_tokens=1).choices
    assert (len(choice.logprobs.tokens), choice.logprobs.tokens[-1]) == (len(tokens) + 1, "<|return|>")


def test_a_benchmark_gets_all_tokens_that_it_wants(client: openai.OpenAI) -> None:
    completion = complete(client, LAID_OUT, max_tokens=40, extra_body={"ignore_eos": True})
    assert (completion.usage.completion_tokens, completion.choices[0].finish_reason) == (40, "length")


def test_a_text_is_held_to_a_constraint(client: openai.OpenAI) -> None:
    completion = complete(client, LAID_OUT, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})
    assert completion.choices[0].text.isdigit()
    assert (len(completion.choices[0].text), completion.choices[0].finish_reason) == (3, "stop")


def test_a_wrong_request_names_the_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, LAID_OUT, suffix="end")
    assert refused.value.param == "suffix"
