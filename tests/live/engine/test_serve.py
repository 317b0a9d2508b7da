from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from tests.support.serve_command import Command


@pytest.fixture
def client(server: Command) -> openai.OpenAI:
    return server.client


def test_log_has_the_time_of_loading_and_no_lines_of_vllm(server: Command) -> None:
    log = server.store.with_name("serve.log").read_text()
    assert re.search(r"Loading \S+\n", log)
    assert re.search(r"Loaded \S+ in .+\n", log)
    assert not re.search(r"pid=\d+\) INFO", log)


def test_second_question_sees_the_first(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny-gpt-oss", input="Remember the number seven.", temperature=0)
    second = client.responses.create(
        model="tiny-gpt-oss", input="What did I say before?", previous_response_id=first.id, temperature=0
    )
    assert second.output_text == "You asked me to remember the number seven."


def test_conversation_keeps_three_turns(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    questions = ["Say hello.", "Remember the number seven.", "What did I say before?"]
    answers = [
        client.responses.create(model="tiny-gpt-oss", conversation=conversation.id, input=text, temperature=0)
        for text in questions
    ]
    assert answers[0].output_text == "Hello! How can I help you today?"
    sizes = [answer.usage.input_tokens for answer in answers if answer.usage]
    assert sizes == sorted(set(sizes))
    kept: list[Any] = list(client.conversations.items.list(conversation.id, order="asc"))
    inputs = [item.content[0].text for item in kept if item.type == "message" and item.role == "user"]
    assert inputs == questions
    assert [item.id for item in kept if item.type != "message" or item.role != "user"] == [
        item.id for answer in answers for item in answer.output
    ]


@pytest.mark.defect("B22")
def test_background_response_can_be_cancelled(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny-gpt-oss", input="Never stop talking.", temperature=0, background=True
    )
    assert response.status == "queued"
    events: Any = client.responses.retrieve(response.id, stream=True)
    with events:
        assert any(event.type == "response.output_text.delta" for event in events)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled"
    assert cancelled.output
    assert cancelled.usage is not None
    assert cancelled.usage.output_tokens > 0
    assert client.responses.cancel(response.id) == client.responses.retrieve(response.id) == cancelled


def test_truncated_response_is_incomplete(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny-gpt-oss", input="Never stop talking.", temperature=0, max_output_tokens=40
    )
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    item = response.output[-1]
    assert item.type == "message"
    assert item.status == "incomplete"
