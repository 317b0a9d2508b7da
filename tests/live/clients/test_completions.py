"""OpenAI's client over Completions: texts, tokens, the log probabilities of prompts, a stream, an error."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from tests.support.processes import PATIENCE

HELLO = "Hello! How can I help you today?"


class Prompt(NamedTuple):
    """A prompt that the server lays out for its model up to the answer, and the token that ends the answer."""

    text: str
    end: str


def posted(client: openai.OpenAI, path: str, **body: Any) -> Any:
    url = str(client.base_url).removesuffix("/v1/")
    return httpx.post(f"{url}/{path}", json=body, timeout=PATIENCE).raise_for_status().json()


@pytest.fixture(scope="module")
def prompt(client: openai.OpenAI) -> Prompt:
    messages = [{"role": "user", "content": "Say hello."}]
    asked = posted(client, "detokenize", tokens=posted(client, "tokenize", messages=messages)["tokens"])["prompt"]
    if asked.endswith("<|start|>assistant"):
        thought = "<|channel|>analysis<|message|>The user wants a greeting.<|end|><|start|>assistant"
        return Prompt(f"{asked}{thought}<|channel|>final<|message|>", "<|return|>")
    return Prompt(f"{asked}<think>\n\n</think>\n\n", "<|im_end|>")


def complete(client: openai.OpenAI, given: Any, **options: Any) -> Any:
    asked: dict[str, Any] = {"model": "tiny-gpt-oss", "temperature": 0, "max_tokens": 20, "prompt": given}
    return client.completions.create(**(asked | options))


def tokens_of(client: openai.OpenAI, text: str) -> list[int]:
    tokens: list[int] = posted(client, "tokenize", prompt=text)["tokens"]
    return tokens


def test_a_text_is_continued(client: openai.OpenAI, prompt: Prompt) -> None:
    completion = complete(client, prompt.text)
    [choice] = completion.choices
    assert (choice.text, choice.finish_reason, completion.object) == (HELLO, "stop", "text_completion")


def test_a_stream_adds_up_to_the_same_text(client: openai.OpenAI, prompt: Prompt) -> None:
    chunks = list(complete(client, prompt.text, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == HELLO
    assert chunks[-1].usage == complete(client, prompt.text).usage


def test_tokens_and_texts_are_the_same_prompts(client: openai.OpenAI, prompt: Prompt) -> None:
    texts = [prompt.text, "Once upon a time"]
    by_text = complete(client, texts, n=2)
    by_token = complete(client, [tokens_of(client, text) for text in texts], n=2)
    assert [choice.index for choice in by_text.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in by_text.choices] == [choice.text for choice in by_token.choices]
    assert by_text.choices[0].text == HELLO
    assert by_text.usage.prompt_tokens == sum(len(tokens_of(client, text)) for text in texts)


def test_prompts_are_scored_as_answers_are(client: openai.OpenAI, prompt: Prompt) -> None:
    """The likeliest tokens of an answer have the same log probabilities when they are part of the prompt."""
    tokens = tokens_of(client, prompt.text)
    answer = complete(client, [tokens], logprobs=1).choices[0].logprobs
    scored = complete(client, [tokens + tokens_of(client, HELLO)], logprobs=1, echo=True, max_tokens=0).choices[0]
    logprobs = scored.logprobs
    written = logprobs.token_logprobs[len(tokens) :]
    assert scored.text == prompt.text + HELLO
    assert logprobs.token_logprobs[0] is None
    assert logprobs.tokens[len(tokens) :] == answer.tokens[: len(written)]
    assert written == pytest.approx(answer.token_logprobs[: len(written)], abs=0.05)
    assert sum(written) > sum(logprobs.token_logprobs[1 : len(tokens)])
    for logprob, top in list(zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True))[1:]:
        assert logprob in top.values()
        assert sum(map(math.exp, top.values())) < 1.001
    assert all(start <= end for start, end in pairwise(logprobs.text_offset))


def test_an_evaluation_gets_one_token_after_the_prompt(client: openai.OpenAI, prompt: Prompt) -> None:
    """It sums the log probabilities up to the last one, which is not the prompt's."""
    tokens = tokens_of(client, prompt.text + HELLO)
    [choice] = complete(client, [tokens], logprobs=1, echo=True, max_tokens=1).choices
    assert (len(choice.logprobs.tokens), choice.logprobs.tokens[-1]) == (len(tokens) + 1, prompt.end)


def test_a_benchmark_gets_all_tokens_that_it_wants(client: openai.OpenAI, prompt: Prompt) -> None:
    completion = complete(client, prompt.text, max_tokens=40, extra_body={"ignore_eos": True})
    assert (completion.usage.completion_tokens, completion.choices[0].finish_reason) == (40, "length")


def test_a_text_is_held_to_a_constraint(client: openai.OpenAI, prompt: Prompt) -> None:
    completion = complete(client, prompt.text, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})
    assert completion.choices[0].text.isdigit()
    assert (len(completion.choices[0].text), completion.choices[0].finish_reason) == (3, "stop")


def test_a_wrong_request_names_the_parameter(client: openai.OpenAI, prompt: Prompt) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, prompt.text, suffix="end")
    assert refused.value.param == "suffix"
