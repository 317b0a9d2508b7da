"""Anthropic's SDK: batches of messages, over a real engine."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import anthropic
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from anthropic.types.messages import MessageBatch
from anthropic.types.messages.batch_create_params import Request

MODEL = "tiny-gpt-oss"


@pytest.fixture(scope="module")
def claude(url: str) -> Generator[anthropic.Anthropic, None, None]:
    base = url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=base, api_key="none", max_retries=0) as client:
        yield client


def over(batches: Any, batch_id: str) -> MessageBatch:
    batch: MessageBatch
    while (batch := batches.retrieve(batch_id)).processing_status != "ended":
        time.sleep(0.05)
    return batch


def request(custom_id: str, text: str = "Say hello.", model: str = MODEL) -> Request:
    messages: Any = [{"role": "user", "content": text}]
    params = MessageCreateParamsNonStreaming(model=model, max_tokens=100, messages=messages, temperature=0)
    return Request(custom_id=custom_id, params=params)


def test_batch_of_messages(claude: anthropic.Anthropic) -> None:
    requests = [request("my-first-request"), request("my-second-request"), request("wrong", model="unknown")]
    message_batch = claude.messages.batches.create(requests=requests)
    assert message_batch.processing_status == "in_progress"
    ended = over(claude.messages.batches, message_batch.id)
    counts = ended.request_counts
    assert (counts.succeeded, counts.errored, counts.processing) == (2, 1, 0)
    texts = {}
    for result in claude.messages.batches.results(message_batch.id):
        match result.result.type:
            case "succeeded":
                texts[result.custom_id] = result.result.message.content[-1].text
            case "errored":
                assert (result.custom_id, result.result.error.error.type) == ("wrong", "not_found_error")
    assert texts == dict.fromkeys(["my-first-request", "my-second-request"], "Hello! How can I help you today?")
    assert message_batch.id in [each.id for each in claude.messages.batches.list(limit=1)]
    assert claude.messages.batches.delete(message_batch.id).type == "message_batch_deleted"


def test_batch_of_the_beta_is_cancelled(claude: anthropic.Anthropic) -> None:
    batches = claude.beta.messages.batches
    requests: Any = [request(f"request-{number}") for number in range(200)]
    batch = batches.create(requests=requests)
    assert batches.cancel(batch.id).processing_status in ("canceling", "ended")
    ended = over(batches, batch.id)
    kinds = [each.result.type for each in batches.results(batch.id)]
    assert {*kinds} <= {"succeeded", "canceled"}
    assert (len(kinds), kinds.count("canceled")) == (200, ended.request_counts.canceled)
